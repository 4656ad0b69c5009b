"""Rows worth keeping, and the reason why each of the others is not, counted by its name; nothing here needs an image decoded."""

import hashlib
import math
import operator
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from data_prep.converting.buckets import Buckets
from data_prep.sources.base import CAPTION_COLUMNS, CAPTION_NOT_TEXT, CAPTION_NOT_UTF8, Row, captions_of, readable, refuse_large_list, text
from diffusion.contracts.errors import DataError

Predicate = Callable[[Any, Any], bool]
OPERATORS: dict[str, Predicate] = {'<=': operator.le, '>=': operator.ge, '==': operator.eq, '!=': operator.ne, '<': operator.lt, '>': operator.gt}

# The names that LAION's lists, and lists made from them, use for the same thing.
LAION_COLUMNS = {
    'punsafe': ('punsafe', 'PUNSAFE', 'p_unsafe'),
    'pwatermark': ('pwatermark', 'PWATERMARK', 'p_watermark'),
    'similarity': ('similarity', 'SIMILARITY', 'clip_similarity_vitb32', 'clip_similarity'),
    'aesthetic': ('aesthetic', 'AESTHETIC_SCORE', 'aesthetic_score', 'aesthetic_score_laion_v2', 'prediction'),
}


class ColumnError(DataError):
    """A column that is asked for is not there, or is not what it is compared with."""


def column_of(row: Row, *names: str) -> Any:
    """The value of the first of the columns that the row has. Raises ColumnError: it has none of them."""
    for name in names:
        if name in row.columns:
            return row.columns[name]
    raise ColumnError(f'there is no column {" or ".join(names)}; the source has {", ".join(row.columns) or "no columns"}')


@dataclass(frozen=True)
class Condition:
    """A comparison of a column with a number or a text that a row must meet."""

    columns: tuple[str, ...]  # names of the column; the first that the source has is meant
    comparison: str
    value: float | str

    def __str__(self) -> str:
        value = repr(self.value).removesuffix('.0')
        return f'{self.columns[0]} {self.comparison} {value}'

    def reason(self, row: Row) -> str | None:
        """Return why the row does not pass. Raises ColumnError: the source has no such column, or the column is not what it is compared with."""
        found = column_of(row, *self.columns)
        found = text(found) if isinstance(found, bytes) else found
        if isinstance(found, bool) and isinstance(self.value, str):
            found = self.value if self.value.lower() == str(found).lower() else str(found)
        if found is None or found == '':
            return f'{self.columns[0]} unknown'
        try:
            found = float(found) if isinstance(self.value, float) else found  # a CSV holds text
        except (TypeError, ValueError):
            raise ColumnError(f'the filter "{self}" compares with a number; that of {row.key} is {found!r}') from None
        if found != found:  # not a number
            return f'{self.columns[0]} unknown'
        if isinstance(self.value, str) and not isinstance(found, str):
            raise ColumnError(f'the filter "{self}" compares with a text; that of {row.key} is {found!r}')
        return None if OPERATORS[self.comparison](found, self.value) else f'not {self}'


def condition(text: str) -> Condition:
    """A condition as it is written on the command line: `punsafe < 0.5`, `license == 'cc-by'`."""
    match = re.fullmatch(r'\s*([^<>=!]*[^<>=!\s])\s*(<=|>=|==|!=|<|>)\s*(?:"([^"]+)"|\'([^\']+)\'|([^<>=!\'"\s]+))\s*', text)
    if match is None:
        raise ValueError(
            f'{text!r} is not COLUMN OPERATOR VALUE with one of {" ".join(OPERATORS)}, such as "punsafe < 0.5"; a text of several words needs quotes'
        )
    column, comparison, *quoted, bare = match.groups()
    with suppress(TypeError, ValueError):
        number = float(bare)
        if math.isfinite(number):
            return Condition((column,), comparison, number)
    value = bare or quoted[0] or quoted[1]
    if comparison not in ('==', '!='):
        raise ValueError(f'{text!r}: {value!r} is not a number; text can be compared with == and != only')
    return Condition((column,), comparison, value)


def laion_condition(name: str, comparison: str, value: float) -> Condition:
    """A condition on one of LAION's scores, under any of its names."""
    return Condition(LAION_COLUMNS[name], comparison, value)


SKIPPED = 'on the skip-list'
DUPLICATES = {'exact': 'duplicate of an earlier image', 'near': 'near duplicate of an earlier image'}


@dataclass(frozen=True)
class Options:
    """All that the result of a conversion depends on, apart from its source. The defaults leave out what cannot be used at all."""

    min_side_px: int = 1  # of the shorter side
    max_aspect_ratio: float | None = None  # of the longer side to the shorter
    drop_blank: bool = False  # leave out images of (almost) one colour
    min_caption_chars: int = 1  # a caption outside is not used; a row without any other is left out
    max_caption_chars: int = 10_000
    conditions: tuple[Condition, ...] = ()  # on columns of the source
    skip_list: str | None = None  # file of keys, URLs or SHA-256 digests to leave out: opt-outs
    buckets: Buckets = field(default_factory=Buckets)
    captions: Mapping[str, float] | None = None  # columns of the source that hold captions, with their weights; None: what the source takes for them
    duplicates: str = 'keep'  # `keep`, or a key of DUPLICATES
    keep_columns: tuple[str, ...] = ()  # columns of the source to store as JSON, for later filters
    shard_bytes: int = 64 << 20  # size at which a shard is closed

    def settings(self) -> dict[str, Any]:
        """Return the settings for DEST's record: of the skip-list its content, wherever it lies."""
        settings = {'command': 'convert', **{one.name: getattr(self, one.name) for one in fields(self)}}
        if not self.drop_blank:
            del settings['drop_blank']  # datasets that were begun without the option can be resumed
        if self.skip_list is not None:
            entries = '\n'.join(sorted(read_skip_list(self.skip_list)))
            settings['skip_list'] = f'sha256 {hashlib.sha256(entries.encode()).hexdigest()[:16]}'
        captions = None if self.captions is None else list(self.captions.items())  # their order matters
        return settings | {'conditions': list(map(str, self.conditions)), 'buckets': self.buckets.settings(), 'captions': captions}

    def captioned(self, row: Row) -> Row:
        """The row with the captions that are asked for."""
        return row if self.captions is None else with_captions(row, self.captions)

    def usable_captions(self, row: Row) -> tuple[list[tuple[str, float]], str | None]:
        """(captions with weights that add up to 1, None) of a `captioned` row, or ([], reason); its image is not decoded.

        Raises:
            ColumnError: the source has no column of captions, or none of a condition.
        """
        reasons = [condition.reason(row) for condition in self.conditions]  # all of them: a missing column is an error in any row
        reason = row.reason or next((reason for reason in reasons if reason), None)
        if self.skip_list is not None:
            digest = None if row.image is None else hashlib.sha256(row.image).hexdigest()
            known = {row.key, row.url, row.sha256, digest, *(text(row.columns.get(name)) for name in ('sha256', 'md5'))}
            if not read_skip_list(self.skip_list).isdisjoint(known - {None, ''}):
                reason = SKIPPED
        if reason is not None or row.image is None:
            return [], reason or 'no image'
        if row.captions is None:
            names = ', '.join(row.columns)
            raise ColumnError(f'there is no column {" or ".join(CAPTION_COLUMNS)}; name the captions with --captions: the source has {names}')
        captions = [(caption or '').strip() for caption in row.captions]
        weights = row.caption_weights or [1.0] * len(captions)
        lengths = range(self.min_caption_chars, self.max_caption_chars + 1)
        usable = [(caption, weight) for caption, weight in zip(captions, weights, strict=True) if caption and len(caption) in lengths and weight > 0]
        if usable:
            total = sum(weight for _, weight in usable)
            return [(caption, weight / total) for caption, weight in usable], None
        if not any(captions):
            return [], 'empty caption'
        if max(map(len, captions)) < self.min_caption_chars:
            return [], f'caption below {self.min_caption_chars} characters'
        return [], f'caption above {self.max_caption_chars} characters'

    def place(self, width_px: int, height_px: int) -> tuple[str, None] | tuple[None, str]:
        """(stream, None) of an image of this size, or (None, reason)."""
        shorter, longer = sorted((width_px, height_px))
        if shorter < self.min_side_px:
            return None, f'short side below {self.min_side_px} px'
        if self.max_aspect_ratio is not None and longer / shorter > self.max_aspect_ratio:
            return None, f'aspect ratio above {self.max_aspect_ratio:g}'
        return self.buckets.place(width_px, height_px)


@cache
def read_skip_list(path: str) -> frozenset[str]:
    """Keys, URLs or digests: the lines of a text file, or all text columns of a parquet file.

    Raises:
        DataError: it cannot be read, or it is parquet without text.
    """
    if not Path(path).is_file() and Path(path).exists():
        raise DataError(f'--skip-list {path}: is not a regular file; every worker reads it: write the list to a file')
    with readable(f'--skip-list {path}', 'fix the file'):
        refuse_large_list(f'--skip-list {path}', Path(path).stat().st_size)
        if not path.endswith('.parquet'):
            lines = Path(path).read_text(encoding='utf-8-sig').splitlines()
            return frozenset(_entry(line) for line in lines if line.strip() and not line.startswith('#'))
        import pyarrow as pa  # here, as the command line's conditions are of this module
        import pyarrow.parquet as pq

        table = pq.read_table(path)
        columns = [column for column in table.columns if pa.types.is_string(column.type) or pa.types.is_large_string(column.type)]
        if not columns:
            raise DataError(f'--skip-list {path}: has no column of text; it has {", ".join(table.column_names)}')
        return frozenset(_entry(value) for column in columns for value in column.to_pylist() if value)


def _entry(given: str) -> str:
    """A key or URL as it is, a digest in lower case as digests are everywhere here."""
    given = given.strip()
    return given.lower() if re.fullmatch('[0-9A-Fa-f]{32}|[0-9A-Fa-f]{64}', given) else given


def with_captions(row: Row, columns: Mapping[str, float]) -> Row:
    """The row with the captions of other columns, whose weights are shared by the captions in them. Raises ColumnError: there is no such column."""
    captions: list[str | None] = []
    weights: list[float] = []
    reason = None
    for name, weight in columns.items():
        texts, not_text = captions_of(column_of(row, name))
        found = [caption for caption in texts if caption and caption.strip()]
        unusable = [None] * (1 if not_text else texts.count(None))
        captions += [*found, *unusable]
        weights += [*(weight / len(found) for _ in found), *(0.0 for _ in unusable)]
        reason = reason or not_text
    its_own = None if row.reason in (CAPTION_NOT_TEXT, CAPTION_NOT_UTF8) else row.reason  # of captions that these replace
    return replace(row, captions=captions, caption_weights=weights, reason=its_own or (None if any(captions) else reason))
