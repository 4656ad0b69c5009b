"""A folder of photos, judged before anything is made of it: every image can be used and has a caption, or is named. Imports no torch."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

from PIL import Image, ImageChops, ImageOps

from data_prep.converting.buckets import AspectBuckets
from data_prep.converting.conversion import original_size
from data_prep.converting.filters import Options
from data_prep.sources.base import Row, read_image
from data_prep.sources.formats import find_source
from data_prep.sources.image_folder import SUFFIXES
from diffusion.common.storage import scratch_for
from diffusion.common.text import counted
from diffusion.contracts.errors import DataError
from diffusion.datasets.decode import ImageError, alpha_of, canonical, open_image
from diffusion.recipe.schema import Data, Photos

MAX_NAMED = 20  # photos in one message
OF_FOLDERS = 'image folder'  # the format of data_prep that reads them
BRIGHT = 128  # of 255: a mask without it is of another kind, such as class numbers


@dataclass(frozen=True)
class Photo:
    """A photo that can be used."""

    key: str  # its path below the folder
    sha256: str  # of the file, and of its mask's
    captions: list[tuple[str, float]]  # with weights that add up to 1
    bucket: str  # WIDTHxHEIGHT of the aspect bucket that it belongs to; '' where photos become squares
    content: bytes  # encoded image, upright RGB or grey
    size_px: tuple[int, int]  # width and height, before it was resized where a list of the folder names those
    train_px: tuple[int, int]  # width and height that it is brought to
    mask: Image.Image | None  # grey, of the image's size: white on what is to be learned; None counts all of it


def read_photos(photos: Photos, data: Data, key: str = 'photos') -> Iterator[Photo]:
    """Yield every photo of the folder, decoded once; none is enlarged to the recipe's resolution.

    Args:
        key: of the recipe that names them, for messages about the folder.

    Raises:
        DataError: there is no such folder; or, after the last photo, some of its images cannot be used: each is named with the reason.
    """
    try:
        kind, reader = find_source(photos.folder, caption=photos.caption)
    except DataError as error:
        raise DataError(f'{key}.folder: {error}; name the folder with the images') from error
    if kind != OF_FOLDERS:
        raise DataError(
            f'{key}.folder: {photos.folder}: is {kind}; photos are image files, other data become a dataset by python -m data_prep.convert'
        )
    masks = {stem: name for name in reader.files if (stem := _masked(name))}
    if masks and photos.loss_outside is None:
        what = f'{photos.folder}: has {counted(len(masks), "mask")}, {next(iter(masks.values()))} for example'
        raise DataError(f'{key}.folder: {what}; set {key}.loss_outside, to 0.1 for example, or take them out of the folder')
    options = Options(buckets=AspectBuckets(data.resolution)) if data.aspect_buckets else Options(min_side_px=data.resolution)
    wrong, stems, num_masked = list[str](), set[str](), 0
    for part in reader.parts():
        with scratch_for() as scratch:
            for row in reader.rows(part, scratch):
                if _masked(row.key):
                    continue
                stem = row.key.rpartition('.')[0]
                mask = read_image(reader.folder, masks[stem], reader.files[masks[stem]], scratch)[0] or b'' if stem in masks else None
                photo = _judged(row, options, data.resolution, photos.loss_outside is not None, mask)
                if mask is not None and stem in stems:
                    photo = f'{masks[stem]} is the mask of another photo too; rename one'
                stems.add(stem)
                if isinstance(photo, Photo):
                    num_masked += photo.mask is not None
                    yield photo
                else:
                    wrong.append(f'{photos.folder}/{row.key}: {photo}')
    wrong += [f'{photos.folder}/{mask}: no photo of this name' for stem, mask in masks.items() if stem not in stems]
    if wrong:
        more = [f'  - and {len(wrong) - MAX_NAMED} more'] if len(wrong) > MAX_NAMED else []
        remedy = (
            'fix them or take them out of the folder: an unreadable image or HEIC as JPEG, a caption in a .txt file of the name of the image '
            "or one for all in photos.caption, a small image at a lower data.resolution, a mask as a grey PNG of its photo's size"
        )
        lines = [f'{counted(len(wrong), "file")} of {photos.folder} cannot be used:', *(f'  - {one}' for one in wrong[:MAX_NAMED]), *more, remedy]
        raise DataError('\n'.join(lines))
    if photos.loss_outside is not None and not num_masked:
        raise DataError(f'{key}.loss_outside: no photo of {photos.folder} has a mask (NAME.mask.png) or an alpha channel; leave the key out')


def _masked(name: str) -> str:
    """Return which photo, without its suffix, a file `NAME.mask.png` (or of another format) is the mask of; '' if it is none."""
    stem, _, suffix = name.rpartition('.')
    return stem[: -len('.mask')] if suffix.lower() in SUFFIXES and stem.lower().endswith('.mask') else ''


def _judged(row: Row, options: Options, side: int, masked: bool, mask_file: bytes | None) -> Photo | str:
    """Return the photo, or why the row cannot be used.

    Args:
        masked: take its alpha channel for its mask unless there is a `mask_file`.
    """
    captions, reason = options.usable_captions(row)
    if reason is not None or row.image is None:
        return reason or 'no image'
    try:
        image = canonical(row.image)
        mask = alpha_of(row.image) if masked else None
    except ImageError as error:
        return str(error)
    if mask_file is not None:
        try:
            mask, alpha = open_image(mask_file).convert('L'), alpha_of(mask_file)
            mask = mask if alpha is None else ImageChops.multiply(mask, alpha)  # of some the selection is white, of others opaque
        except ImageError as error:
            return f'its mask: {error}'
    if mask is not None and mask.size != image.image.size:
        return f'its mask has {mask.width} x {mask.height} px, the photo {image.image.width} x {image.image.height}'
    bucket, reason = options.place(*image.image.size)
    if bucket is None:
        return reason or ''
    width, height = map(int, bucket.split('x')) if bucket else (side, side)
    if mask is not None and (brightest := _brightest(ImageOps.fit(mask, (width, height)))) < BRIGHT:
        where = 'anywhere' if _brightest(mask) < BRIGHT else 'in the middle, which is trained on'
        return f'its mask is not white {where} (at most {brightest} of 255); what is to be learned is white'
    sha256, size_px = hashlib.sha256(row.image + (mask_file or b'')).hexdigest(), original_size(row, *image.image.size)
    return Photo(row.key, sha256, captions, bucket, image.content, size_px, (width, height), mask)


def _brightest(grey: Image.Image) -> int:
    return max(value for value, count in enumerate(grey.histogram()) if count)
