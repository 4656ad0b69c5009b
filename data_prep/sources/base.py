"""What every source of captioned pictures has in common."""

from __future__ import annotations

import json
import re
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from data_prep.errors import DataError
from diffusion.storage import Folder, Stat, fingerprint

IMAGE_SUFFIXES = ('jpg', 'jpeg', 'png', 'webp')
MAX_IMAGE_BYTES = 64 << 20
NOT_TEXT = re.compile('[\ud800-\udfff]')  # what is left of bytes that are not UTF-8, and halves of characters in JSON
CAPTION_COLUMNS = ('caption', 'text', 'captions', 'TEXT')


@dataclass
class Row:
    """One input row, whatever became of it so far."""

    key: str
    url: str
    captions: list[str] | None
    """What the source takes for captions; several describe the same picture. None if it has no column of which it knows that."""
    image: bytes | None
    """Encoded picture; None if an earlier step already lost it."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """What else the source says of the row, by the source's own names; the same names in all rows of a part."""
    reason: str | None = None
    """Why the row cannot be used, if that is known already."""
    caption_weights: list[float] | None = None
    """How often each caption is to be used; equally often if None."""
    sha256: str | None = None
    """Of the picture when it was first converted, if this is not the first time."""
    reencoded: str = ''
    """What was changed in the picture then."""

    def __post_init__(self) -> None:
        self.key, self.url = utf8(self.key), utf8(self.url)


@dataclass(frozen=True)
class Part:
    """A piece of the input that becomes one part of the output.

    Attributes:
        name: file name of the part in DEST; the order of names is the order of the data.
        files: what it is read from.
        detail: what else the source needs to read it; counts as input.
    """

    name: str
    files: Mapping[str, Stat]
    detail: Any = None


class Source(Protocol):
    """A format of captioned pictures in a folder."""

    folder: Folder
    has_splits: bool
    """Whether `open` looks at the split."""
    several_captions: bool
    stored_columns: tuple[str, ...]
    """Columns that are kept without being asked for."""
    """Whether rows have several captions."""

    @classmethod
    def open(cls, folder: Folder, files: Mapping[str, Stat], split: str | None) -> Source | None:
        """A reader of this folder, or None if its files are not of this format."""

    def parts(self) -> list[Part]:
        """The input in parts, in a fixed order."""

    def fingerprint(self, part: Part) -> dict[str, Any]:
        """What changes when the part's input changes."""

    def rows(self, part: Part, scratch: Path) -> Iterator[Row]:
        """All rows of a part, a few at a time; remote files are copied to `scratch`.

        Raises:
            DataError: the input is damaged or incomplete; it names the file and the remedy.
        """


class FromFiles:
    """What sources that are plain files have in common.

    A worker gets the source with each part, so what was listed stays behind: a part knows its own files.
    """

    folder: Folder
    has_splits = False
    stored_columns: tuple[str, ...] = ()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ('files', 'listed')}

    def fingerprint(self, part: Part) -> dict[str, Any]:
        with readable(self.folder.url, 'make it readable'):
            return fingerprint(self.folder, part.files, part.detail)


@contextmanager
def readable(path: str | Path, remedy: str = 'download this file again') -> Iterator[None]:
    """What a damaged file raises becomes a DataError that names it."""
    try:
        yield
    except (OSError, pa.ArrowException, tarfile.TarError, EOFError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise DataError(f'{path}: cannot be read: {" ".join(str(error).split())}; {remedy}') from error


def picture(folder: Folder, name: str, stat: Stat, scratch: Path) -> tuple[bytes | None, str | None]:
    """(content, None) of a picture file, or (None, reason)."""
    if stat.num_bytes > MAX_IMAGE_BYTES:
        return None, f'over {MAX_IMAGE_BYTES >> 20} MB'
    try:
        path = folder.fetch(name, scratch)
        content = path.read_bytes()
    except OSError:
        return None, 'picture cannot be read'
    if path.parent == scratch:
        path.unlink()
    return content or None, None if content else 'picture is empty'


def parquet_rows(file: pq.ParquetFile, columns: list[str], rows_at_a_time: int = 64) -> Iterator[dict[str, Any]]:
    """The rows of a parquet file, a few at a time. Text stays bytes: nobody has checked that it is UTF-8 (see `text`)."""
    for group in range(file.num_row_groups):  # one at a time: pyarrow keeps what it has read of a file until it is asked for no more
        for batch in file.iter_batches(batch_size=rows_at_a_time, row_groups=[group], columns=columns):
            table = pa.Table.from_batches([batch])
            for i, column in enumerate(table.schema):
                unchecked = _as_bytes(column.type)
                if unchecked != column.type:
                    table = table.set_column(i, column.name, table.column(i).cast(unchecked))
            yield from table.to_pylist()


def _as_bytes(kind: pa.DataType) -> pa.DataType:
    """The type with bytes for text, at any depth."""
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return pa.large_binary()
    if pa.types.is_dictionary(kind):
        return _as_bytes(kind.value_type)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return pa.large_list(_as_bytes(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([kind.field(i).with_type(_as_bytes(kind.field(i).type)) for i in range(kind.num_fields)])
    return kind


def text(value: Any) -> str | None:
    """A value of `parquet_rows` as text, with replacement characters where it is not UTF-8."""
    return value.decode(errors='replace') if isinstance(value, bytes) else None if value is None else str(value)


def captions_of(value: Any) -> tuple[list[str], str | None]:
    """(captions, None) of a cell, which holds one or a list of them, or ([], reason)."""
    values = [item for item in (value if isinstance(value, list) else [value]) if item is not None]
    captions = [item.decode(errors='surrogateescape') if isinstance(item, bytes) else str(item) for item in values]
    if any(NOT_TEXT.search(caption) for caption in captions):
        return [], 'caption is not UTF-8'
    return [caption.removeprefix('\ufeff') for caption in captions], None


def utf8(value: str) -> str:
    """The text with what UTF-8 cannot hold written out, as in names of files that are not UTF-8."""
    return value.encode(errors='backslashreplace').decode()


def distinct(parts: Iterable[Part], where: str) -> list[Part]:
    """The parts, of which no two may have the same name.

    Raises:
        DataError: two have.
    """
    found: dict[str, Part] = {}
    for part in parts:
        if part.name in found:
            first, second = (next(iter(one.files), one.name) for one in (found[part.name], part))
            raise DataError(f'{where}: {first} and {second} would both become the part {part.name}; rename one')
        found[part.name] = part
    return list(found.values())


def choose_split(splits: Mapping[str, Any], wanted: str | None, where: str) -> list[str]:
    """The splits to read: all that is there if it is one, the one asked for if there are several.

    Raises:
        DataError: several, and none was asked for, or another one.
    """
    if wanted is not None and wanted not in splits:
        raise DataError(f'{where}: has no split {wanted!r}; it has {", ".join(sorted(splits))}')
    if wanted is None and len(splits) > 1:
        raise DataError(f'{where}: holds several splits ({", ".join(sorted(splits))}); name one with --split, so that test data stays apart')
    return sorted(splits) if wanted is None else [wanted]
