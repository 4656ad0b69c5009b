"""Features of images as parts on the disk, each written whole: what one part of a dataset or one chunk of drawn images gave.

A network computes features of fixed batches, the last one padded, so that they are the same whoever computes them.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from diffusion.common.files import replacing, write_text
from diffusion.contracts.errors import DataError
from diffusion.datasets.decode import ImageError
from diffusion.datasets.transforms import SQUARE, covered
from diffusion.evaluation.extractors import Extractor
from diffusion.evaluation.images import RealImage, RealImages, parts_with

SAMPLE_ID = 'id'  # in parts of real images: the ids of the rows


@dataclass(frozen=True)
class FeatureParts:
    """Numbered files with the same features in each.

    Args:
        folder: where they are.
        numbers: of all parts, in the order of the rows.
    """

    folder: Path
    numbers: Sequence[int]

    def path(self, number: int) -> Path:
        return self.folder / f'{number:05d}.safetensors'

    def missing(self) -> list[int]:
        """Numbers of the parts that are not there yet."""
        return [number for number in self.numbers if not self.path(number).exists()]

    def put(self, number: int, features: Mapping[str, Tensor], facts: Mapping[str, Any] | None = None) -> None:
        """Write a part. Two processes that write the same one write the same bytes, except for the facts."""
        with replacing(self.path(number)) as temporary:
            save_file({name: value.contiguous() for name, value in features.items()}, temporary, {'facts': json.dumps(facts or {})})

    def load(self, name: str) -> Tensor:
        """(N, D) of all parts; no other feature is read.

        Raises:
            DataError: a part is damaged.
        """
        rows = [self._shape(number, name) for number in self.numbers]
        whole, start = None, 0
        for number, (count, *rest) in zip(self.numbers, rows, strict=True):
            with safe_open(self.path(number), 'pt') as file:
                part = file.get_tensor(name)
            whole = torch.empty(sum(one[0] for one in rows), *rest, dtype=part.dtype) if whole is None else whole
            whole[start : start + count] = part
            start += count
        assert whole is not None
        return whole

    def facts(self) -> list[dict[str, Any]]:
        """What was noted with each part."""
        found = []
        for number in self.numbers:
            with safe_open(self.path(number), 'pt') as file:
                found.append(json.loads(file.metadata()['facts']))
        return found

    def _shape(self, number: int, name: str) -> list[int]:
        try:
            with safe_open(self.path(number), 'pt') as file:
                return file.get_slice(name).get_shape()
        except Exception as error:  # of safetensors
            raise DataError(f'{self.path(number)}: cannot be read: {error}; remove it and run the same command again') from error


def in_batches(extractor: Extractor, images: Tensor, size: int) -> dict[str, Tensor]:
    """Features of (B, 3, H, W) uint8, computed `size` at a time; the last batch is padded by its last image."""
    found: list[dict[str, Tensor]] = []
    for batch in images.split(size):
        padded = torch.cat([batch, batch[-1:].expand(size - len(batch), -1, -1, -1)])
        found.append({name: value[: len(batch)].float().cpu() for name, value in extractor.images(padded).items()})
    return {name: torch.cat([one[name] for one in found]) for name in found[0]}


class RealFeatures:
    """Features of chosen real images, in a cache that evaluations of the same images share: a folder for each extractor.

    Args:
        images: the dataset.
        ids: the chosen ones; rows are in the order of the dataset.
        resolution: side in pixels, to which images are resized and cropped as training does.
        batch: images that a network gets at once.
        cache: folder of the cache.
    """

    def __init__(self, images: RealImages, ids: Sequence[int], resolution: int, batch: int, cache: Path):
        self.images, self.wanted, self.resolution, self.batch, self.cache = images, frozenset(ids), resolution, batch, cache
        self.parts = parts_with(images, self.wanted)

    def parts_of(self, extractor: Extractor) -> FeatureParts:
        """The parts of one extractor's features, which need not be there yet."""
        return FeatureParts(self.cache / self._digest(extractor), self.parts)

    def compute(self, extractors: Sequence[Extractor], part: int) -> None:
        """Compute those features of one part of the dataset that are not in the cache.

        Raises:
            DataError: the part is damaged, or an image in it.
        """
        lacking = [extractor for extractor in extractors if part in self.parts_of(extractor).missing()]
        if not lacking:
            return
        found: dict[str, list[dict[str, Tensor]]] = {extractor.name: [] for extractor in lacking}
        ids: list[int] = []
        batch: list[Tensor] = []

        def flush() -> None:
            for extractor in lacking if batch else ():
                found[extractor.name].append(in_batches(extractor, torch.stack(batch), self.batch))
            batch.clear()

        for image in self.images.read(part, self.wanted):
            batch.append(pixels(image, self.resolution, self.images.where))
            ids.append(image.id)
            if len(batch) == self.batch:
                flush()
        flush()
        for extractor in lacking:
            features = {name: torch.cat([one[name] for one in found[extractor.name]]) for name in found[extractor.name][0]}
            self._describe(extractor)
            self.parts_of(extractor).put(part, {**features, SAMPLE_ID: torch.tensor(ids)})

    def image(self, image_id: int) -> RealImage:
        """One image of the dataset."""
        (part,) = parts_with(self.images, [image_id])
        return next(iter(self.images.read(part, {image_id})))

    def missing(self, extractors: Iterable[Extractor]) -> list[int]:
        """Parts of the dataset of which some extractor's features are not there."""
        return sorted({part for extractor in extractors for part in self.parts_of(extractor).missing()})

    def _facts(self, extractor: Extractor) -> dict[str, Any]:
        chosen = hashlib.sha256(json.dumps(sorted(self.wanted)).encode()).hexdigest()
        return {
            'images': self.images.identity,
            'chosen': chosen,
            'count': len(self.wanted),
            'extractor': extractor.name,
            'sha256': extractor.sha256,
            'resolution': self.resolution,
            'resize': SQUARE,
            'batch': self.batch,
        }

    def _digest(self, extractor: Extractor) -> str:
        return hashlib.sha256(json.dumps(self._facts(extractor)).encode()).hexdigest()[:16]

    def _describe(self, extractor: Extractor) -> None:
        """Say to people what a folder of the cache is."""
        path = self.parts_of(extractor).folder / 'features.json'
        if not path.exists():
            write_text(path, json.dumps({'where': self.images.where, **self._facts(extractor)}, indent=1) + '\n')


def pixels(image: RealImage, resolution: int, where: str) -> Tensor:
    """(3, R, R) uint8 as training sees it.

    Raises:
        DataError: it cannot be decoded.
    """
    try:
        return covered(image.content, resolution, resolution)[0]
    except ImageError as error:
        raise DataError(f'{where}: {image.key}: {error}; remove it, or convert the images, which leaves such ones out') from error
