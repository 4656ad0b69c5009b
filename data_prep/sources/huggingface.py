"""A Hugging Face data set stored as parquet files with an image column, such as `snapshot_download` leaves."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from data_prep.errors import DataError
from data_prep.sources.base import (
    CAPTION_COLUMNS,
    MAX_IMAGE_BYTES,
    FromFiles,
    Part,
    Row,
    captions_of,
    choose_split,
    distinct,
    parquet_rows,
    readable,
    text,
)
from diffusion.storage import Folder, Stat, scratch_for

SPLITS = ('train', 'training', 'validation', 'valid', 'val', 'dev', 'test', 'testing', 'eval', 'evaluation')


class HuggingFaceParquet(FromFiles):
    """Parquet files whose image column is a struct of `bytes` and `path` (the `Image` feature), or bytes named `image`; one part a file.

    The caption is the column `caption`, `text` or `captions`, text or a list of texts.
    """

    has_splits = True

    def __init__(self, folder: Folder, files: Mapping[str, Stat], image_column: str, caption_column: str | None, several_captions: bool):
        self.folder, self.files = folder, files
        self.image_column, self.caption_column, self.several_captions = image_column, caption_column, several_captions

    @classmethod
    def open(cls, folder: Folder, files: Mapping[str, Stat], split: str | None) -> HuggingFaceParquet | None:
        ours = {name: stat for name, stat in files.items() if name.endswith('.parquet')}
        if not ours:
            return None
        schema = _schema(folder, next(iter(ours)))
        image_column = next((field.name for field in schema if _is_image(field)), None)
        if image_column is None:
            return None
        caption = next((schema.field(name) for name in CAPTION_COLUMNS if name in schema.names), None)
        by_split: dict[str, dict[str, Stat]] = {}
        for name, stat in ours.items():
            by_split.setdefault(_split(name), {})[name] = stat
        chosen = {name: stat for one in choose_split(by_split, split, folder.url) for name, stat in by_split[one].items()}
        several = caption is not None and (pa.types.is_list(caption.type) or pa.types.is_large_list(caption.type))
        return cls(folder, chosen, image_column, caption and caption.name, several)

    def parts(self) -> list[Part]:
        return distinct((Part(name.removesuffix('.parquet').replace('/', '-'), {name: stat}) for name, stat in self.files.items()), self.folder.url)

    def rows(self, part: Part, scratch: Path) -> Iterator[Row]:
        (name,) = part.files
        where = f'{self.folder.url}/{name}'
        with readable(where), pq.ParquetFile(self.folder.fetch(name, scratch)) as file:
            lacking = {self.image_column, self.caption_column or self.image_column} - set(file.schema_arrow.names)
            if lacking:
                raise DataError(f'{where}: has no column {" and ".join(sorted(lacking))}, unlike the first file')
            for i, values in enumerate(parquet_rows(file, file.schema_arrow.names)):
                image = _content(values.pop(self.image_column))
                captions, reason = captions_of(values[self.caption_column]) if self.caption_column else (None, None)
                if not image:
                    reason = 'no picture in the row'
                elif len(image) > MAX_IMAGE_BYTES:
                    image, reason = None, f'over {MAX_IMAGE_BYTES >> 20} MB'
                yield Row(f'{part.name}-{i:06d}', text(values.get('url')) or '', captions, image or None, values, reason)


def _schema(folder: Folder, name: str) -> pa.Schema:
    with scratch_for() as scratch, readable(f'{folder.url}/{name}'):
        return pq.read_schema(folder.fetch(name, scratch))


def _split(name: str) -> str:
    """What Hugging Face takes for the split: `data/train-00000-of-00005.parquet`, `train/0000.parquet`; train if nothing says another."""
    sharded = re.match(r'(.+?)-\d+-of-\d+', PurePosixPath(name).stem)
    words = re.split(r'[^a-z]+', name.lower())
    return sharded[1] if sharded else next((word for word in reversed(words) if word in SPLITS), 'train')


def _content(cell: Any) -> bytes | None:
    content = cell.get('bytes') if isinstance(cell, dict) else cell
    return content if isinstance(content, bytes) else None


def _is_image(field: pa.Field) -> bool:
    kind = field.type
    if field.name == 'image' and (pa.types.is_binary(kind) or pa.types.is_large_binary(kind)):
        return True
    return pa.types.is_struct(kind) and {'bytes', 'path'} <= {kind.field(i).name for i in range(kind.num_fields)}
