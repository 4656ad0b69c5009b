"""Image bytes to the square that training sees; `data_prep.encode` uses the same function, so latents and images agree."""

from __future__ import annotations

import io
import warnings

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

FORMATS = ('JPEG', 'PNG', 'WEBP')  # other parsers of Pillow are never reached
MAX_PIXELS = 64_000_000  # a picture of 8000 x 8000; larger ones are decompression bombs


class ImageError(ValueError):
    """A picture that cannot be used; the message is a short reason, the same for all such pictures."""


def open_image(content: bytes) -> Image.Image:
    """Fully decoded RGB image with its EXIF orientation applied and transparency laid over white.

    Raises:
        ImageError: not a JPEG, PNG or WebP, over MAX_PIXELS, or damaged.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter('error', Image.DecompressionBombWarning)
            image = Image.open(io.BytesIO(content), formats=FORMATS)
            if image.width * image.height > MAX_PIXELS:
                raise Image.DecompressionBombError
            image.load()  # `open` and `verify` accept a truncated file
        return _as_rgb(_upright(image))
    except (Image.DecompressionBombWarning, Image.DecompressionBombError):
        raise ImageError(f'over {MAX_PIXELS // 10**6} Mpx') from None
    except Exception as error:  # Pillow's decoders raise OSError, SyntaxError, ValueError, struct.error, zlib.error ...
        raise ImageError('not a readable JPEG, PNG or WebP') from error


def _upright(image: Image.Image) -> Image.Image:
    try:
        return ImageOps.exif_transpose(image)
    except Exception:  # EXIF that Pillow cannot parse or write back: the picture itself is fine, and viewers show it as it lies
        return image


def _as_rgb(image: Image.Image) -> Image.Image:
    if image.mode in ('RGBA', 'LA', 'PA') or 'transparency' in image.info:
        foreground = image.convert('RGBA')
        image = Image.new('RGBA', image.size, 'white')
        image.alpha_composite(foreground)
    if image.mode.startswith('I;16') or image.mode == 'I':  # convert('RGB') would clip 16 bits at 255
        image = Image.fromarray((np.asarray(image).astype(np.uint32) >> 8).astype(np.uint8))
    return image.convert('RGB')


def square(image: Image.Image, resolution: int) -> Tensor:
    """(3, R, R) uint8: the short side resized to `resolution` (bilinear, antialiased), then the centre cropped."""
    width, height = (side * resolution // min(image.size) for side in image.size)  # rounds and centres as torchvision does
    if (width, height) != image.size:
        image = image.resize((width, height), Image.Resampling.BILINEAR)
    left, top = round((width - resolution) / 2), round((height - resolution) / 2)
    image = image.crop((left, top, left + resolution, top + resolution))
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()
