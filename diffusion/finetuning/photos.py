"""A folder of photos, judged before anything is made of it: every image can be used and has a caption, or is named. Imports no torch."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

from data_prep.converting.buckets import AspectBuckets
from data_prep.converting.conversion import original_size
from data_prep.converting.filters import Options
from data_prep.sources.base import Row
from data_prep.sources.formats import find_source
from diffusion.common.storage import scratch_for
from diffusion.common.text import counted
from diffusion.contracts.errors import DataError
from diffusion.datasets.decode import ImageError, canonical
from diffusion.recipe.schema import Data, Photos

MAX_NAMED = 20  # photos in one message
OF_FOLDERS = 'image folder'  # the format of data_prep that reads them


@dataclass(frozen=True)
class Photo:
    """A photo that can be used."""

    key: str  # its path below the folder
    sha256: str  # of the file
    captions: list[tuple[str, float]]  # with weights that add up to 1
    bucket: str  # WIDTHxHEIGHT of the aspect bucket that it belongs to; '' where photos become squares
    content: bytes  # encoded image, upright RGB or grey
    size_px: tuple[int, int]  # width and height, before it was resized where a list of the folder names those
    train_px: tuple[int, int]  # width and height that it is brought to


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
    options = Options(buckets=AspectBuckets(data.resolution)) if data.aspect_buckets else Options(min_side_px=data.resolution)
    wrong = list[str]()
    for part in reader.parts():
        with scratch_for() as scratch:
            for row in reader.rows(part, scratch):
                photo = _judged(row, options, data.resolution)
                if isinstance(photo, Photo):
                    yield photo
                else:
                    wrong.append(f'{photos.folder}/{row.key}: {photo}')
    if wrong:
        more = [f'  - and {len(wrong) - MAX_NAMED} more'] if len(wrong) > MAX_NAMED else []
        remedy = (
            'fix them or take them out of the folder: an unreadable image or HEIC as JPEG, a caption in a .txt file of the name of the image '
            'or one for all in photos.caption, a small image at a lower data.resolution'
        )
        lines = [f'{counted(len(wrong), "file")} of {photos.folder} cannot be used:', *(f'  - {one}' for one in wrong[:MAX_NAMED]), *more, remedy]
        raise DataError('\n'.join(lines))


def _judged(row: Row, options: Options, side: int) -> Photo | str:
    """Return the photo, or why the row cannot be used."""
    captions, reason = options.usable_captions(row)
    if reason is not None or row.image is None:
        return reason or 'no image'
    try:
        image = canonical(row.image)
    except ImageError as error:
        return str(error)
    bucket, reason = options.place(*image.image.size)
    if bucket is None:
        return reason or ''
    width, height = map(int, bucket.split('x')) if bucket else (side, side)
    sha256, size_px = hashlib.sha256(row.image).hexdigest(), original_size(row, *image.image.size)
    return Photo(row.key, sha256, captions, bucket, image.content, size_px, (width, height))
