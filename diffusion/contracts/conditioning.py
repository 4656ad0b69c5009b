"""What a network may see besides noisy latents and times."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


GEOMETRY = 6  # numbers that say where an image was cut from


class Conditioning(NamedTuple):
    """One row a sample. A family uses the fields that it names; the others stay None."""

    text: Tensor
    """(B, L, C): encoded captions, token by token."""
    mask: Tensor | None = None
    """(B, L) bool: which of the tokens are a caption's own, for families whose attention leaves padding out."""
    pooled: Tensor | None = None
    """(B, P): one vector a caption."""
    geometry: Tensor | None = None
    """(B, 6) int32: original height and width, crop top and left, target height and width, in pixels. Original is the image before any resizing,
    the crop is taken from the resized image, the target is what is left: what the network sees."""

    def to_store(self) -> dict[str, Tensor]:
        """What a dataset stores of encoded captions, float16, by its column."""
        stored = {'text_embeddings': self.text.half()}
        return stored if self.pooled is None else {**stored, 'pooled_embeddings': self.pooled.half()}
