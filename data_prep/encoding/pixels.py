"""Images to batches of pixels: a shard is read, its images decoded and resized, one shard at a time in each process."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data_prep.engines.batches import ShardMessages
from data_prep.mds.job import Job
from data_prep.mds.parts import Columns, PartEnd
from diffusion.common.storage import Folder
from diffusion.datasets.decode import ImageError
from diffusion.datasets.shards import Shard, read_shard
from diffusion.datasets.transforms import covered


@dataclass(frozen=True)
class Encoding:
    """From where to where, and what each stream holds."""

    source: Folder
    job: Job
    sizes: Mapping[str, tuple[int, int]]
    """Width and height of each stream, in pixels."""
    by_bucket: bool
    """Whether an image stays in the stream that it is in; otherwise it goes into each."""
    columns: Mapping[str, Columns]
    shard_bytes: int

    def sizes_of(self, shard: Shard) -> Mapping[str, tuple[int, int]]:
        """The streams that a shard's images go into."""
        return {shard.stream: self.sizes[shard.stream]} if self.by_bucket else self.sizes


@dataclass(frozen=True)
class Pixels:
    """A batch of one part and one stream: (B, 3, H, W) uint8, and the rows they are of."""

    part: Shard
    stream: str
    images: Tensor
    rows: list[dict[str, Any]]

    def pin_memory(self) -> Pixels:
        """For the DataLoader, which knows only tensors by itself."""
        return replace(self, images=self.images.pin_memory())


Message = Pixels | PartEnd | Exception
"""About a part, in this order: its batches and its end; or the error that reading it met."""


class PixelsOfShards(ShardMessages):
    """Messages about all rows of some shards."""

    def __init__(self, encoding: Encoding, shards: Sequence[Shard], batch_size: int):
        super().__init__(encoding.job, shards)
        self.encoding, self.batch_size = encoding, batch_size

    def of_shard(self, shard: Shard, scratch: Path) -> Iterator[Pixels | PartEnd]:
        sizes = self.encoding.sizes_of(shard)
        waiting: dict[str, list[tuple[Tensor, dict[str, Any]]]] = {stream: [] for stream in sizes}
        failures = []
        for row in read_shard(self.encoding.source, shard, scratch):
            content = row.pop('image')
            for stream, size in sizes.items():
                try:
                    pixels, crop = _cover(row, content, *size)
                    geometry = {'size': np.array((row['original_height'], row['original_width']), np.int32), 'crop': np.array(crop, np.int32)}
                    waiting[stream].append((pixels, {**row, **geometry}))
                except ImageError as error:
                    failures.append((row['key'], row.get('url', ''), str(error)))
                if len(waiting[stream]) == batch_at(size, self.batch_size):
                    yield _batch(shard, stream, waiting[stream])
                    waiting[stream] = []
        yield from (_batch(shard, stream, rest) for stream, rest in waiting.items() if rest)
        yield PartEnd(shard, failures)


def batch_at(size_px: tuple[int, int], batch_size: int) -> int:
    """Images a pass: as many pixels as `batch_size` squares of 256 px have, or fewer."""
    return max(1, min(batch_size, batch_size * 256**2 // math.prod(size_px)))


def _cover(row: dict[str, Any], content: bytes, width: int, height: int) -> tuple[Tensor, tuple[int, int]]:
    if row['width'] < width or row['height'] < height:
        raise ImageError(f'short side below {width} px' if width == height else 'smaller than its aspect bucket')
    return covered(content, width, height)


def _batch(shard: Shard, stream: str, waiting: list[tuple[Tensor, dict[str, Any]]]) -> Pixels:
    return Pixels(shard, stream, torch.stack([pixels for pixels, _ in waiting]), [row for _, row in waiting])
