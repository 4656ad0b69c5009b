"""An image to the size that training sees; `data_prep.encode` uses the same functions, so latents and images agree."""

from fractions import Fraction

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from diffusion.datasets.decode import open_image, size_of, size_when_opened

_STEPS = 'sRGB, JPEG scaled while decoded if four times as large or more, {} (bilinear, antialiased), centre cropped'
SQUARE = _STEPS.format('short side resized')
RECTANGLE = _STEPS.format('resized to cover the bucket')


def covered(content: bytes, width: int, height: int) -> tuple[Tensor, tuple[int, int]]:
    """(3, height, width) uint8 of an encoded image, and (top, left) of its crop in pixels of the resized image.

    Raises:
        ImageError: it cannot be decoded.
    """
    image = open_image(content, (width, height))
    return cover(image, width, height), _covering(image.size, width, height)[1]


def random_square(content: bytes, side_px: int, scale: float, top: float, left: float) -> Tensor:
    """(3, S, S) uint8 of an encoded image: its short side resized (bilinear, antialiased) to a length between S and its own, then a square cut.

    Args:
        scale: 0 resizes the short side to S, 1 keeps it; what is shorter than S is enlarged to it.
        top, left: place of the square, 0..1 of what there is room for.

    Raises:
        ImageError: it cannot be decoded.
    """
    short = min(size_of(content))
    wanted = max(side_px, round(side_px + scale * (short - side_px)))
    image = open_image(content, (wanted, wanted))
    (width, height), _ = _covering(image.size, wanted, wanted)
    if (width, height) != image.size:
        image = image.resize((width, height), Image.Resampling.BILINEAR)
    y, x = round(top * (height - side_px)), round(left * (width - side_px))
    return torch.from_numpy(np.array(image.crop((x, y, x + side_px, y + side_px)))).permute(2, 0, 1).contiguous()


def crop_of(content: bytes, width: int, height: int) -> tuple[int, int]:
    """The crop that `covered` returns, from the image's first bytes; raises ImageError if they are not those of an image."""
    return _covering(size_when_opened(content, (width, height)), width, height)[1]


def cover(image: Image.Image, width: int, height: int) -> Tensor:
    """(3, height, width) uint8: resized (bilinear, antialiased) until it just covers width x height, then the centre cropped."""
    resized, (top, left) = _covering(image.size, width, height)
    if resized != image.size:
        image = image.resize(resized, Image.Resampling.BILINEAR)
    image = image.crop((left, top, left + width, top + height))
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()


def _covering(size: tuple[int, int], width: int, height: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """(width, height) that an image of `size` is resized to in order to just cover width x height, and (top, left) of the crop in that."""
    scale = max(Fraction(width, size[0]), Fraction(height, size[1]))
    resized = int(size[0] * scale), int(size[1] * scale)  # rounds and centres as torchvision does
    return resized, (round((resized[1] - height) / 2), round((resized[0] - width) / 2))


def square(image: Image.Image, resolution: int) -> Tensor:
    """(3, R, R) uint8: the short side resized to `resolution`, then the centre cropped."""
    return cover(image, resolution, resolution)
