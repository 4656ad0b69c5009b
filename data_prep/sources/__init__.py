"""What `convert` can read. To add a format, write a class like these in a file of its own and name it in SOURCES."""

from __future__ import annotations

from pathlib import Path

from data_prep.errors import DataError
from data_prep.sources.base import Part, Row, Source
from data_prep.sources.coco import CocoCaptions
from data_prep.sources.huggingface import HuggingFaceParquet
from data_prep.sources.image_folder import ImageFolder
from data_prep.sources.image_mds import ImageMDS
from data_prep.sources.img2dataset import Img2datasetParquet, Img2datasetWebdataset
from diffusion.storage import open_folder

__all__ = ['SOURCES', 'Part', 'Row', 'Source', 'find_source']

# Asked in this order: the first that knows the folder's files reads it.
SOURCES: dict[str, type[Source]] = {
    'image MDS': ImageMDS,
    'img2dataset webdataset': Img2datasetWebdataset,
    'COCO captions': CocoCaptions,
    'Hugging Face parquet': HuggingFaceParquet,
    'img2dataset parquet': Img2datasetParquet,
    'image folder': ImageFolder,
}


def find_source(where: str, split: str | None = None) -> tuple[str, Source]:
    """The name of the first format that matches the folder or URL, and its reader.

    Raises:
        DataError: no such folder, or nothing in it that any source reads.
    """
    if Path(where).is_file():
        raise DataError(f'{where}: is a file; name the folder that it is in')
    folder = open_folder(where)
    files = folder.files()
    if not files:
        raise DataError(f'{where}: no such folder, or there is nothing in it')
    for name, source in SOURCES.items():
        reader = source.open(folder, files, split)
        if reader is not None:
            if split is not None and not reader.has_splits:
                raise DataError(f'{where}: {name} has no splits; name the folder of {split!r} as the source instead')
            return name, reader
    raise DataError(f'{where}: none of the formats that can be read ({", ".join(SOURCES)}) is here')
