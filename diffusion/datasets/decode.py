"""Bytes that came from anywhere to an RGB image, or a reason; its colour profile becomes sRGB, for which networks and viewers take it. No torch."""

import io
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

import numpy as np
from PIL import Image, ImageCms

MAX_PROFILE_BYTES = 4 << 20  # those of presses have 0.5 to 3 MB
SPACES = {'RGB': ('RGB', 'RGBA'), 'GRAY': ('L',), 'CMYK': ('CMYK',)}  # of a profile: modes of images that it can describe
TOLERANCE = 4  # of 255: the sRGB profiles of several makers differ by up to 3, Display P3 and Adobe RGB by 30 and more
CACHED_PROFILES = 16  # a transform of a press's profile takes a few megabytes
FORMATS = ('JPEG', 'PNG', 'WEBP')  # other parsers of Pillow are never reached
SCALABLE_FORMATS = ('JPEG', 'MPO')  # by their decoder; MPO is how Pillow calls a JPEG with a second image in it
MAX_PIXELS = 64_000_000  # an image of 8000 x 8000; larger ones are decompression bombs
Result = TypeVar('Result')
ORIENTATION = 0x0112  # EXIF tag
TURNED = (5, 6, 7, 8)  # EXIF orientations that swap width and height
ALPHA_MODES = ('RGBA', 'LA', 'PA')
SIXTEEN_BIT_MODES = ('I', 'I;16', 'I;16B', 'I;16L', 'I;16N')
UPRIGHT = {  # by EXIF orientation
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
DRAFT_MARGIN = 2  # what the decoder leaves to the resizing: its own scaling is sharper, or softer, by the size of the file
PROFILE_NOTE = 'colour profile not usable, taken as sRGB'
JPEG_OPTIONS = {'quality': 95, 'subsampling': 0}


def _transform_of(image: Image.Image) -> ImageCms.ImageCmsTransform | str | None:
    """Transform to sRGB from the image's colour profile; None if it has none or that changes next to nothing; a text says why it cannot be used."""
    profile = image.info.get('icc_profile')
    if not profile:
        return None
    if len(profile) > MAX_PROFILE_BYTES:
        return f'colour profile of {len(profile):,} bytes'
    alpha = image.mode in ALPHA_MODES or 'transparency' in image.info
    mode = 'RGBA' if alpha else {'P': 'RGB', '1': 'L'}.get(image.mode, image.mode if image.mode in ('RGB', 'CMYK') else 'L')
    return _to_srgb(bytes(profile), mode)


@lru_cache(CACHED_PROFILES)
def _to_srgb(profile: bytes, mode: str) -> ImageCms.ImageCmsTransform | str | None:
    """Transform from a profile to sRGB; None if that changes next to nothing; a text says why it cannot be used."""
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


class ImageError(ValueError):
    """An image that cannot be used; the message is a short reason, the same for all such images."""


@dataclass(frozen=True)
class CanonicalImage:
    """An image as a dataset stores it: any decoder gives the same upright RGB or grey pixels."""

    content: bytes  # the encoded image, byte for byte as it came if nothing had to change
    image: Image.Image  # decoded
    reencoded: str  # what had to change, such as `CMYK, EXIF orientation`; '' if nothing did
    note: str = ''  # what else is to be counted; '' if nothing


def open_image(content: bytes, cover_px: tuple[int, int] | None = None) -> Image.Image:
    """Fully decoded sRGB image with its EXIF orientation applied and transparency laid over white.

    Args:
        cover_px: (width, height) that are needed of the upright image. A JPEG at least four times as wide and high is scaled by 2, 4 or 8
            while it is decoded, to no less than twice this: faster, and as sharp as if it had been resized from its full size, which
            it would not be if the decoder alone came down to this size (docs/data.md, "Sharpness").

    Raises:
        ImageError: not a JPEG, PNG or WebP, over MAX_PIXELS, or damaged.
    """
    return _guarded(lambda: _as_rgb(_upright(_load(content, cover_px))))


def size_of(content: bytes) -> tuple[int, int]:
    """(width, height) as they are stored, from the image's first bytes; nothing is decoded.

    Raises:
        ImageError: as `open_image`, but not if it is damaged further on.
    """
    return _guarded(lambda: _open(content).size)


def verify(content: bytes) -> None:
    """Look at an image's headers and, where its format has them, checksums; its pixels are not decoded.

    Raises:
        ImageError: as `open_image`, but not for all that decoding would find.
    """
    _guarded(lambda: _open(content).verify())


def size_when_opened(content: bytes, cover_px: tuple[int, int]) -> tuple[int, int]:
    """(width, height) of what `open_image` would return, from the image's first bytes; nothing is decoded.

    Raises:
        ImageError: as `open_image`, but not if it is damaged further on.
    """

    def work() -> tuple[int, int]:
        image = _scaled(content, cover_px)
        return image.size[::-1] if _orientation(image) in TURNED else image.size  # type: ignore[return-value]

    return _guarded(work)


def alpha_of(content: bytes) -> Image.Image | None:
    """Return the alpha channel of an image, upright, grey of 8 bits: 255 is opaque; None if it has none.

    Raises:
        ImageError: as `open_image`.
    """

    def work() -> Image.Image | None:
        image = _in_eight_bits(_load(content, None))
        if image.mode not in ALPHA_MODES and 'transparency' not in image.info:
            return None
        return _upright(image).convert('RGBA').getchannel('A')

    return _guarded(work)


def canonical(content: bytes) -> CanonicalImage:
    """The image fully decoded, and re-encoded if decoders could disagree about it: PNG as PNG, all else as JPEG of quality 95.

    Raises:
        ImageError: as `open_image`.
    """

    def work() -> CanonicalImage:
        image = _load(content, None)
        changes = _changes(image, content)
        note = PROFILE_NOTE if isinstance(_transform_of(image), str) else ''  # most viewers pass over such a profile
        if not changes:
            return CanonicalImage(content, image, '', note)
        rgb, buffer = _as_rgb(_upright(image)), io.BytesIO()
        rgb.info = {}  # or a PNG would get the profile of what it was
        if image.format == 'PNG':
            rgb.save(buffer, 'PNG')
        else:
            rgb.save(buffer, 'JPEG', **JPEG_OPTIONS)  # type: ignore[arg-type]
        return CanonicalImage(buffer.getvalue(), rgb, ', '.join(changes), note)

    return _guarded(work)


def _guarded(work: Callable[[], Result]) -> Result:
    """Turn what a decoder raises into an ImageError."""
    try:
        return work()
    except ImageError:
        raise
    except (Image.DecompressionBombWarning, Image.DecompressionBombError):
        raise ImageError(f'over {MAX_PIXELS // 10**6} Mpx') from None
    except Exception as error:  # Pillow's decoders raise OSError, SyntaxError, ValueError, struct.error, zlib.error ...
        raise ImageError('not a readable JPEG, PNG or WebP') from error


def _open(content: bytes) -> Image.Image:
    with warnings.catch_warnings():
        warnings.simplefilter('error', Image.DecompressionBombWarning)
        image = Image.open(io.BytesIO(content), formats=FORMATS)
    if image.width * image.height > MAX_PIXELS:
        raise Image.DecompressionBombError
    return image


def _scaled(content: bytes, cover_px: tuple[int, int] | None) -> Image.Image:
    """Not decoded yet, but told at which scale to be."""
    image = _open(content)
    if cover_px is not None and image.format in SCALABLE_FORMATS:
        width, height = cover_px[::-1] if _orientation(image) in TURNED else cover_px  # as it lies in the file
        width, height = DRAFT_MARGIN * width, DRAFT_MARGIN * height
        if image.width >= 2 * width and image.height >= 2 * height:
            image.draft(None, (width, height))
    return image


def _load(content: bytes, cover_px: tuple[int, int] | None) -> Image.Image:
    image = _scaled(content, cover_px)
    image.load()  # `open` and `verify` accept a truncated file
    transparent = image.info.get('transparency')  # Pillow leaves it at the bit depth of the file, but not the pixels
    if transparent is not None and image.mode == 'L' and _bit_depth(image, content) < 8:
        image.info['transparency'] = transparent * 255 // (2 ** _bit_depth(image, content) - 1)
    if transparent is not None and image.mode == 'RGB' and _bit_depth(image, content) == 16:
        image.info['transparency'] = tuple(value >> 8 for value in transparent)
    return image


def _bit_depth(image: Image.Image, content: bytes) -> int:
    """Bits of a channel in the file."""
    return content[24] if image.format == 'PNG' else 8


def _changes(image: Image.Image, content: bytes) -> list[str]:
    """Why a decoder that knows only upright RGB and grey would show something else."""
    changes = []
    if image.mode == 'CMYK':
        changes.append('CMYK')
    if image.mode in SIXTEEN_BIT_MODES or _bit_depth(image, content) == 16:
        changes.append('16-bit')
    if image.mode in ('P', 'PA', '1'):
        changes.append('palette')
    if image.mode in ALPHA_MODES or 'transparency' in image.info:
        changes.append('alpha')
    if image.format != 'MPO' and getattr(image, 'n_frames', 1) > 1:  # the second frame of an MPO is for viewers that look for it
        changes.append('first frame')
    if _orientation(image) not in (None, 1):
        changes.append('EXIF orientation')
    if image.info.get('icc_profile') and isinstance(_transform_of(_in_eight_bits(image)), ImageCms.ImageCmsTransform):
        changes.append('colour profile')
    if not changes and image.mode not in ('RGB', 'L'):
        changes.append(f'mode {image.mode}')
    return changes


def _orientation(image: Image.Image) -> int | None:
    """EXIF orientation, 1 to 8, if the image has one that can be read."""
    try:
        value = image.getexif().get(ORIENTATION)
    except Exception:  # EXIF that Pillow cannot parse: viewers show such an image as it lies
        return None
    return value if value in range(1, 9) else None


def _upright(image: Image.Image) -> Image.Image:
    orientation = _orientation(image)
    return image if orientation in (None, 1) else image.transpose(UPRIGHT[orientation])


def _as_rgb(image: Image.Image) -> Image.Image:
    image = _in_eight_bits(image)
    if image.mode in ALPHA_MODES or 'transparency' in image.info:
        foreground = _in_srgb(image.convert('RGBA'))
        image = Image.new('RGBA', image.size, 'white')
        image.alpha_composite(foreground)
        return image.convert('RGB')
    image = _in_srgb(image.convert('RGB') if image.mode in ('P', '1') else image)
    return image if image.mode == 'RGB' else image.convert('RGB')


def _in_eight_bits(image: Image.Image) -> Image.Image:
    if image.mode not in SIXTEEN_BIT_MODES:
        return image
    values = np.asarray(image).astype(np.uint32)  # Pillow's own conversions clip 16 bits at 255
    grey = Image.fromarray(np.where(values == image.info.get('transparency'), 255, values >> 8).astype(np.uint8))
    grey.info = {name: value for name, value in image.info.items() if name == 'icc_profile'}
    return grey


def _in_srgb(image: Image.Image) -> Image.Image:
    """The image (8 bits; RGB, RGBA, L or CMYK) with the colours that its profile gives it, RGB or RGBA; unchanged if it gives no others."""
    transform = _transform_of(image)
    if not isinstance(transform, ImageCms.ImageCmsTransform):
        return image
    result = ImageCms.applyTransform(image.convert('RGB') if image.mode == 'L' and transform.input_mode == 'RGB' else image, transform)
    assert result is not None  # not in place
    return result
