"""Tensors to pictures, pictures to grids."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from PIL import Image

if TYPE_CHECKING:
    from torch import Tensor


def to_pil(image: Tensor) -> Image.Image:
    """(3, H, W) uint8 -> a picture."""
    return Image.fromarray(image.permute(1, 2, 0).cpu().numpy())


def grid(pictures: Sequence[Image.Image], columns: int | None = None, gap_px: int = 2) -> Image.Image:
    """Pictures of one size, row by row, on white; close to square and without gaps where the number allows it."""
    columns = columns or _columns(len(pictures))
    rows = math.ceil(len(pictures) / columns)
    width, height = pictures[0].size
    canvas = Image.new('RGB', (columns * (width + gap_px) - gap_px, rows * (height + gap_px) - gap_px), 'white')
    for i, picture in enumerate(pictures):
        canvas.paste(picture, (i % columns * (width + gap_px), i // columns * (height + gap_px)))
    return canvas


def cells(picture: Image.Image, count: int, gap_px: int = 2) -> list[Image.Image]:
    """The `count` images of a `grid` again."""
    columns = _columns(count)
    rows = math.ceil(count / columns)
    width, height = (picture.width + gap_px) // columns - gap_px, (picture.height + gap_px) // rows - gap_px
    corners = ((i % columns * (width + gap_px), i // columns * (height + gap_px)) for i in range(count))
    return [picture.crop((left, top, left + width, top + height)) for left, top in corners]


def _columns(count: int) -> int:
    square = math.ceil(math.sqrt(count))
    return next((n for n in range(square, 2 * square) if count % n == 0), square)
