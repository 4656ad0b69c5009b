"""What `convert` can read. A source is a folder that splits into input shards; a shard gives rows.

To add a format, write a class with `matches`, `shards` and `rows` and name it in SOURCES.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pyarrow.parquet as pq


class SourceError(ValueError):
    """The source is missing, empty, of no known format, or damaged."""


@dataclass
class Row:
    """One input row, whatever became of it so far."""

    key: str
    url: str
    caption: str | None
    image: bytes | None
    """Encoded picture; None if an earlier step already lost it."""
    reason: str | None = None
    """Why there is no picture."""


class Source(Protocol):
    """A format of captioned images on disk."""

    @staticmethod
    def matches(folder: Path) -> bool:
        """Whether the folder looks like this format."""

    @staticmethod
    def shards(folder: Path) -> list[Path]:
        """The input shards in a fixed order; each becomes one part of the output."""

    @staticmethod
    def num_rows(shard: Path) -> int:
        """Rows of a shard, cheaply."""

    @staticmethod
    def rows(shard: Path) -> Iterator[Row]:
        """All rows of a shard, the failed ones included, one picture in memory at a time."""


class Img2datasetWebdataset:
    """`NNNNN.tar` with `.jpg`, `.txt` and `.json` a sample, and `NNNNN.parquet` with a line for every URL, failed ones too."""

    IMAGE_SUFFIXES = ('jpg', 'jpeg', 'png', 'webp')

    @staticmethod
    def matches(folder: Path) -> bool:
        return any(folder.glob('*.tar'))

    @staticmethod
    def shards(folder: Path) -> list[Path]:
        return sorted(folder.glob('*.tar'))

    @staticmethod
    def num_rows(shard: Path) -> int:
        return pq.read_metadata(_sidecar(shard)).num_rows

    @classmethod
    def rows(cls, shard: Path) -> Iterator[Row]:
        listed = {row['key']: row for row in pq.read_table(_sidecar(shard), columns=['key', 'url', 'caption', 'status']).to_pylist()}
        try:
            with tarfile.open(shard) as tar:
                for key, files in cls._samples(tar):
                    row = listed.pop(key, {})
                    image = next((files[suffix] for suffix in cls.IMAGE_SUFFIXES if suffix in files), None)
                    caption = files['txt'].decode() if 'txt' in files else row.get('caption')
                    yield Row(key, row.get('url') or '', caption, image, None if image else 'no picture in the tar')
        except (tarfile.TarError, EOFError, OSError) as error:
            raise SourceError(f'{shard}: damaged tar file: {error}; download this shard again') from error
        lost = [key for key, row in listed.items() if row['status'] == 'success']
        if lost:
            raise SourceError(
                f'{shard}: lacks {len(lost)} pictures that {_sidecar(shard).name} lists as downloaded, such as {lost[0]}; '
                'the tar was cut short: download this shard again'
            )
        for key, row in listed.items():
            yield Row(key, row['url'], row['caption'], None, _failure(row['status']))

    @staticmethod
    def _samples(tar: tarfile.TarFile) -> Iterator[tuple[str, dict[str, bytes]]]:
        """(key, content by suffix); the files of a sample lie next to each other."""
        key, files = '', dict[str, bytes]()
        for member in tar:
            stem, _, suffix = member.name.partition('.')
            content = tar.extractfile(member)
            if content is None:  # a folder or a link
                continue
            if stem != key and files:
                yield key, files
                files = {}
            key = stem
            files[suffix.lower()] = content.read()
        if files:
            yield key, files


class Img2datasetParquet:
    """`NNNNN.parquet` with the picture in the column `jpg` (or `png`, `webp`), empty for failed URLs."""

    @staticmethod
    def matches(folder: Path) -> bool:
        first = next(iter(sorted(folder.glob('*.parquet'))), None)
        return first is not None and {'key', 'caption', 'status'} <= set(pq.read_schema(first).names)

    @staticmethod
    def shards(folder: Path) -> list[Path]:
        return sorted(folder.glob('*.parquet'))

    @staticmethod
    def num_rows(shard: Path) -> int:
        return pq.read_metadata(shard).num_rows

    @staticmethod
    def rows(shard: Path) -> Iterator[Row]:
        try:
            with pq.ParquetFile(shard) as file:
                column = next((name for name in ('jpg', 'png', 'webp') if name in file.schema_arrow.names), None)
                if column is None:
                    raise SourceError(f'{shard}: no column jpg, png or webp with the pictures; it has {", ".join(file.schema_arrow.names)}')
                for batch in file.iter_batches(batch_size=64, columns=['key', 'url', 'caption', 'status', column]):
                    for row in batch.to_pylist():
                        image = row[column]
                        yield Row(
                            row['key'], row['url'], row['caption'], image, None if image else _failure(row['status']) or 'no picture in the row'
                        )
        except OSError as error:
            raise SourceError(f'{shard}: damaged parquet file: {error}; download this shard again') from error


SOURCES: dict[str, type[Source]] = {'img2dataset webdataset': Img2datasetWebdataset, 'img2dataset parquet': Img2datasetParquet}


def find_source(folder: Path) -> tuple[str, type[Source]]:
    """The name and class of the first format that matches.

    Raises:
        SourceError: no such folder, or nothing in it that any source reads.
    """
    if not folder.is_dir():
        raise SourceError(f'{folder}: no such folder')
    for name, source in SOURCES.items():
        if source.matches(folder):
            return name, source
    raise SourceError(f'{folder}: none of the formats that can be read ({", ".join(SOURCES)}) is here')


def fingerprint(shard: Path) -> dict[str, Any]:
    """What changes when an input shard changes."""
    stat = shard.stat()
    return {'name': shard.name, 'bytes': stat.st_size, 'modified_ns': stat.st_mtime_ns}


def _sidecar(shard: Path) -> Path:
    sidecar = shard.with_suffix('.parquet')
    if not sidecar.exists():
        raise SourceError(f'{sidecar}: missing; img2dataset writes it beside {shard.name}, and without it lost rows cannot be counted')
    return sidecar


def _failure(status: str) -> str | None:
    """img2dataset's status in words: `failed_to_download` -> `failed to download`."""
    return None if status == 'success' else status.replace('_', ' ')
