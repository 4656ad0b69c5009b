"""Images: from tensors, as grids, and inside a page."""

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from PIL import Image
from PIL.PngImagePlugin import PngInfo

from diffusion.common.pages import data_uri

if TYPE_CHECKING:
    from torch import Tensor


def to_pil(image: 'Tensor') -> Image.Image:
    """Convert a tensor (3, H, W) of uint8 to an image."""
    return Image.fromarray(image.permute(1, 2, 0).cpu().numpy())


def save_png(image: Image.Image, path: Path, texts: Mapping[str, str]) -> None:
    """Write a PNG with these texts inside."""
    info = PngInfo()
    for name, text in texts.items():
        info.add_text(name, text)
    image.save(path, pnginfo=info)


def grid(images: Sequence[Image.Image], columns: int | None = None, gap_px: int = 2) -> Image.Image:
    """Arrange images of one size row by row on white, close to square and without empty cells where the number allows it."""
    columns = columns or _columns(len(images))
    rows = math.ceil(len(images) / columns)
    width, height = images[0].size
    canvas = Image.new('RGB', (columns * (width + gap_px) - gap_px, rows * (height + gap_px) - gap_px), 'white')
    for i, image in enumerate(images):
        canvas.paste(image, (i % columns * (width + gap_px), i // columns * (height + gap_px)))
    return canvas


def cells(image: Image.Image, count: int, gap_px: int = 2) -> list[Image.Image]:
    """Cut a `grid` back into its `count` images."""
    columns = _columns(count)
    rows = math.ceil(count / columns)
    width, height = (image.width + gap_px) // columns - gap_px, (image.height + gap_px) // rows - gap_px
    corners = ((i % columns * (width + gap_px), i // columns * (height + gap_px)) for i in range(count))
    return [image.crop((left, top, left + width, top + height)) for left, top in corners]


def _columns(count: int) -> int:
    square = math.ceil(math.sqrt(count))
    return next((n for n in range(square, 2 * square) if count % n == 0), square)


LARGEST_PX, SMALLEST_PX = 256, 96  # on the page


@dataclass(frozen=True)
class InlineImage:
    """An image in the page."""

    uri: str
    width: int
    caption: str


def to_inline(image: Image.Image, caption: str, largest_px: int = LARGEST_PX, compressed: bool = False) -> InlineImage:
    """Encode an image as inline PNG of at most `largest_px`; the browser enlarges small ones pixel by pixel.

    Args:
        compressed: as JPEG if it is larger than that, a tenth of the bytes: for pages of hundreds of images.
    """
    compressed = compressed and max(image.size) > largest_px
    image = image.convert('RGB')
    image.thumbnail((largest_px, largest_px))
    content = io.BytesIO()
    if compressed:
        image.save(content, 'JPEG', quality=80)
    else:
        image.save(content, 'PNG')
    return InlineImage(data_uri(content.getvalue(), 'image/jpeg' if compressed else 'image/png'), max(image.width, SMALLEST_PX), caption)
