"""Streaming data sets: an MDS sample becomes a Sample of the batch contract.

MDS columns (written by data_prep): `caption` str or also `captions` JSON, and `image` bytes (kind images) or `moments` float16
(kind latents), perhaps with `text_embeddings` float16.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from streaming import StreamingDataset

from diffusion.datasets.batch import Sample
from diffusion.datasets.captions import captions_of
from diffusion.datasets.transforms import cover_of


class CaptionedMDS(StreamingDataset):
    """Adds to each sample its key: the epoch and the sample's id, global over all streams."""

    def get_item(self, sample_id: int, retry: int = 7) -> dict[str, Any]:
        row = super().get_item(sample_id, retry)
        epoch = max(0, self.next_epoch - 1)  # `__iter__` has already moved next_epoch on
        sample: Sample = {'captions': captions_of(row), 'sample_key': (epoch, int(sample_id))}
        return {**sample, **self.content(sample_id, row)}

    @abstractmethod
    def content(self, sample_id: int, row: dict[str, Any]) -> dict[str, Any]:
        """The `images` or the `moments` of an MDS row."""


class ImageCaptionMDS(CaptionedMDS):
    """Pictures, decoded and brought to (width, height) `sizes_px` of their stream in the loader's workers."""

    def __init__(self, *, sizes_px: Sequence[tuple[int, int]], **streaming: Any):
        super().__init__(**streaming)
        self.sizes_px = sizes_px

    def content(self, sample_id: int, row: dict[str, Any]) -> dict[str, Any]:
        shard_id, _ = self.spanner[sample_id]
        return {'images': cover_of(row['image'], *self.sizes_px[self.stream_per_shard[shard_id]])}


class LatentsCaptionMDS(CaptionedMDS):
    """VAE moments and perhaps text embeddings; the picture itself is not there, so nothing is decoded."""

    def content(self, sample_id: int, row: dict[str, Any]) -> dict[str, Any]:
        return {name: row[name] for name in ('moments', 'text_embeddings') if name in row}
