"""Images on their way into a feature network: uint8 and nothing else comes in; the resizing is part of a score's meaning, so each has a name."""

import torch
import torch.nn.functional as F
from torch import Tensor

CLEAN = 'bicubic, antialiased, not rounded'  # PIL's to the last digit, and clean-fid's
TF1 = 'bilinear as in TensorFlow 1, not antialiased'


def verify_uint8(images: Tensor) -> Tensor:
    """Return the images unchanged.

    Raises:
        ValueError: not (B, 3, H, W) uint8. Floats are refused because their range is a guess: libraries that scale them to levels turn
            uint8 into its negative, or round down.
    """
    if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[1] != 3:
        raise ValueError(f'images are {images.dtype} {tuple(images.shape)}; feature networks take torch.uint8 (B, 3, H, W) with levels 0..255')
    return images


def clean(images: Tensor, height: int, width: int) -> Tensor:
    """Return (B, 3, height, width) float32 levels 0..255, resized as CLEAN says."""
    images = verify_uint8(images).float()
    if images.shape[-2:] == (height, width):
        return images
    return F.interpolate(images, (height, width), mode='bicubic', antialias=True).clamp(0, 255)


def clean_square(images: Tensor, short_side: int, size: int) -> Tensor:
    """Return (B, 3, size, size): the short side resized as CLEAN says, then the centre cropped."""
    height, width = verify_uint8(images).shape[-2:]
    scale = short_side / min(height, width)
    resized = clean(images, max(short_side, round(height * scale)), max(short_side, round(width * scale)))
    top, left = (resized.shape[-2] - size) // 2, (resized.shape[-1] - size) // 2
    return resized[..., top : top + size, left : left + size]
