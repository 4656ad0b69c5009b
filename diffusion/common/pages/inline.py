"""Images inside a page."""

import io
from dataclasses import dataclass

from PIL import Image

from diffusion.common.pages import data_uri

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
