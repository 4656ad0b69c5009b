"""Rows of parquet files that anybody may have written."""

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq


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
