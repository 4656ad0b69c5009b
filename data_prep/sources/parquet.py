"""Parquet files that anybody may have written, and Hugging Face's: those with an image column, such as `snapshot_download` leaves."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import pyarrow as pa
import pyarrow.parquet as pq

from data_prep.sources.base import CAPTION_COLUMNS, Part, Row, Source, SourceOptions, files_of_split, is_list, local_copy, text
from diffusion.common.storage import Folder, Stat
from diffusion.contracts.errors import DataError


class HuggingFaceParquet(Source):
    """Parquet files whose image column is a struct of `bytes` and `path` (the `Image` feature), or bytes named `image`; one part a file.

    The caption is the column `caption`, `text` or `captions`, text or a list of texts.
    """

    has_splits = takes_columns = True
    columns: Mapping[str, str]
    """The source's names of `image`, `caption` ('': not known), `key` ('': the place in the file) and `url`."""

    @classmethod
    def open(cls, folder: Folder, files: Mapping[str, Stat], asked: SourceOptions) -> Self | None:
        ours = {name: stat for name, stat in files.items() if name.endswith('.parquet') and (asked.columns or not is_list(name))}
        if not ours:
            return None
        with local_copy(folder, next(iter(ours))) as first:
            schema = pq.read_schema(first)
            each_once(schema.names)
        wrong = [name for name in asked.columns.values() if name not in schema.names]
        if wrong:
            raise DataError(f'{folder.url}: has no column {" or ".join(wrong)}, as --columns says; it has {", ".join(schema.names)}')
        image = asked.columns.get('image') or next((field.name for field in schema if _is_image(field)), None)
        if image is None:
            return None
        caption = asked.columns.get('caption') or next((name for name in CAPTION_COLUMNS if name in schema.names), '')
        kind = schema.field(caption).type if caption else pa.null()
        source = cls(folder, files_of_split(ours, asked.split, folder.url))
        source.several_captions = pa.types.is_list(kind) or pa.types.is_large_list(kind)
        source.columns = {'key': '', 'url': 'url', **asked.columns, 'image': image, 'caption': caption}
        return source

    def rows(self, part: Part, scratch: Path) -> Iterator[Row]:
        (name,) = part.files
        columns = self.columns
        with local_copy(self.folder, name, scratch) as path, pq.ParquetFile(path) as file:
            names = file.schema_arrow.names
            lacking = {columns['image'], columns['caption'], columns['key']} - {*names, ''}
            if lacking:
                raise DataError(f'{self.folder.url}/{name}: has no column {" and ".join(sorted(lacking))}, unlike the first file')
            for i, values in enumerate(parquet_rows(file, names)):
                cell = values.pop(columns['image'])
                content = cell.get('bytes') if isinstance(cell, dict) else cell
                image = content if content and isinstance(content, bytes) else None
                key, captions = (values.get(columns[name]) if columns[name] else None for name in ('key', 'caption'))
                reason = None if image else 'no image in the row'
                key = text(key) or f'{part.name}-{i:06d}'
                yield self.row(key, values.get(columns['url']), image, captions, values, reason, captioned=bool(columns['caption']))


def _is_image(field: pa.Field) -> bool:
    kind = field.type
    if field.name == 'image' and (pa.types.is_binary(kind) or pa.types.is_large_binary(kind)):
        return True
    return pa.types.is_struct(kind) and {'bytes', 'path'} <= {kind.field(i).name for i in range(kind.num_fields)}


def each_once(columns: list[str]) -> list[str]:
    """The columns of a parquet file; to be called where errors are `readable`.

    Raises:
        pa.ArrowInvalid: one is there twice, so that its name means nothing.
    """
    twice = sorted({name for name in columns if columns.count(name) > 1})
    if twice:
        raise pa.ArrowInvalid(f'the column {twice[0]} is there {columns.count(twice[0])} times; write the file with each column once')
    return columns


def parquet_rows(file: pq.ParquetFile, columns: list[str], rows_at_a_time: int = 64) -> Iterator[dict[str, Any]]:
    """The rows of a parquet file, a few at a time. Text stays bytes: nobody has checked that it is UTF-8 (see `text`)."""
    each_once(file.schema_arrow.names)
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
