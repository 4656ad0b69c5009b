"""Contract between datasets, encoders and model: a batch, one dictionary of tensors, and what a network sees besides noisy latents and times."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple, NotRequired, TypedDict

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

GEOMETRY = 6  # numbers that say where an image was cut from


class Conditioning(NamedTuple):
    """Encoded captions and geometry, one row a sample. A family uses the fields that it names; the others stay None."""

    text: Tensor  # (B, L, C): token by token
    mask: Tensor | None = None  # (B, L) bool: which of the tokens are a caption's own, for families whose attention leaves padding out
    pooled: Tensor | None = None  # (B, P): one vector a caption
    # (B, 6) int32: original height and width, crop top and left, target height and width, in pixels. Original is the image before any resizing,
    # the crop is taken from the resized image, the target is what is left: what the network sees.
    geometry: Tensor | None = None

    def to_store(self) -> dict[str, Tensor]:
        """Return what a dataset stores of encoded captions, float16, by its column."""
        stored = {'text_embeddings': self.text.half()}
        return stored if self.pooled is None else {**stored, 'pooled_embeddings': self.pooled.half()}


class StoredImages(NamedTuple):
    """Images of a batch as their dataset stores them, for encoders on other machines that decode them (`data.encoders.ray.send: bytes`)."""

    contents: list[bytes]
    mirrored: list[bool]
    width: int  # to which all of them are brought, in pixels, as is `height`
    height: int

    def split(self, size: int) -> Iterator[StoredImages]:
        """Yield parts of `size` images, as a tensor splits."""
        for begin in range(0, len(self.contents), size):
            part = slice(begin, begin + size)
            yield StoredImages(self.contents[part], self.mirrored[part], self.width, self.height)


class Batch(TypedDict):
    """A training batch. It holds `images` or `moments`, never both; every tensor has the batch first, so that any split works."""

    images: NotRequired[Tensor]  # (B, 3, H, W) uint8, 0..255
    stored: NotRequired[StoredImages]  # images that are decoded elsewhere; the batch that leaves the loader has their `moments` instead
    # (B, 2C, H/8, W/8) float16, mean and log variance of the VAE's posterior, unscaled; float32 where they were encoded while training.
    moments: NotRequired[Tensor]
    text_embeddings: NotRequired[Tensor]  # (B, L, D) float16, if the dataset stores them; the model then need not encode `tokens`
    pooled_embeddings: NotRequired[Tensor]  # (B, P) float16 next to those, of text encoders that make one vector a caption too
    geometry: NotRequired[Tensor]  # (B, 6) int32 as `Conditioning` has it, for families that read it
    # (B, L) int64 ids by text encoder, and masks (B, L) bool where the family attends by mask; of captions already dropped out where caption
    # dropout said so. An autoencoder's batches have none.
    tokens: NotRequired[dict[str, Tensor]]
    # (B, 3) int64, (epoch, global sample id, occurrence in the epoch): with the seed it keys everything random about a sample. No two rows of a run
    # are equal: a sample that an epoch takes several times, by `proportion`, has the occurrences 0, 1, ...
    sample_key: Tensor
    loss_map: NotRequired[Tensor]  # (B, h, w) float16 as the latents, factor of the loss by place, where some stream of the recipe has masks
    loss_weight: NotRequired[Tensor]  # (B,) float32, factor of each sample's training loss, where some stream of the recipe has another than 1
    # (B,) times of the objective, added while training if the recipe spreads them over the global batch; else the model draws them by `sample_key`.
    timesteps: NotRequired[Tensor]
    # (B, 2C, h, w), added while training if the recipe has `methods.contrastive`: those of another sample of the global batch.
    other_moments: NotRequired[Tensor]
    other_key: NotRequired[Tensor]  # (B, 3) int64, its key


class Sample(TypedDict):
    """One sample of a dataset; `collate` makes a Batch of many. Same rules, without the batch dimension.

    Stored numbers stay NumPy arrays as they lie in the shard: a tensor a sample would cost as much as reading it.
    """

    images: NotRequired[Tensor]
    stored: NotRequired[bytes]
    target_px: NotRequired[tuple[int, int]]  # (width, height) that a stored image is brought to
    moments: NotRequired[np.ndarray]
    text_embeddings: NotRequired[np.ndarray]
    pooled_embeddings: NotRequired[np.ndarray]
    # (2,) int32, height and width of the original image in pixels, before any resizing; if the dataset stores it.
    size: NotRequired[np.ndarray]
    crop: NotRequired[np.ndarray]  # (2,) int32, top and left of what training sees, in pixels of the resized image
    loss_map: NotRequired[np.ndarray]  # (h, w) float16 as the latents, if its dataset has masks
    captions: list[tuple[str, float]]  # with weights that add up to 1; training picks one of several, again in each epoch
    sample_key: tuple[int, int, int]
    loss_weight: NotRequired[float]
