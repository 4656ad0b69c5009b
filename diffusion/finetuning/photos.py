"""A folder of photos, judged before anything is made of it: every image can be used and has a caption, or is named. Imports no torch."""

import hashlib
from dataclasses import dataclass

from data_prep.converting.buckets import AspectBuckets
from data_prep.converting.conversion import Options
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
    """A photo that can be used.

    Attributes:
        key: its path below the folder.
        sha256: of the file.
        captions: with weights that add up to 1.
        bucket: the aspect bucket that it belongs to; '' where photos become squares.
    """

    key: str
    sha256: str
    captions: list[tuple[str, float]]
    bucket: str


def conversion_of(data: Data) -> Options:
    """How `data_prep` converts images that train at the recipe's resolution: none is enlarged."""
    if data.aspect_buckets:
        return Options(buckets=AspectBuckets(data.resolution))
    return Options(min_side_px=data.resolution)


def read_photos(photos: Photos, data: Data, key: str = 'photos') -> list[Photo]:
    """Every photo of the folder, decoded once.

    Args:
        key: of the recipe that names them, for messages about the folder.

    Raises:
        DataError: there is no such folder, or some of its images cannot be used: each is named with the reason.
    """
    try:
        kind, reader = find_source(photos.folder, caption=photos.caption)
    except DataError as error:
        raise DataError(f'{key}.folder: {error}; name the folder with the images') from error
    if kind != OF_FOLDERS:
        raise DataError(
            f'{key}.folder: {photos.folder}: is {kind}; photos are image files, other data become a dataset by python -m data_prep.convert'
        )
    options, found, wrong = conversion_of(data), list[Photo](), list[str]()
    for part in reader.parts():
        with scratch_for() as scratch:
            for row in reader.rows(part, scratch):
                photo = _judged(row, options)
                if isinstance(photo, Photo):
                    found.append(photo)
                else:
                    wrong.append(f'{photos.folder}/{row.key}: {photo}')
    if wrong:
        more = [f'and {len(wrong) - MAX_NAMED} more'] if len(wrong) > MAX_NAMED else []
        remedy = (
            'fix them or take them out of the folder: an unreadable image or HEIC as JPEG, a caption in a .txt file of the name of the image '
            'or one for all in photos.caption, a small image at a lower data.resolution'
        )
        lines = [f'  - {one}' for one in [*wrong[:MAX_NAMED], *more]]
        raise DataError('\n'.join([f'{counted(len(wrong), "file")} of {photos.folder} cannot be used:', *lines, remedy]))
    return found


def _judged(row: Row, options: Options) -> Photo | str:
    """The photo, or why the row cannot be used."""
    captions, reason = options.usable_captions(row)
    if reason is not None or row.image is None:
        return reason or 'no image'
    try:
        stream, reason = options.place(*canonical(row.image).image.size)
    except ImageError as error:
        return str(error)
    return reason or '' if stream is None else Photo(row.key, hashlib.sha256(row.image).hexdigest(), captions, stream)
