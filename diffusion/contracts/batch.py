"""The contract between datasets and model: one dictionary of tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, NotRequired, TypedDict

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor


class Batch(TypedDict):
    """A training batch. It holds `images` or `moments`, never both; every tensor has the batch first, so that any split works.

    images: (B, 3, H, W) uint8, 0..255.
    moments: (B, 2C, H/8, W/8) float16, mean and log variance of the VAE's posterior, unscaled.
    text_embeddings: (B, L, D) float16, if the dataset stores them; the model then need not encode `tokens`.
    tokens: (B, L) int64 ids by text encoder, and masks (B, L) bool where the family attends by mask; of captions already dropped out where caption
        dropout said so.
    sample_key: (B, 3) int64, (epoch, global sample id, occurrence in the epoch): with the seed it keys everything random about a sample. No two rows
        of a run are equal: a sample that an epoch takes several times, by `proportion`, has the occurrences 0, 1, ...
    timesteps: (B,) times of the objective, added while training if the recipe spreads them over the global batch; else the model draws them by
        `sample_key`.
    """

    images: NotRequired[Tensor]
    moments: NotRequired[Tensor]
    text_embeddings: NotRequired[Tensor]
    tokens: dict[str, Tensor]
    sample_key: Tensor
    timesteps: NotRequired[Tensor]


class Sample(TypedDict):
    """One sample of a dataset; `collate` makes a Batch of many. Same rules, without the batch dimension.

    Stored numbers stay NumPy arrays as they lie in the shard: a tensor a sample would cost as much as reading it.
    """

    images: NotRequired[Tensor]
    moments: NotRequired[np.ndarray]
    text_embeddings: NotRequired[np.ndarray]
    size: NotRequired[np.ndarray]
    """(2,) int32, height and width of the original image in pixels, before any resizing; of latents, if the dataset stores it."""
    crop: NotRequired[np.ndarray]
    """(2,) int32, top and left of what was encoded, in pixels of the resized image."""
    captions: list[tuple[str, float]]
    """Captions with weights that add up to 1; training picks one of several, again in each epoch."""
    sample_key: tuple[int, int, int]
