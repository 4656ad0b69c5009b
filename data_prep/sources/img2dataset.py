"""The output of img2dataset: `webdataset` and `parquet`, one part a shard. All shards may lie in one folder or in folders of it."""

from __future__ import annotations

import hashlib
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import pyarrow.parquet as pq

from data_prep.sources.base import (
    IMAGE_SUFFIXES,
    MAX_IMAGE_BYTES,
    Part,
    Row,
    Source,
    SourceOptions,
    captions_of,
    is_list,
    readable,
    text,
    url_of,
)
from data_prep.sources.parquet import parquet_rows
from diffusion.common.files import parse_json
from diffusion.common.storage import Folder, Stat
from diffusion.contracts.errors import DataError

REMEDY = 'download this shard again'
LISTS_NAME, RECORD_NAME, DONE_NAME = 'lists.json', 'download.json', 'failures.parquet'  # of data_prep.download
WANTED_SUFFIXES = (*IMAGE_SUFFIXES, 'txt')
TOO_LARGE = b'too large'
NOT_KEPT = {  # by img2dataset's message, the first of data_prep.download
    'not a JPEG, PNG or WebP': 'not a JPEG, PNG or WebP',
    'Image decoding error': 'not decoded by img2dataset',
    'image too small': 'too small for img2dataset',
    'aspect ratio too large': 'aspect ratio too large for img2dataset',
}


class Img2datasetWebdataset(Source):
    """`NNNNN.tar` with `.jpg`, `.txt` and `.json` a sample, and `NNNNN.parquet` with a line for every URL, failed ones too."""

    def __init__(self, folder: Folder, files: Mapping[str, Stat], is_our_crawl: bool):
        self.folder, self.files = folder, files
        self.is_our_crawl = is_our_crawl
        """Whether data_prep.download wrote it: then the images are as they came, and have the SHA-256 that the list of rows says."""

    @classmethod
    def open(cls, folder: Folder, files: Mapping[str, Stat], asked: SourceOptions) -> Img2datasetWebdataset | None:
        ours = {name: stat for name, stat in files.items() if name.endswith(('.tar', '.parquet')) and _is_shard(name)}
        records = {name for name in files if PurePosixPath(name).name == RECORD_NAME}
        if not records and not any(name.endswith('.tar') and f'{name.removesuffix(".tar")}.parquet' in ours for name in ours):
            return None
        _refuse_unfinished(folder, files, records)
        return cls(folder, ours, bool(records))

    def parts(self) -> list[Part]:
        tars, sidecars = ({name.removesuffix(suffix) for name in self.files if name.endswith(suffix)} for suffix in ('.tar', '.parquet'))
        for stem in sorted(tars ^ sidecars):
            lacking = f'{stem}.tar' if stem in sidecars else f'{stem}.parquet'
            raise DataError(f'{self.folder.url}/{lacking}: missing; img2dataset writes a tar and a parquet for each shard: {REMEDY}')
        return [_part(stem, {name: self.files[name] for name in (f'{stem}.tar', f'{stem}.parquet')}) for stem in sorted(tars)]

    def rows(self, part: Part, scratch: Path) -> Iterator[Row]:
        tar_name, sidecar_name = part.files
        where = f'{self.folder.url}/{tar_name}'
        sidecar = self.folder.fetch(sidecar_name, scratch)
        with readable(f'{self.folder.url}/{sidecar_name}', REMEDY):
            rows = list(_listed(sidecar, f'{self.folder.url}/{sidecar_name}', _prefix(tar_name), with_images=False))
        listed = {row.key: row for row in rows}
        if len(listed) < len(rows):
            raise DataError(f'{self.folder.url}/{sidecar_name}: {len(rows)} rows share {len(listed)} keys; {REMEDY}')
        with readable(where, REMEDY), tarfile.open(self.folder.fetch(tar_name, scratch), 'r:') as tar:
            for key, files in self._samples(tar):
                row = listed.pop(_prefix(tar_name) + key, None)
                if row is None:
                    raise DataError(f'{where}: holds the sample {key!r}, which {sidecar_name} does not list; {REMEDY}')
                row.image = next((files[suffix] for suffix in IMAGE_SUFFIXES if suffix in files), None)
                row.reason = None if row.image else 'no image in the tar'
                if row.image is TOO_LARGE:
                    row.image, row.reason = None, f'over {MAX_IMAGE_BYTES >> 20} MB'
                if row.image is not None and self.is_our_crawl:
                    row.sha256 = hashlib.sha256(row.image).hexdigest()
                    if row.sha256 != text(row.columns.get('sha256')):
                        row.image, row.reason = None, 'SHA-256 is not that of the download'
                if files.get('txt') is TOO_LARGE:
                    row.captions, row.reason = [], f'caption over {MAX_IMAGE_BYTES >> 20} MB'
                else:
                    row.captions, not_text = captions_of(files['txt'] if 'txt' in files else row.columns['caption'])
                    row.reason = row.reason or not_text
                yield row
        for row in listed.values():
            if row.columns['status'] == b'success':
                raise DataError(f'{where}: lacks {row.key}, which {sidecar_name} lists as downloaded: the tar was cut short; {REMEDY}')
            yield row

    @staticmethod
    def _samples(tar: tarfile.TarFile) -> Iterator[tuple[str, dict[str, bytes]]]:
        """(key, content by suffix); the files of a sample lie next to each other and share the name up to its first dot."""
        key, files = '', dict[str, bytes]()
        for member in tar:
            if not member.isfile():
                continue
            stem, _, suffix = PurePosixPath(member.name).name.partition('.')
            if not stem:
                continue  # what macOS puts next to a file
            if stem != key and files:
                yield key, files
                files = {}
            key, suffix = stem, suffix.lower()
            if suffix not in WANTED_SUFFIXES:
                files[suffix] = b''  # the .json says what the parquet file says
                continue
            if member.size > MAX_IMAGE_BYTES:
                files[suffix] = TOO_LARGE
                continue
            content = tar.extractfile(member)
            files[suffix] = content.read() if content else b''
        if files:
            yield key, files


class Img2datasetParquet(Source):
    """`NNNNN.parquet` with the image in the column `jpg` (or `png`, `webp`), empty for failed URLs."""

    def __init__(self, folder: Folder, files: Mapping[str, Stat]):
        self.folder, self.files = folder, files

    @classmethod
    def open(cls, folder: Folder, files: Mapping[str, Stat], asked: SourceOptions) -> Img2datasetParquet | None:
        ours = {name: stat for name, stat in files.items() if name.endswith('.parquet') and _is_shard(name)}
        return cls(folder, ours) if ours else None

    def parts(self) -> list[Part]:
        return [_part(name.removesuffix('.parquet'), {name: stat}) for name, stat in self.files.items()]

    def rows(self, part: Part, scratch: Path) -> Iterator[Row]:
        (name,) = part.files
        with readable(f'{self.folder.url}/{name}', REMEDY):
            for row in _listed(self.folder.fetch(name, scratch), f'{self.folder.url}/{name}', _prefix(name), with_images=True):
                if row.image is None and row.reason is None:
                    row.reason = 'no image in the row'
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
    """Shards in folders of their own count keys from 0 again, so the folder is part of the key."""
    folder, _, _ = name.rpartition('/')
    return f'{folder}/' if folder else ''


def _part(stem: str, files: dict[str, Stat]) -> Part:
    return Part(stem.replace('/', '-'), files)


def _listed(shard: Path, where: str, prefix: str, with_images: bool) -> Iterator[Row]:
    """The rows of one of img2dataset's parquet files, with the images if it holds them."""
    with pq.ParquetFile(shard) as file:
        present = file.schema_arrow.names
        missing = sorted({'key', 'caption', 'status'} - set(present))
        column = next((name for name in IMAGE_SUFFIXES if name in present), None)
        if missing or (with_images and column is None):
            needed = missing or [f'one of {", ".join(IMAGE_SUFFIXES)} with the images']
            raise DataError(f'{where}: has no column {" and ".join(needed)}; it has {", ".join(present)}')
        wanted = [name for name in present if name not in IMAGE_SUFFIXES or (with_images and name == column)]
        for values in parquet_rows(file, wanted, rows_at_a_time=64 if with_images else 1024):
            yield _row(values, prefix, values.pop(column) if with_images and column else None)


def _row(values: dict[str, Any], prefix: str, image: bytes | None) -> Row:
    status = text(values['status']) or 'status unknown'
    reason = None if status == 'success' else status.replace('_', ' ')
    if status == 'failed_to_resize':  # its word for all that it fetched and did not keep, also where nothing is resized
        reason = NOT_KEPT.get(text(values.get('error_message')) or '', 'not kept by img2dataset')
    captions, not_text = captions_of(values['caption'])
    if image and len(image) > MAX_IMAGE_BYTES:
        image, reason = None, f'over {MAX_IMAGE_BYTES >> 20} MB'
    key, url = prefix + str(text(values['key'])), url_of(values.get('url'))
    return Row(key, url, captions, image or None, values, not_text if image and not_text else None if image else reason or not_text)
