"""Images that are files: a folder with a caption file next to each or with lists of captions, and COCO captions."""

import csv
from collections import Counter
from collections.abc import Iterator, Mapping
from json import JSONDecodeError
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, Self, TextIO

import pyarrow.parquet as pq

from data_prep.sources.base import (
    CAPTION_COLUMNS,
    FOLDER_OUTSIDE,
    IMAGE_SUFFIXES,
    LISTS,
    SPLITS,
    Part,
    Row,
    Source,
    SourceOptions,
    captions_of,
    choose_split,
    in_pieces,
    local_copy,
    read_image,
    refuse_large_list,
    split_of,
    text,
)
from data_prep.sources.parquet import parquet_rows
from diffusion.common.files import parse_json
from diffusion.common.storage import Folder, Stat
from diffusion.common.text import counted
from diffusion.contracts.errors import DataError

SIDECARS = ('.txt', '.caption')
SUFFIXES = (*IMAGE_SUFFIXES, 'apng', 'avif', 'bmp', 'gif', 'heic', 'heif', 'jfif', 'jpe', 'tif', 'tiff')  # whatever is in them; all are counted
FILE_COLUMNS = ('file_name', 'file', 'image', 'path')
MAX_LINE_CHARS = 1 << 26
NO_SUCH_IMAGE, NO_SUCH_ID = 'no such image', 'annotation of an image_id that no image has'


class CaptionList(NamedTuple):
    """A file with a line for each image of its folder: path below that folder, caption (text, or a list of them), any other columns."""

    name: str
    caption_column: str
    """'' if it has no column that holds captions."""
    lines: Mapping[str, dict[str, Any]]
    """Rows by the path of the image below the source."""


class ImageFolder(Source):
    """Images in any depth of folders.

    The captions of an image are in the nearest list at or above its folder (`captions.jsonl`, `metadata.jsonl`, `metadata.csv`,
    `metadata.parquet`: Hugging Face's imagefolder), or where there is none in `NAME.txt` or `NAME.caption`; an image that has both has two
    captions. Images that their list does not name, and names without an image, are counted. Lists in folders such as `train` and `test` are splits.
    """

    counts_links = takes_caption = True

    def __init__(self, folder: Folder, files: Mapping[str, Stat], asked: SourceOptions):
        lists = {_parent(name): name for wanted in reversed(LISTS) for name in files if PurePosixPath(name).name == wanted}
        splits = {parent: split_of(parent) for parent in lists if set(PurePosixPath(parent).parts) & set(SPLITS)}
        chosen = choose_split(set(splits.values()), asked.split, folder.url) if splits else ''
        others = {parent for parent, its_split in splits.items() if its_split != chosen}
        super().__init__(folder, {name: stat for name, stat in files.items() if _nearest(lists, name) not in others}, asked.caption)
        self.has_splits = bool(splits)
        self.listed = {parent: self._read_list(name) for parent, name in lists.items() if parent not in others}
        self.columns = list(dict.fromkeys(column for one in self.listed.values() for line in one.lines.values() for column in line))
        sidecars = {name for name in self.files if _nearest(self.listed, name) is None and name.endswith(SIDECARS)}
        self.several_captions = any(f'{_stem(name)}{SIDECARS[0]}' in sidecars for name in sidecars if name.endswith(SIDECARS[1])) or any(
            len(captions_of(line.get(one.caption_column))[0]) > 1 for one in self.listed.values() for line in one.lines.values()
        )

    @classmethod
    def open(cls, folder: Folder, files: Mapping[str, Stat], asked: SourceOptions) -> Self | None:
        return cls(folder, files, asked) if any(_is_image(name) for name in files) else None

    def parts(self) -> list[Part]:
        images = {name for name, stat in self.files.items() if _is_image(name) or stat.refused == FOLDER_OUTSIDE}
        stems = {_stem(name) for name in images}
        lonely = {name for name in self.files if name.endswith(SIDECARS) and _stem(name) not in stems and _nearest(self.listed, name) is None}
        named = {name for one in self.listed.values() for name in one.lines}
        parts = []
        for part, units in in_pieces(sorted(images | lonely | named, key=lambda name: (_stem(name), name))):
            wanted = dict.fromkeys(name for unit in units for name in (unit, *(f'{_stem(unit)}{suffix}' for suffix in SIDECARS)))
            detail = []
            for unit in units:
                parent = _nearest(self.listed, unit)
                one = None if parent is None else self.listed[parent]
                line = one and one.lines.get(unit)
                detail.append((unit, one and (PurePosixPath(one.name).name, one.caption_column), line and {**dict.fromkeys(self.columns), **line}))
            parts.append(Part(part, {name: self.files[name] for name in wanted if name in self.files}, detail))
        return parts

    def rows(self, part: Part, scratch: Path) -> Iterator[Row]:
        for name, listed, line in part.detail:
            captions, captioned, image = None, True, None
            reason: str | None = part.files[name].refused if name in part.files else NO_SUCH_IMAGE
            if not reason and listed is None:
                captions, reason = self._next_to(name, part, scratch) if _is_image(name) else (None, NO_SUCH_IMAGE)
            elif not reason and line is None:
                reason = f'not in {listed[0]}' if self.caption is None else None
            elif not reason:
                captions, captioned = line.get(listed[1]), bool(listed[1])
            if not reason:
                image, reason = read_image(self.folder, name, part.files[name], scratch)
            columns = line or dict.fromkeys(self.columns)
            yield self.row(name, columns.get('url'), image, captions, columns, reason, captioned)

    def _next_to(self, name: str, part: Part, scratch: Path) -> tuple[list[bytes], str | None]:
        """Captions of the files that have the image's name, and why the row cannot be used."""
        found = [sidecar for suffix in SIDECARS if (sidecar := f'{_stem(name)}{suffix}') in part.files]
        contents = []
        for sidecar in found:
            content, reason = read_image(self.folder, sidecar, part.files[sidecar], scratch)
            if content is not None:
                contents.append(content)
            elif reason != 'image is empty':
                return [], f'caption: {part.files[sidecar].refused}' if part.files[sidecar].refused else 'caption cannot be read'
        return contents, None if found or self.caption is not None else 'no caption file'

    def _read_list(self, name: str) -> CaptionList:
        where = f'{self.folder.url}/{name}'
        refuse_large_list(where, self.files[name].num_bytes)
        with local_copy(self.folder, name, remedy='fix the file') as path:
            if name.endswith('.parquet'):
                with pq.ParquetFile(path) as table:
                    lines = dict(enumerate(parquet_rows(table, table.schema_arrow.names), start=1))
            else:
                with path.open(newline='', encoding='utf-8-sig', errors='surrogateescape') as file:
                    lines = _csv_lines(file, where) if name.endswith('.csv') else _json_lines(file, where)
        columns = list(dict.fromkeys(column for line in lines.values() for column in line))
        file_column = next((column for column in FILE_COLUMNS if column in columns), '')
        if not file_column:
            raise DataError(f'{where}: needs a column named one of {", ".join(FILE_COLUMNS)}; it has {", ".join(columns) or "none"}')
        kind = 'row' if name.endswith('.parquet') else 'line'
        numbers: dict[str, list[int]] = {}
        for number, line in lines.items():
            if not line.get(file_column):
                raise DataError(f'{where}: {kind} {number} names no image: its {file_column} is empty; fix the {kind}')
            numbers.setdefault((PurePosixPath(_parent(name)) / (text(line[file_column]) or '')).as_posix(), []).append(number)
        repeated = [f'{kind}s {" and ".join(map(str, its[:2]))} both name {image}' for image, its in numbers.items() if len(its) > 1]
        if repeated:
            more = f' (and {counted(len(repeated) - 2, "more image")} repeated)' if len(repeated) > 2 else ''
            raise DataError(f'{where}: {", ".join(repeated[:2])}{more}; leave one {kind} for each image (several captions: a list in JSON)')
        caption_column = next((column for column in CAPTION_COLUMNS if column in columns), '')
        return CaptionList(name, caption_column, {image: lines[its[0]] for image, its in numbers.items()})


class CocoCaptions(Source):
    """COCO captions: `annotations/captions_SPLIT.json` and the images of SPLIT, five captions each.

    Images are looked for in `SPLIT/`, `images/SPLIT/`, `images/` and the folder itself; the order is that of the file. What the file says of an
    image, such as `license`, are its columns. An `image_id` that annotations name and no image has is a row that cannot be used.
    """

    has_splits = counts_links = several_captions = True

    no_image = NO_SUCH_IMAGE
    annotations = ''

    @classmethod
    def open(cls, folder: Folder, files: Mapping[str, Stat], asked: SourceOptions) -> Self | None:
        names = {_coco_split(name): name for name in files if PurePosixPath(name).match('captions_*.json')}
        if not names:
            return None
        source = cls(folder, files)
        source.annotations = names[choose_split(names, asked.split, folder.url)]
        return source

    def parts(self) -> list[Part]:
        where, split = f'{self.folder.url}/{self.annotations}', _coco_split(self.annotations)
        refuse_large_list(where, self.files[self.annotations].num_bytes)
        with local_copy(self.folder, self.annotations) as path:
            content = parse_json(path.read_bytes())
        try:
            captions: dict[Any, list[Any]] = {image['id']: [] for image in content['images']}
            for annotation in content['annotations']:
                captions.setdefault(annotation['image_id'], []).append(annotation['caption'])
            columns = dict.fromkeys(column for image in content['images'] for column in image)
            listed = [(str(image['file_name']), {**columns, **image}, captions[image['id']]) for image in content['images']]
            unknown = captions.keys() - {image['id'] for image in content['images']}
        except (KeyError, TypeError, AttributeError) as error:
            raise DataError(f'{where}: is not a COCO captions file: {type(error).__name__} {error}') from error
        places = [f'{split}/', f'images/{split}/', 'images/', '']
        self.no_image = next((self.files[place[:-1]].refused for place in places if place[:-1] in self.files), self.no_image)
        units = [(next((place + name for place in places if place + name in self.files), None), name, image, texts) for name, image, texts in listed]
        units += [(None, f'image_id {number}', dict.fromkeys(columns), texts) for number, texts in captions.items() if number in unknown]
        return [Part(part, {path: self.files[path] for path, *_ in its if path is not None}, its) for part, its in in_pieces(units)]

    def rows(self, part: Part, scratch: Path) -> Iterator[Row]:
        for path, name, columns, captions in part.detail:
            if path is not None:
                image, reason = read_image(self.folder, path, part.files[path], scratch)
            else:
                image, reason = None, self.no_image if columns.get('file_name') else NO_SUCH_ID
            yield self.row(name, columns.get('coco_url'), image, captions, columns, reason)


def _coco_split(name: str) -> str:
    return PurePosixPath(name).stem.removeprefix('captions_')


def _parent(name: str) -> str:
    """The folder of a file, '' for the source itself."""
    return name.rpartition('/')[0]


def _nearest(parents: Mapping[str, Any], name: str) -> str | None:
    """The nearest of some folders that a file is in, at any depth."""
    while name:
        name = _parent(name)
        if name in parents:
            return name
    return None


def _text_lines(file: TextIO, where: str) -> Iterator[str]:
    while line := file.readline(MAX_LINE_CHARS + 1):
        if len(line) > MAX_LINE_CHARS:
            raise DataError(f'{where}: has a line of more than {MAX_LINE_CHARS:,} characters; fix the file')
        yield line


def _csv_lines(file: TextIO, where: str) -> dict[int, dict[str, Any]]:
    """Rows by the number in the file of the line that each ends on."""
    csv.field_size_limit(MAX_LINE_CHARS)
    reader = csv.DictReader(_text_lines(file, where), strict=True)
    lines = {}
    try:
        twice = [name for name, count in Counter(reader.fieldnames or ()).items() if count > 1]
        if twice:  # the reader would keep the last one's cells and lose the others'
            raise DataError(f'{where}: its heading has the column {twice[0]!r} more than once; rename or remove one')
        for line in reader:
            lines[reader.line_num] = line
    except csv.Error as error:
        raise DataError(f'{where}: cannot be read: line {reader.line_num}: {error}; fix the file') from error
    for number, line in lines.items():
        if None in line:
            raise DataError(f'{where}: line {number} has more cells than the heading; text with commas needs quotes')
    return lines


def _json_lines(file: TextIO, where: str) -> dict[int, dict[str, Any]]:
    """Lines by their numbers in the file."""
    lines = {}
    for number, line in enumerate(_text_lines(file, where), start=1):
        if not line.strip():
            continue
        try:
            lines[number] = parse_json(line)
        except ValueError as error:
            detail = f'{error.msg} at column {error.colno}' if isinstance(error, JSONDecodeError) else error  # its own line is always 1
            raise DataError(f'{where}: cannot be read: line {number}: {detail}; fix the line') from error
        if not isinstance(lines[number], dict):
            raise DataError(f'{where}: line {number} is not a JSON object; fix the line')
    return lines


def _is_image(name: str) -> bool:
    return PurePosixPath(name).suffix.lower().removeprefix('.') in SUFFIXES


def _stem(name: str) -> str:
    return name.rpartition('.')[0]
