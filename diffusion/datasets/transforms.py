"""A picture to the size that training sees; `data_prep.encode` uses the same functions, so latents and images agree."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from diffusion.datasets.decode import open_image

_STEPS = 'JPEG scaled while decoded if twice as large or more, {} (bilinear, antialiased), centre cropped'
SQUARE = _STEPS.format('short side resized')
RECTANGLE = _STEPS.format('resized to cover the bucket')


def cover_of(content: bytes, width: int, height: int) -> Tensor:
    """(3, height, width) uint8 of an encoded picture.

    Raises:
        ImageError: it cannot be decoded.
    """
    return cover(open_image(content, (width, height)), width, height)


def cover(image: Image.Image, width: int, height: int) -> Tensor:
    """(3, height, width) uint8: resized (bilinear, antialiased) until it just covers width x height, then the centre cropped."""
    scale = max(Fraction(width, image.width), Fraction(height, image.height))
    resized = int(image.width * scale), int(image.height * scale)  # rounds and centres as torchvision does
    if resized != image.size:
        image = image.resize(resized, Image.Resampling.BILINEAR)
    left, top = round((image.width - width) / 2), round((image.height - height) / 2)
    image = image.crop((left, top, left + width, top + height))
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()


def square(image: Image.Image, resolution: int) -> Tensor:
    """(3, R, R) uint8: the short side resized to `resolution`, then the centre cropped."""
    return cover(image, resolution, resolution)
