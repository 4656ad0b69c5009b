"""Real images with their captions, and prompts: each has an id, its position in the dataset or line in a file, that keys the noise of what is drawn.

A dataset is an image MDS, on a disk or in object storage, or a folder of images with a .txt file next to each.
"""

import hashlib
import json
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import torch

from diffusion.common.files import lock, read_json, write_text
from diffusion.common.storage import Folder, open_folder, scratch_for
from diffusion.common.text import counted
from diffusion.contracts.errors import DataError, InputError
from diffusion.contracts.manifest import MANIFEST_NAME, Manifest
from diffusion.datasets.decode import ImageError, size_of
from diffusion.datasets.keyed_random import Draw, by_id, random_bits, uniform
from diffusion.datasets.shards import agreed_shards, captions_of, pick, read_shard
from diffusion.datasets.transforms import covered

SUFFIXES = ('.jpg', '.jpeg', '.png', '.webp')
OTHER_SUFFIXES = ('.apng', '.avif', '.bmp', '.gif', '.heic', '.heif', '.jfif', '.jpe', '.tif', '.tiff')  # as data_prep: counted, not opened
IMAGES_PER_PART = 256  # of a folder
CHOSEN_BY = 'the first by a keyed hash of their position'
CAPTION_CHOICE = 'one of several by a draw keyed by seed and image'


@dataclass(frozen=True)
class RealImage:
    """An image of a dataset."""

    id: int  # its position
    key: str  # MDS key or file name
    content: bytes  # encoded
    captions: Sequence[tuple[str, float]]  # with weights; empty if it has none

    def caption(self, seed: int) -> str | None:
        """One of the captions, always the same for a seed; None if there is none."""
        if not self.captions:
            return None
        return pick(self.captions, uniform(seed, by_id(torch.tensor([self.id])), Draw.CAPTION, 1).item())


class RealImages:
    """A dataset of images in parts, each of which is read as a whole."""

    where: str  # path or URL
    identity: str  # digest that changes with any image or caption
    left_out: Mapping[str, Sequence[str]] = {}  # files that are no images of the dataset, by the reason
    parts: list[int]  # first id of each part, and the end of the last one

    def read(self, part: int, wanted: Collection[int]) -> Iterator[RealImage]:
        """Yield the images of one part whose ids are wanted, in the order of their ids; DataError if it is damaged."""
        raise NotImplementedError

    def __len__(self) -> int:
        return self.parts[-1]

    def chosen(self, samples: int, seed: int) -> list[int]:
        """Return positions in a fixed order that looks random, so that those of fewer samples are the first of those of more."""
        if samples > len(self):
            raise DataError(f'{self.where}: holds {counted(len(self), "image")}, {samples:,} are asked for; set --samples {len(self)} or less')
        order = random_bits(seed, by_id(torch.arange(len(self))), Draw.CAPTION, 2)[:, 1]  # the first word chooses the caption
        return torch.argsort(order, stable=True)[:samples].tolist()

    def parts_with(self, wanted: Collection[int]) -> list[int]:
        """The parts that hold any of the ids, ascending."""
        return sorted({bisect_right(self.parts, i) - 1 for i in wanted})

    def batches(self, parts: Iterable[int], wanted: Collection[int], size: int) -> Iterator[list[RealImage]]:
        """Yield the wanted images of some parts in the order of the dataset, `size` at a time."""
        wanted = frozenset(wanted)
        chosen = (image for part in parts for image in self.read(part, wanted))
        while batch := list(islice(chosen, size)):
            yield batch

    def image(self, image_id: int) -> RealImage:
        """One image of the dataset."""
        (part,) = self.parts_with([image_id])
        return next(iter(self.read(part, {image_id})))

    def pixels(self, image: RealImage, resolution: int) -> torch.Tensor:
        """(3, R, R) uint8 as training sees it; DataError if it cannot be decoded."""
        try:
            return covered(image.content, resolution, resolution)[0]
        except ImageError as error:
            raise DataError(f'{self.where}: {image.key}: {error}; remove it, or convert the images, which leaves such ones out') from error

    @property
    def text_of_left_out(self) -> str:
        """`3 files (a tiff file: 2, such as a.tiff; ...)`; '' if there are none."""
        total = sum(map(len, self.left_out.values()))
        reasons = (f'{reason}: {len(names):,}, such as {names[0]}' for reason, names in self.left_out.items())
        return f'{counted(total, "file")} ({"; ".join(reasons)})' if total else ''


def open_images(where: str) -> RealImages:
    """Open a folder or URL; DataError or ManifestError if it is no dataset of images, or holds none."""
    folder = open_folder(where)
    if '://' in where or (Path(where) / MANIFEST_NAME).is_file():
        return MdsImages(folder)
    if not Path(where).is_dir():
        kind = 'is a file, and none of statistics (.safetensors, .npz)' if Path(where).is_file() else 'no such folder'
        raise DataError(f'{where}: {kind}; name an image MDS, a folder of images with .txt captions, or a file of statistics')
    return FolderImages(folder)


class MdsImages(RealImages):
    """An image MDS that data_prep.convert wrote; a part is a shard, whose SHA-256 is compared when it is read."""

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


class FolderImages(RealImages):
    """Images in any depth of a local folder, by name; `NAME.txt` holds the caption of `NAME.jpg`.

    A file that is no JPEG, PNG or WebP by its name or its first bytes is left out and counted; one that is damaged further on is an error when it
    is read.
    """

    def __init__(self, folder: Folder):
        self.where = folder.url
        left_out: dict[str, list[str]] = {}
        self.left_out = left_out
        self._names: list[str] = []
        digest = hashlib.sha256()
        for name in folder.files():
            suffix = PurePosixPath(name).suffix.lower()
            if suffix in OTHER_SUFFIXES:
                left_out.setdefault(f'a {suffix[1:]} file', []).append(name)
            if suffix not in SUFFIXES:
                continue
            content, captions = self._content(name)
            try:
                size_of(content)
            except ImageError as error:
                left_out.setdefault(str(error), []).append(name)
                continue
            self._names.append(name)
            digest.update(json.dumps([name, hashlib.sha256(content).hexdigest(), captions]).encode())
        if not self._names:
            found = f'; left out: {self.text_of_left_out}' if left_out else f' and no {MANIFEST_NAME} of an MDS dataset'
            raise DataError(f'{folder.url}: holds no image ({", ".join(SUFFIXES)}){found}')
        self.parts = [*range(0, len(self._names), IMAGES_PER_PART), len(self._names)]
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
        except OSError as error:
            remedy = 'make it readable (chmod u+r if it is yours), or move it out of the folder'
            raise DataError(f'{error.filename or path}: cannot be read: {error.strerror or error}; {remedy}') from error
        except UnicodeDecodeError as error:
            raise DataError(f'{text}: a caption that is no UTF-8: {error}; write it anew, or move it out of the folder') from error


class Prompt(NamedTuple):
    """A text to draw, and what keys its noise: position of the image in the dataset, or line of the file, from 0."""

    id: int
    text: str


def read_prompts_file(path: Path) -> list[Prompt]:
    """Read a prompt a line.

    Raises:
        InputError: it cannot be read, is empty, or has an empty line: leaving one out would move the ids of all that follow.
    """
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f'{path}: cannot be read: {error}') from error
    empty = [number for number, line in enumerate(lines, start=1) if not line.strip()]
    if empty:
        numbers = ', '.join(map(str, empty[:5])) + (' ...' if len(empty) > 5 else '')
        raise InputError(f'{path}: {counted(len(empty), "empty line")} ({numbers}); a line number keys the noise of its prompt: remove or fill them')
    if not lines:
        raise InputError(f'{path}: holds no prompt; write one a line')
    return [Prompt(i, line.strip()) for i, line in enumerate(lines)]


def captions_as_prompts(images: RealImages, ids: Sequence[int], seed: int, cache: Path) -> list[Prompt]:
    """Return one caption of each of these images, in the order of `ids`; DataError if an image has none.

    The first process that needs them reads the dataset and leaves the result in the folder `cache`; others wait for it.
    """
    digest = hashlib.sha256(json.dumps([images.identity, seed, ids]).encode()).hexdigest()[:16]
    store = cache / f'prompts-{digest}.json'
    cache.mkdir(parents=True, exist_ok=True)
    with store.with_suffix('.lock').open('w') as file:
        lock(file)
        if not store.exists():
            found, silent = dict[int, str | None](), list[str]()
            for (image,) in images.batches(images.parts_with(ids), ids, 1):
                found[image.id] = image.caption(seed)
                if not found[image.id]:
                    silent.append(image.key)
            if silent:
                what = f'{counted(len(silent), "image")} without a caption, {silent[0]} for one'
                raise DataError(f'{images.where}: {what}; add captions, or name --prompts FILE')
            write_text(store, json.dumps([[i, found[i]] for i in ids], ensure_ascii=False))
    return [Prompt(*pair) for pair in read_json(store, list[tuple[int, str]], DataError, 'remove it and run the same command again')]
