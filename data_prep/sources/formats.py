"""The formats that `convert` can read. To add a format, write a class like these and name it in SOURCES."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from data_prep.sources.base import FOLDER_OUTSIDE, LINK_REMEDY, Source, SourceOptions, open_source
from data_prep.sources.image_folder import CocoCaptions, ImageFolder
from data_prep.sources.img2dataset import Img2datasetParquet, Img2datasetWebdataset
from data_prep.sources.mds import AnyMDS, ImageMDS
from data_prep.sources.parquet import HuggingFaceParquet
from data_prep.sources.webdataset import WebDataset
from diffusion.contracts.errors import DataError

# Tried in this order: the first that knows the folder's files reads it.
SOURCES: dict[str, type[Source]] = {
    'image MDS': ImageMDS,
    'MDS of named columns': AnyMDS,
    'img2dataset webdataset': Img2datasetWebdataset,
    'WebDataset': WebDataset,
    'COCO captions': CocoCaptions,
    'Hugging Face parquet': HuggingFaceParquet,
    'img2dataset parquet': Img2datasetParquet,
    'image folder': ImageFolder,
}


def find_source(
    where: str, split: str | None = None, columns: Mapping[str, str] = MappingProxyType({}), caption: str | None = None
) -> tuple[str, Source]:
    """The name of the first format that matches the folder or URL, and its reader.

    Raises:
        DataError: no such folder, or nothing in it that any source reads.
    """
    if Path(where).is_file():
        raise DataError(f'{where}: is a file; name the folder that it is in')
    folder, asked = open_source(where), SourceOptions(split, columns, caption)
    files = folder.files()
    if not files:
        nothing = 'no such folder, or there is nothing in it'  # which object storage does not tell apart
        raise DataError(f'{where}: {nothing if "://" in where else "there is nothing in this folder" if Path(where).is_dir() else "no such folder"}')
    for name, source in SOURCES.items():
        reader = source.open(folder, files, asked) if source.takes_columns or not asked.columns else None
        if reader is not None:
            if asked.split is not None and not reader.has_splits:
                raise DataError(f'{where}: {name} has no splits; name the folder of {asked.split!r} as the source instead')
            if caption is not None and not reader.takes_caption:
                raise DataError(f'{where}: {name} has captions of its own; one caption for all is for a folder of images')
            outside = [] if reader.counts_links else [path for path, stat in files.items() if stat.refused == FOLDER_OUTSIDE]
            if outside:
                raise DataError(f'{where}/{outside[0]}: is {FOLDER_OUTSIDE}; {LINK_REMEDY}')
            return name, reader
    known = [name for name, source in SOURCES.items() if source.takes_columns or not asked.columns]
    raise DataError(f'{where}: none of the formats that can be read{" with --columns" if asked.columns else ""} ({", ".join(known)}) is here')
