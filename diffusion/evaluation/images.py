"""Real images with their captions: an image MDS, on a disk or in object storage, or a folder of images with a .txt file next to each."""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path, PurePosixPath
from typing import Protocol

import torch

from diffusion.common.storage import Folder, open_folder, scratch_for
from diffusion.common.text import counted
from diffusion.contracts.errors import DataError
from diffusion.contracts.manifest import MANIFEST_NAME, Manifest
from diffusion.datasets.captions import captions_of, pick
from diffusion.datasets.keyed_random import Draw, by_id, random_bits, uniform
from diffusion.datasets.shards import agreed_shards, read_shard

SUFFIXES = ('.jpg', '.jpeg', '.png', '.webp')
IMAGES_PER_PART = 256  # of a folder
CHOSEN_BY = 'the first by a keyed hash of their position'
CAPTION_CHOICE = 'one of several by a draw keyed by seed and image'


@dataclass(frozen=True)
class RealImage:
    """An image of a dataset.

    Attributes:
        id: its position in the dataset.
        key: MDS key or file name.
        content: encoded.
        captions: with weights; empty if it has none.
    """

    id: int
    key: str
    content: bytes
    captions: Sequence[tuple[str, float]]

    def caption(self, seed: int) -> str | None:
        """One of the captions, always the same for a seed; None if there is none."""
        if not self.captions:
            return None
        return pick(self.captions, uniform(seed, by_id(torch.tensor([self.id])), Draw.CAPTION, 1).item())


class RealImages(Protocol):
    """A dataset of images in parts, each of which is read as a whole.

    Attributes:
        where: path or URL.
        identity: digest that changes with any image or caption.
        parts: first id of each part, and the end of the last one.
    """

    where: str
    identity: str
    parts: list[int]

    def read(self, part: int, wanted: Collection[int]) -> Iterator[RealImage]:
        """The images of one part whose ids are wanted, in the order of their ids.

        Raises:
            DataError: the part is damaged.
        """


def open_images(where: str) -> RealImages:
    """Raises DataError, ManifestError: it is no dataset of images."""
    folder = open_folder(where)
    if '://' in where or (Path(where) / MANIFEST_NAME).is_file():
        return MdsImages(folder)
    if not Path(where).is_dir():
        raise DataError(f'{where}: no such folder; name an image MDS, a folder of images with .txt captions, or a file of statistics')
    return FolderImages(folder)


def chosen_ids(images: RealImages, samples: int, seed: int) -> list[int]:
    """`samples` positions in a fixed order that looks random, so that those of fewer samples are the first of those of more.

    Raises:
        DataError: there are fewer images.
    """
    available = images.parts[-1]
    if samples > available:
        raise DataError(f'{images.where}: holds {counted(available, "image")}, {samples:,} are asked for; set --samples {available} or less')
    order = random_bits(seed, by_id(torch.arange(available)), Draw.CAPTION, 2)[:, 1]  # the first word chooses the caption
    return torch.argsort(order, stable=True)[:samples].tolist()


def parts_with(images: RealImages, wanted: Collection[int]) -> list[int]:
    """The parts that hold any of the ids, ascending."""
    return sorted({bisect_right(images.parts, i) - 1 for i in wanted})


class MdsImages:
    """An image MDS that data_prep.convert wrote; a part is a shard, whose SHA-256 is compared when it is read.

    Raises:
        DataError, ManifestError: it is damaged, or holds latents.
    """

    def __init__(self, folder: Folder):
        manifest = Manifest.read(folder.url)
        if manifest.kind != 'images':
            raise DataError(f'{folder.url}: manifest kind is {manifest.kind}; images are compared with images: name the dataset it was encoded from')
        self.where, self.folder, self._shards = folder.url, folder, agreed_shards(folder, manifest)
        if not manifest.num_samples:
            raise DataError(f'{folder.url}: holds no image')
        self.parts = list(accumulate((shard.num_samples for shard in self._shards), initial=0))
        self.identity = hashlib.sha256(json.dumps([shard.fingerprint for shard in self._shards]).encode()).hexdigest()

    def read(self, part: int, wanted: Collection[int]) -> Iterator[RealImage]:
        with scratch_for() as scratch:
            for i, sample in enumerate(read_shard(self.folder, self._shards[part], scratch), start=self.parts[part]):
                if i in wanted:
                    yield RealImage(i, sample['key'], sample['image'], captions_of(sample))


class FolderImages:
    """Images in any depth of a local folder, by name; `NAME.txt` holds the caption of `NAME.jpg`.

    Raises:
        DataError: it holds no image.
    """

    def __init__(self, folder: Folder):
        self.where = folder.url
        files = folder.files()
        self._names = [name for name in files if PurePosixPath(name).suffix.lower() in SUFFIXES]
        if not self._names:
            raise DataError(f'{folder.url}: holds no image ({", ".join(SUFFIXES)}) and no {MANIFEST_NAME} of an MDS dataset')
        self.parts = [*range(0, len(self._names), IMAGES_PER_PART), len(self._names)]
        digest = hashlib.sha256()
        for name in self._names:
            content, captions = self._content(name)
            digest.update(json.dumps([name, hashlib.sha256(content).hexdigest(), captions]).encode())
        self.identity = digest.hexdigest()

    def read(self, part: int, wanted: Collection[int]) -> Iterator[RealImage]:
        for i in range(self.parts[part], self.parts[part + 1]):
            if i in wanted:
                yield RealImage(i, self._names[i], *self._content(self._names[i]))

    def _content(self, name: str) -> tuple[bytes, list[tuple[str, float]]]:
        path = Path(self.where, name)
        text = path.with_suffix('.txt')
        try:
            caption = text.read_text().strip() if text.is_file() else ''
            return path.read_bytes(), [(caption, 1.0)] if caption else []
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f'{path}: cannot be read, or the caption next to it: {error}') from error
