"""A folder of pictures with a `.txt` beside each, or with one list of captions for all of them."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, TextIO

from data_prep.errors import DataError
from data_prep.sources.base import CAPTION_COLUMNS, IMAGE_SUFFIXES, FromFiles, Part, Row, captions_of, picture, readable
from diffusion.storage import Folder, Stat, scratch_for

LISTS = ('captions.jsonl', 'metadata.jsonl', 'metadata.csv')
SUFFIXES = (*IMAGE_SUFFIXES, 'apng', 'avif', 'bmp', 'gif', 'heic', 'heif', 'jfif', 'jpe', 'tif', 'tiff')  # whatever is in them; all are counted
FILE_COLUMNS = ('file_name', 'file', 'image', 'path')
PICTURES_PER_PART = 1000
MAX_LINE_CHARS = 1 << 26


class ImageFolder(FromFiles):
    """Pictures in any depth of folders; their captions in `NAME.txt`, `captions.jsonl`, `metadata.jsonl` or `metadata.csv`.

    A list has a line for each picture: its path below the folder (`file_name`), its caption (`caption` or `text`; in JSON it may be
    a list of several), and any other columns. Pictures that the list does not name, and names without a picture, are counted.
    """

    def __init__(self, folder: Folder, files: Mapping[str, Stat]):
        self.folder, self.files = folder, files
        self.list_name = next((name for name in LISTS if name in files), None)
        self.listed = self._read_list() if self.list_name else None
        self.several_captions = any(len(captions_of(row.get(self._caption_column))[0]) > 1 for row in (self.listed or {}).values())

    @classmethod
    def open(cls, folder: Folder, files: Mapping[str, Stat], split: str | None) -> ImageFolder | None:
        return cls(folder, files) if any(_is_picture(name) for name in files) else None

    def parts(self) -> list[Part]:
        if self.listed is None:
            names = sorted({name for name in self.files if _is_picture(name) or name.endswith('.txt')}, key=lambda name: (_stem(name), name))
            pictures = {_stem(name) for name in names if _is_picture(name)}
            units = [name for name in names if _is_picture(name) or _stem(name) not in pictures]
        else:
            units = sorted(self.listed.keys() | {name for name in self.files if _is_picture(name)})
        return [self._part(i, units[start : start + PICTURES_PER_PART]) for i, start in enumerate(range(0, len(units), PICTURES_PER_PART))]

    def _part(self, i: int, units: list[str]) -> Part:
        wanted = [name for unit in units for name in (unit, f'{_stem(unit)}.txt')]
        lines = None if self.listed is None else [self.listed.get(unit) for unit in units]
        return Part(
            f'{i:05d}',
            {name: self.files[name] for name in dict.fromkeys(wanted) if name in self.files},
            list(zip(units, lines or units, strict=True)),
        )

    def rows(self, part: Part, scratch: Path) -> Iterator[Row]:
        for name, line in part.detail:
            columns: dict[str, Any] = {}
            captions: list[str] | None = []
            reason: str | None = None
            if self.list_name is None:
                captions, reason = self._beside(name, part, scratch)
            elif line is None:
                reason = f'not in {self.list_name}'
            else:
                columns = line
                captions, reason = captions_of(line[self._caption_column]) if self._caption_column else (None, None)
            image = None
            if name not in part.files or (self.list_name is None and not _is_picture(name)):
                reason = 'no such picture'
            elif reason is None:
                image, reason = picture(self.folder, name, part.files[name], scratch)
            yield Row(name, str(columns.get('url') or ''), captions, image, columns or dict.fromkeys(self._columns), reason)

    def _beside(self, name: str, part: Part, scratch: Path) -> tuple[list[str], str | None]:
        beside = f'{_stem(name)}.txt'
        if beside not in part.files:
            return [], 'no caption file'
        content, reason = picture(self.folder, beside, part.files[beside], scratch)
        if reason == 'picture is empty':
            return [], None
        return ([], 'caption cannot be read') if content is None else captions_of(content)

    def _read_list(self) -> dict[str, dict[str, Any]]:
        assert self.list_name is not None
        where = f'{self.folder.url}/{self.list_name}'
        with scratch_for() as scratch, readable(where, 'mend the file'):
            path = self.folder.fetch(self.list_name, scratch)
            with path.open(newline='', encoding='utf-8-sig', errors='surrogateescape') as file:
                lines = _csv_lines(file, where) if self.list_name.endswith('.csv') else _json_lines(file, where)
        self._columns = list(dict.fromkeys(column for line in lines for column in line))
        file_column = next((name for name in FILE_COLUMNS if name in self._columns), None)
        self._caption_column = next((name for name in CAPTION_COLUMNS if name in self._columns), '')
        if file_column is None:
            raise DataError(f'{where}: needs a column named one of {", ".join(FILE_COLUMNS)}; it has {", ".join(self._columns) or "none"}')
        unnamed = next((line for line in lines if not line.get(file_column)), None)
        if unnamed is not None:
            raise DataError(f'{where}: names no picture in a line whose {self._columns[-1]} is {unnamed.get(self._columns[-1])!r}; mend the line')
        listed = {PurePosixPath(str(line[file_column])).as_posix(): {column: line.get(column) for column in self._columns} for line in lines}
        if len(listed) < len(lines):
            raise DataError(f'{where}: {len(lines)} lines name {len(listed)} pictures; leave one line for each (several captions: a list in JSON)')
        return listed

    _columns: Sequence[str] = ()
    _caption_column = ''


def _csv_lines(file: TextIO, where: str) -> list[dict[str, Any]]:
    csv.field_size_limit(MAX_LINE_CHARS)
    try:
        lines = list(csv.DictReader(file, strict=True))
    except csv.Error as error:
        raise DataError(f'{where}: cannot be read: {error}; mend the file') from error
    for number, line in enumerate(lines, start=1):
        if None in line:
            raise DataError(f'{where}: row {number} has more cells than the heading; text with commas needs quotes')
    return lines


def _json_lines(file: TextIO, where: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in file if line.strip()]
    for number, line in enumerate(lines, start=1):
        if not isinstance(line, dict):
            raise DataError(f'{where}: line {number} is not a JSON object; mend the line')
    return lines


def _is_picture(name: str) -> bool:
    return PurePosixPath(name).suffix.lower().removeprefix('.') in SUFFIXES


def _stem(name: str) -> str:
    return name.rpartition('.')[0]
