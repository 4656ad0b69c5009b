"""What `convert` can read. A source is a folder that splits into parts; a part gives rows.

To add a format, write a class with `matches` and `parts` and name it in SOURCES.
"""

from __future__ import annotations

import hashlib
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from data_prep.parts import DataError, Part

PICTURE_COLUMNS = ('jpg', 'png', 'webp')


@dataclass
class Row:
    """One input row, whatever became of it so far."""

    key: str
    url: str
    caption: str | None
    image: bytes | None
    """Encoded picture; None if an earlier step already lost it."""
    reason: str | None = None
    """Why the row cannot be used, if that is known already."""


class Source(Protocol):
    """A format of captioned images."""

    @staticmethod
    def matches(folder: Path) -> bool:
        """Whether the folder looks like this format."""

    @staticmethod
    def parts(folder: Path) -> list[Part]:
        """The input in parts, in a fixed order; their rows are `Row`s, read a few at a time."""


class Img2datasetWebdataset:
    """`NNNNN.tar` with `.jpg`, `.txt` and `.json` a sample, and `NNNNN.parquet` with a line for every URL, failed ones too."""

    IMAGE_SUFFIXES = ('jpg', 'jpeg', 'png', 'webp')

    @staticmethod
    def matches(folder: Path) -> bool:
        return bool(_files(folder, 'tar'))

    @classmethod
    def parts(cls, folder: Path) -> list[Part]:
        tars, sidecars = ({path.stem: path for path in _files(folder, suffix)} for suffix in ('tar', 'parquet'))
        for stem in sorted(tars.keys() ^ sidecars.keys()):
            lacking = f'{stem}.tar' if stem in sidecars else f'{stem}.parquet'
            raise DataError(f'{folder / lacking}: missing; img2dataset writes a tar and a parquet for each shard: download this shard again')
        return [
            Part(stem, fingerprint(tars[stem], sidecars[stem]), _num_rows(sidecars[stem]), partial(cls.rows, tars[stem])) for stem in sorted(tars)
        ]

    @classmethod
    def rows(cls, shard: Path) -> Iterator[Row]:
        with _readable(shard.with_suffix('.parquet')):
            listed = {row.key: row for row in _listed(shard.with_suffix('.parquet'), pictures=False)}
        with _readable(shard), tarfile.open(shard) as tar:
            for key, files in cls._samples(tar):
                row = listed.pop(key, None)
                if row is None:
                    raise DataError(f'{shard}: holds the sample {key!r}, which {shard.stem}.parquet does not list; download this shard again')
                row.image = next((files[suffix] for suffix in cls.IMAGE_SUFFIXES if suffix in files), None)
                row.reason = None if row.image else 'no picture in the tar'
                try:
                    row.caption = files['txt'].decode() if 'txt' in files else row.caption
                except UnicodeDecodeError:
                    row.reason = 'caption is not UTF-8'
                yield row
        for row in listed.values():
            if row.reason is None:
                raise DataError(
                    f'{shard}: lacks {row.key}, which {shard.stem}.parquet lists as downloaded: the tar was cut short; download this shard again'
                )
            yield row

    @staticmethod
    def _samples(tar: tarfile.TarFile) -> Iterator[tuple[str, dict[str, bytes]]]:
        """(key, content by suffix); the files of a sample lie next to each other and share the name up to its first dot."""
        key, files = '', dict[str, bytes]()
        for member in tar:
            if not member.isfile():
                continue
            stem, _, suffix = PurePosixPath(member.name).name.partition('.')
            if stem != key and files:
                yield key, files
                files = {}
            key = stem
            content = tar.extractfile(member)
            files[suffix.lower()] = content.read() if content else b''
        if files:
            yield key, files


class Img2datasetParquet:
    """`NNNNN.parquet` with the picture in the column `jpg` (or `png`, `webp`), empty for failed URLs."""

    @staticmethod
    def matches(folder: Path) -> bool:
        return bool(_files(folder, 'parquet'))

    @classmethod
    def parts(cls, folder: Path) -> list[Part]:
        return [Part(shard.stem, fingerprint(shard), _num_rows(shard), partial(cls.rows, shard)) for shard in _files(folder, 'parquet')]

    @staticmethod
    def rows(shard: Path) -> Iterator[Row]:
        with _readable(shard):
            for row in _listed(shard, pictures=True):
                if row.image is None and row.reason is None:
                    row.reason = 'no picture in the row'
                yield row


SOURCES: dict[str, type[Source]] = {'img2dataset webdataset': Img2datasetWebdataset, 'img2dataset parquet': Img2datasetParquet}


def find_source(folder: Path) -> tuple[str, type[Source]]:
    """The name and class of the first format that matches.

    Raises:
        DataError: no such folder, or nothing in it that any source reads.
    """
    if not folder.is_dir():
        raise DataError(f'{folder}: no such folder')
    for name, source in SOURCES.items():
        if source.matches(folder):
            return name, source
    raise DataError(f'{folder}: none of the formats that can be read ({", ".join(SOURCES)}) is here')


def fingerprint(*files: Path, sample_bytes: int = 1 << 16) -> dict[str, Any]:
    """What changes when an input file changes: sizes, and a digest of the beginnings and ends. A copy has the same one."""
    digest = hashlib.sha256()
    for path in files:
        with path.open('rb') as file:
            digest.update(file.read(sample_bytes))
            file.seek(max(0, path.stat().st_size - sample_bytes))
            digest.update(file.read(sample_bytes))
    return {'files': [path.name for path in files], 'bytes': [path.stat().st_size for path in files], 'sha256_of_ends': digest.hexdigest()}


def _files(folder: Path, suffix: str) -> list[Path]:
    return sorted(path for path in folder.glob(f'*.{suffix}') if not path.name.startswith('.'))


def _num_rows(shard: Path) -> int:
    with _readable(shard):
        return pq.read_metadata(shard).num_rows


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """What a damaged file raises becomes a DataError that names it."""
    try:
        yield
    except (OSError, pa.ArrowException, tarfile.TarError, EOFError) as error:
        raise DataError(f'{path}: cannot be read: {" ".join(str(error).split())}; download this shard again') from error


def _listed(shard: Path, pictures: bool) -> Iterator[Row]:
    """The rows of one of img2dataset's parquet files, with the pictures if it holds them."""
    with pq.ParquetFile(shard) as file:
        present = file.schema_arrow.names
        missing = sorted({'key', 'caption', 'status'} - set(present))
        column = next((name for name in PICTURE_COLUMNS if name in present), None)
        if missing or (pictures and column is None):
            needed = missing or [f'one of {", ".join(PICTURE_COLUMNS)} with the pictures']
            raise DataError(f'{shard}: has no column {" and ".join(needed)}; it has {", ".join(present)}')
        wanted = ['key', 'caption', 'status', *(['url'] if 'url' in present else []), *([column] if pictures and column else [])]
        for batch in file.iter_batches(batch_size=64, columns=wanted):
            for row in batch.to_pylist():
                status = row['status'] or 'status unknown'
                caption = None if row['caption'] is None else str(row['caption'])
                reason = None if status == 'success' else str(status).replace('_', ' ')
                image = row[column] if pictures and column else None
                yield Row(str(row['key']), str(row.get('url') or ''), caption, image or None, None if image else reason)
