"""What a network may see besides noisy latents and times."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


class Conditioning(NamedTuple):
    """One row a sample. A family uses the fields that it names; the others stay None."""

    text: Tensor
    """(B, L, C): encoded captions, token by token."""
    mask: Tensor | None = None
    """(B, L) bool: which of the tokens are a caption's own, for families whose attention leaves padding out."""
    pooled: Tensor | None = None
    """(B, P): one vector a caption."""
    geometry: Tensor | None = None
    """(B, 6): original height and width, crop top and left, target height and width, in pixels."""
