"""A list of images to download, as LAION and img2dataset publish them: a parquet file with a URL and a caption a row."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from data_prep.sources.base import readable
from data_prep.sources.parquet import each_once
from diffusion.contracts.errors import DataError

URL_COLUMNS = ('url',)
CAPTION_COLUMNS = ('text', 'caption')
# Shards have columns of their own by these names.
RESERVED = {
    *('key', 'url', 'caption', 'status', 'error_message', 'width', 'height', 'original_width', 'original_height', 'exif'),
    *('md5', 'sha256', 'sha512'),
}


@dataclass
class UrlList:
    """One list.

    Attributes:
        path: the parquet file.
        where: what messages call it.
        num_rows: rows in it.
        names: what is read of it: name in the shards by column of the list.
        schema: of the rows as they are in the shards.
        remarks: what became of columns that cannot stay as they are.
    """

    path: Path
    where: str
    num_rows: int
    names: dict[str, str]
    schema: pa.Schema
    remarks: list[str] = field(default_factory=list)

    @classmethod
    def open(cls, path: Path, where: str, url_column: str | None = None, caption_column: str | None = None) -> UrlList:
        """Read which columns the list has.

        Raises:
            DataError: it cannot be read, is empty, or it is not clear which columns have the URL and the caption.
        """
        with readable(where), pq.ParquetFile(path) as file:
            schema, num_rows = file.schema_arrow, file.metadata.num_rows
            each_once(schema.names)
        if not num_rows:
            raise DataError(f'{where}: has no rows')
        url = _choose(where, schema.names, url_column, URL_COLUMNS, '--url-column')
        caption = _choose(where, schema.names, caption_column, CAPTION_COLUMNS, '--caption-column')
        types, names, remarks = [pa.string(), pa.string()], {url: 'url', caption: 'caption'}, []
        for column in schema:
            if column.name in names:
                continue
            kept_as = _storable(column.type)
            if kept_as is None:
                remarks.append(f'column {column.name} is left out: JSON cannot hold {column.type}')
                continue
            name = column.name
            while name in RESERVED or name in names.values():
                name = f'source_{name}'
            if name != column.name:
                remarks.append(f'column {column.name} is kept as {name}: a shard has a column of its own by that name')
            types.append(kept_as)
            names[column.name] = name
        return cls(path, where, num_rows, names, pa.schema(zip(names.values(), types, strict=True)), remarks)

    def shards(self, rows_per_shard: int, wanted: Collection[int]) -> Iterator[tuple[int, pa.Table]]:
        """(number, rows) of the wanted pieces of `rows_per_shard` rows, the last one shorter, with the columns' names in the shards."""
        rest, number = self.schema.empty_table(), 0
        with readable(self.where), pq.ParquetFile(self.path) as file:
            for batch in file.iter_batches(batch_size=min(rows_per_shard, 10_000), columns=list(self.names)):
                columns = [_as(batch.column(name), kind) for name, kind in zip(self.names, self.schema.types, strict=True)]
                rest = pa.concat_tables([rest, pa.Table.from_arrays(columns, schema=self.schema)])
                while rest.num_rows >= rows_per_shard:
                    if number in wanted:
                        yield number, rest.slice(0, rows_per_shard)
                    rest, number = rest.slice(rows_per_shard), number + 1
        if rest.num_rows and number in wanted:
            yield number, rest


def _choose(where: str, present: list[str], asked_for: str | None, known: tuple[str, ...], option: str) -> str:
    found = [name for name in present if name == asked_for] if asked_for else [name for name in present if name.lower() in known]
    if len(found) != 1:
        what = f'no column {asked_for or " or ".join(known)}' if not found else f'several columns that could be meant, {", ".join(found)}'
        raise DataError(f'{where}: has {what}; it has {", ".join(present)}; name one with {option}')
    return found[0]


def _as(values: pa.Array, kind: pa.DataType) -> pa.Array:
    if not pa.types.is_string(values.type):
        return values.cast(kind)
    try:
        return values.cast(pa.binary()).cast(pa.string())  # parquet files promise UTF-8, and nobody has checked
    except pa.ArrowInvalid:
        texts = values.cast(pa.binary()).to_pylist()
        return pa.array([None if text is None else text.decode(errors='replace') for text in texts], pa.string())


def _storable(kind: pa.DataType) -> pa.DataType | None:
    """The type that a column gets in the JSON files of a shard: numbers and text, and lists of them; dates and the like become text."""
    types = pa.types
    if types.is_list(kind):
        of = _storable(kind.value_type)
        return None if of is None else pa.list_(of)
    if types.is_boolean(kind) or types.is_integer(kind) or types.is_float32(kind) or types.is_float64(kind) or types.is_null(kind):
        return kind
    is_text = types.is_string(kind) or types.is_large_string(kind) or types.is_temporal(kind) or types.is_decimal(kind) or types.is_dictionary(kind)
    return pa.string() if is_text else None
