"""A Hugging Face dataset stored as parquet files with an image column, such as `snapshot_download` leaves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from data_prep.sources.base import (
    CAPTION_COLUMNS,
    MAX_IMAGE_BYTES,
    TOO_LARGE,
    Part,
    Row,
    Source,
    SourceOptions,
    captions_of,
    choose_split,
    is_list,
    readable,
    split_of,
    text,
    url_of,
)
from data_prep.sources.parquet import each_once, parquet_rows
from diffusion.common.storage import Folder, Stat, scratch_for
from diffusion.contracts.errors import DataError


class HuggingFaceParquet(Source):
    """Parquet files whose image column is a struct of `bytes` and `path` (the `Image` feature), or bytes named `image`; one part a file.

    The caption is the column `caption`, `text` or `captions`, text or a list of texts.
    """

    has_splits = True
    takes_columns = True

    def __init__(self, folder: Folder, files: Mapping[str, Stat], columns: Mapping[str, str], several_captions: bool):
        self.folder, self.files, self.several_captions = folder, files, several_captions
        self.columns = columns
        """The source's names of `image`, `caption` ('': not known), `key` ('': the place in the file) and `url`."""

    @classmethod
    def open(cls, folder: Folder, files: Mapping[str, Stat], asked: SourceOptions) -> HuggingFaceParquet | None:
        ours = {name: stat for name, stat in files.items() if name.endswith('.parquet') and (asked.columns or not is_list(name))}
        if not ours:
            return None
        schema = _schema(folder, next(iter(ours)))
        wrong = [name for name in asked.columns.values() if name not in schema.names]
        if wrong:
            raise DataError(f'{folder.url}: has no column {" or ".join(wrong)}, as --columns says; it has {", ".join(schema.names)}')
        image = asked.columns.get('image') or next((field.name for field in schema if _is_image(field)), None)
        if image is None:
            return None
        caption = asked.columns.get('caption') or next((name for name in CAPTION_COLUMNS if name in schema.names), '')
        by_split: dict[str, dict[str, Stat]] = {}
        for name, stat in ours.items():
            by_split.setdefault(split_of(name), {})[name] = stat
        chosen = {name: stat for one in choose_split(by_split, asked.split, folder.url) for name, stat in by_split[one].items()}
        kind = schema.field(caption).type if caption else pa.null()
        several = pa.types.is_list(kind) or pa.types.is_large_list(kind)
        columns = {'image': image, 'caption': caption, 'key': asked.columns.get('key', ''), 'url': asked.columns.get('url', 'url')}
        return cls(folder, chosen, columns, several)

    def parts(self) -> list[Part]:
        return [Part(name.removesuffix('.parquet').replace('/', '-'), {name: stat}) for name, stat in self.files.items()]

    def rows(self, part: Part, scratch: Path) -> Iterator[Row]:
        (name,) = part.files
        where = f'{self.folder.url}/{name}'
        with readable(where), pq.ParquetFile(self.folder.fetch(name, scratch)) as file:
            image_column, caption_column, key_column = (self.columns[name] for name in ('image', 'caption', 'key'))
            names = file.schema_arrow.names
            lacking = {image_column, caption_column or image_column, key_column or image_column} - set(names)
            if lacking:
                raise DataError(f'{where}: has no column {" and ".join(sorted(lacking))}, unlike the first file')
            for i, values in enumerate(parquet_rows(file, names)):
                image = _content(values.pop(image_column))
                captions, reason = captions_of(values[caption_column]) if caption_column else (None, None)
                if not image:
                    reason = 'no image in the row'
                elif len(image) > MAX_IMAGE_BYTES:
                    image, reason = None, TOO_LARGE
                key = (text(values[key_column]) if key_column else None) or f'{part.name}-{i:06d}'
                yield Row(key, url_of(values.get(self.columns['url'])), captions, image or None, values, reason)


def _schema(folder: Folder, name: str) -> pa.Schema:
    with scratch_for() as scratch, readable(f'{folder.url}/{name}'):
        schema = pq.read_schema(folder.fetch(name, scratch))
        each_once(schema.names)
        return schema


def _content(cell: Any) -> bytes | None:
    content = cell.get('bytes') if isinstance(cell, dict) else cell
    return content if isinstance(content, bytes) else None


def _is_image(field: pa.Field) -> bool:
    kind = field.type
    if field.name == 'image' and (pa.types.is_binary(kind) or pa.types.is_large_binary(kind)):
        return True
    return pa.types.is_struct(kind) and {'bytes', 'path'} <= {kind.field(i).name for i in range(kind.num_fields)}
