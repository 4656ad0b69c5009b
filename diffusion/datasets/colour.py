"""Colour profiles: an image in Display P3, Adobe RGB, a print or grey profile becomes sRGB, which is what networks and viewers take it for."""

import io
from functools import lru_cache

import numpy as np
from PIL import Image, ImageCms

MAX_PROFILE_BYTES = 4 << 20  # those of presses have 0.5 to 3 MB
SPACES = {'RGB': ('RGB', 'RGBA'), 'GRAY': ('L',), 'CMYK': ('CMYK',)}  # of a profile: modes of images that it can describe
TOLERANCE = 4  # of 255: the sRGB profiles of several makers differ by up to 3, Display P3 and Adobe RGB by 30 and more
CACHED_PROFILES = 16  # a transform of a press's profile takes a few megabytes


class ProfileError(ValueError):
    """A colour profile that cannot be used: damaged, too large, or for other images than this one."""


def needs_srgb(image: Image.Image) -> bool:
    """Whether the image has a colour profile that shows its pixels otherwise than as sRGB.

    Raises:
        ProfileError: it cannot be used.
    """
    return _transform_of(image) is not None


def in_srgb(image: Image.Image) -> Image.Image:
    """The image (8 bits; RGB, RGBA, L or CMYK) with the colours that its profile gives it, RGB or RGBA; unchanged if that is what it has.

    Raises:
        ProfileError: the profile cannot be used.
    """
    transform = _transform_of(image)
    if transform is None:
        return image
    result = ImageCms.applyTransform(image.convert('RGB') if image.mode == 'L' and transform.input_mode == 'RGB' else image, transform)
    assert result is not None  # not in place
    return result


def _transform_of(image: Image.Image) -> ImageCms.ImageCmsTransform | None:
    profile = image.info.get('icc_profile')
    if not profile:
        return None
    if len(profile) > MAX_PROFILE_BYTES:
        raise ProfileError(f'colour profile of {len(profile):,} bytes')
    alpha = image.mode in ('RGBA', 'LA', 'PA') or 'transparency' in image.info
    mode = 'RGBA' if alpha else {'P': 'RGB', '1': 'L'}.get(image.mode, image.mode if image.mode in ('RGB', 'CMYK') else 'L')
    found = _to_srgb(bytes(profile), mode)
    if isinstance(found, str):
        raise ProfileError(found)
    return found


@lru_cache(CACHED_PROFILES)
def _to_srgb(profile: bytes, mode: str) -> ImageCms.ImageCmsTransform | str | None:
    """From a profile to sRGB; None if that changes next to nothing; a text says why it cannot be used."""
    try:
        opened = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        space = opened.profile.xcolor_space.strip()
        mode = 'RGB' if mode == 'L' and space == 'RGB' else mode  # a grey image described by the axis of greys
        if mode not in SPACES.get(space, ()):
            return f'colour profile for {space}, image is {mode}'
        out = 'RGBA' if mode == 'RGBA' else 'RGB'
        transform = ImageCms.buildTransform(opened, ImageCms.createProfile('sRGB'), mode, out)
        return transform if mode == 'CMYK' or _changes_colours(transform, mode) else None
    except Exception as error:  # LittleCMS's errors come as OSError, TypeError, ValueError, PyCMSError
        return f'colour profile: {error}'


def _changes_colours(transform: ImageCms.ImageCmsTransform, mode: str) -> bool:
    levels = np.linspace(0, 255, 9).round().astype(np.uint8)
    if mode == 'L':
        before = Image.fromarray(levels[None])
    else:
        colours = np.stack(np.meshgrid(levels, levels, levels), axis=-1).reshape(1, -1, 3)
        before = Image.fromarray(colours).convert(mode)
    after = ImageCms.applyTransform(before, transform)
    assert after is not None
    difference = np.asarray(after.convert('RGB'), np.int16) - np.asarray(before.convert('RGB'), np.int16)
    return int(np.abs(difference).max()) > TOLERANCE
