"""The output of img2dataset: `webdataset` and `parquet`, one part a shard. All shards may lie in one folder or in folders of it."""

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, Self

import pyarrow.parquet as pq

from data_prep.sources.base import IMAGE_SUFFIXES, Part, Row, Source, SourceOptions, is_list, local_copy, readable, text
from data_prep.sources.parquet import parquet_rows
from data_prep.sources.webdataset import REMEDY, image_in, samples_of
from diffusion.common.files import parse_json
from diffusion.common.storage import Folder, Stat
from diffusion.contracts.errors import DataError

LISTS_NAME, RECORD_NAME, DONE_NAME = 'lists.json', 'download.json', 'failures.parquet'  # of data_prep.download
NOT_KEPT = {  # by img2dataset's message, the first of data_prep.download
    'not a JPEG, PNG or WebP': 'not a JPEG, PNG or WebP',
    'Image decoding error': 'not decoded by img2dataset',
    'image too small': 'too small for img2dataset',
    'aspect ratio too large': 'aspect ratio too large for img2dataset',
}


class Img2datasetParquet(Source):
    """`NNNNN.parquet` with a line for every URL, failed ones too, whose image in the column `jpg` (or `png`, `webp`) is then empty."""

    image_columns = True

    @classmethod
    def open(cls, folder: Folder, files: Mapping[str, Stat], asked: SourceOptions) -> Self | None:
        ours = {name: stat for name, stat in files.items() if name.endswith('.parquet') and _is_shard(name)}
        return cls(folder, ours) if ours else None

    def rows(self, part: Part, scratch: Path) -> Iterator[Row]:
        (name,) = part.files
        for row in self.listed_rows(name, scratch):
            if row.image is None and row.reason is None:
                row.reason = 'no image in the row'
            yield row

    def listed_rows(self, name: str, scratch: Path) -> Iterator[Row]:
        """The rows of a shard's parquet file, with the images if it has columns of them.

        Shards in folders of their own count keys from 0 again, so the folder is part of the key.
        """
        with local_copy(self.folder, name, scratch, REMEDY) as path, pq.ParquetFile(path) as file:
            present = file.schema_arrow.names
            missing = sorted({'key', 'caption', 'status'} - set(present))
            column = next((name for name in IMAGE_SUFFIXES if name in present), None) if self.image_columns else None
            if missing or (self.image_columns and column is None):
                needed = missing or [f'one of {", ".join(IMAGE_SUFFIXES)} with the images']
                raise DataError(f'{self.folder.url}/{name}: has no column {" and ".join(needed)}; it has {", ".join(present)}')
            wanted = [name for name in present if name not in IMAGE_SUFFIXES or name == column]
            for values in parquet_rows(file, wanted, rows_at_a_time=64 if column else 1024):
                image = values.pop(column) if column else None
                reason = None if image else _reason(values)
                yield self.row(f'{_prefix(name)}{text(values["key"])}', values.get('url'), image, values['caption'], values, reason)


class Img2datasetWebdataset(Img2datasetParquet):
    """`NNNNN.tar` with `.jpg`, `.txt` and `.json` a sample, and `NNNNN.parquet` with a line for every URL."""

    image_columns = False
    is_our_crawl = False
    """Whether data_prep.download wrote it: then the images are as they came, and have the SHA-256 that the list of rows says."""

    @classmethod
    def open(cls, folder: Folder, files: Mapping[str, Stat], asked: SourceOptions) -> Self | None:
        ours = {name: stat for name, stat in files.items() if name.endswith(('.tar', '.parquet')) and _is_shard(name)}
        records = {name for name in files if PurePosixPath(name).name == RECORD_NAME}
        if not records and not any(name.endswith('.tar') and f'{name.removesuffix(".tar")}.parquet' in ours for name in ours):
            return None
        _refuse_unfinished(folder, files, records)
        source = cls(folder, ours)
        source.is_our_crawl = bool(records)
        return source

    def parts(self) -> list[Part]:
        tars, sidecars = ({name.removesuffix(suffix) for name in self.files if name.endswith(suffix)} for suffix in ('.tar', '.parquet'))
        for stem in sorted(tars ^ sidecars):
            lacking = f'{stem}.tar' if stem in sidecars else f'{stem}.parquet'
            raise DataError(f'{self.folder.url}/{lacking}: missing; img2dataset writes a tar and a parquet for each shard: {REMEDY}')
        return [Part(stem.replace('/', '-'), {name: self.files[name] for name in (f'{stem}.tar', f'{stem}.parquet')}) for stem in sorted(tars)]

    def rows(self, part: Part, scratch: Path) -> Iterator[Row]:
        tar_name, sidecar_name = part.files
        where = f'{self.folder.url}/{tar_name}'
        rows = list(self.listed_rows(sidecar_name, scratch))
        listed = {row.key: row for row in rows}
        if len(listed) < len(rows):
            raise DataError(f'{self.folder.url}/{sidecar_name}: {len(rows)} rows share {len(listed)} keys; {REMEDY}')
        with local_copy(self.folder, tar_name, scratch, REMEDY) as tar:
            for sample, files in samples_of(tar, (*IMAGE_SUFFIXES, 'txt')):  # the .json says what the parquet file says
                key = PurePosixPath(sample).name
                found = listed.pop(_prefix(tar_name) + key, None)
                if found is None:
                    raise DataError(f'{where}: holds the sample {key!r}, which {sidecar_name} does not list; {REMEDY}')
                image, captions = image_in(files), files.get('txt', found.columns['caption'])
                row = self.row(found.key, found.url, image, captions, found.columns, None if image else 'no image in the tar')
                if row.image is not None and self.is_our_crawl:
                    row.sha256 = hashlib.sha256(row.image).hexdigest()
                    if row.sha256 != text(row.columns.get('sha256')):
                        row.image, row.reason = None, 'SHA-256 is not that of the download'
                yield row
        for row in listed.values():
            if row.columns['status'] == b'success':
                raise DataError(f'{where}: lacks {row.key}, which {sidecar_name} lists as downloaded: the tar was cut short; {REMEDY}')
            yield row


def _refuse_unfinished(folder: Folder, files: Mapping[str, Stat], records: set[str]) -> None:
    """Part of a crawl looks like a smaller crawl, so what says that it is part is believed.

    Raises:
        DataError: a list is not downloaded to its end, or img2dataset has not finished a shard.
    """
    folders = {name.removesuffix(RECORD_NAME) for name in records}
    if LISTS_NAME in files:
        with readable(f'{folder.url}/{LISTS_NAME}', 'run data_prep.download again'):
            folders |= {f'{name}/' for name in parse_json(folder.read(LISTS_NAME))}
    for prefix in sorted(folders):
        if f'{prefix}{DONE_NAME}' not in files:
            where = f'{folder.url}/{prefix}'.rstrip('/')
            raise DataError(f'{where}: the download is not finished; run data_prep.download again until it ends with its table')
    if any(name.endswith('_stats.json') for name in files):
        for name in files:
            if name.endswith('.tar') and f'{name.removesuffix(".tar")}_stats.json' not in files:
                raise DataError(f'{folder.url}/{name}: has no _stats.json next to it, so img2dataset has not finished it; {REMEDY}')


def _is_shard(name: str) -> bool:
    """Whether the file is a shard, and not a list that the commands leave next to the shards."""
    return PurePosixPath(name).name != DONE_NAME and not is_list(name)


def _prefix(name: str) -> str:
    """The folder of a shard, before its keys."""
    return name[: name.rfind('/') + 1]


def _reason(values: Mapping[str, Any]) -> str | None:
    """Why img2dataset has no image of a row; None if it says that it has."""
    status = text(values['status']) or 'status unknown'
    if status == 'failed_to_resize':  # its word for all that it fetched and did not keep, also where nothing is resized
        return NOT_KEPT.get(text(values.get('error_message')) or '', 'not kept by img2dataset')
    return None if status == 'success' else status.replace('_', ' ')
