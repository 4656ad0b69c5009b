"""A picture to the square that training sees; `data_prep.encode` uses the same function, so latents and images agree."""

from __future__ import annotations

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from diffusion.datasets.decode import open_image

SQUARE = 'JPEG scaled while decoded if twice as large or more, short side resized (bilinear, antialiased), centre cropped'


def square_of(content: bytes, resolution: int) -> Tensor:
    """(3, R, R) uint8 of an encoded picture.

    Raises:
        ImageError: it cannot be decoded.
    """
    return square(open_image(content, resolution), resolution)


def square(image: Image.Image, resolution: int) -> Tensor:
    """(3, R, R) uint8: the short side resized to `resolution` (bilinear, antialiased), then the centre cropped."""
    width, height = (side * resolution // min(image.size) for side in image.size)  # rounds and centres as torchvision does
    if (width, height) != image.size:
        image = image.resize((width, height), Image.Resampling.BILINEAR)
    left, top = round((width - resolution) / 2), round((height - resolution) / 2)
    image = image.crop((left, top, left + resolution, top + resolution))
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()
