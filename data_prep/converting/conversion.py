"""A row becomes a sample or a reason: the part of `convert` that runs in worker processes."""

import hashlib
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.converting.buckets import Buckets, OneStream
from data_prep.converting.digests import KINDS
from data_prep.converting.filters import ColumnError, Filters, column_of, with_captions
from data_prep.engines.engine import Item, Result
from data_prep.engines.local import PartFunction, count_row
from data_prep.mds.job import Job, Tally
from data_prep.mds.oddities import BLANK, CLIP_TOKENS, LONG, content_hashes, is_blank, least_tokens
from data_prep.mds.parts import Columns, PartWriter
from data_prep.sources.base import Part, Row, Source, text
from diffusion.common.storage import Folder
from diffusion.contracts.errors import DataError
from diffusion.datasets.decode import ImageError, canonical, size_of

COLUMNS: Columns = {
    'key': ('str', 'key of the row in the source'),
    'url': ('str', 'where the image came from'),
    'caption': ('str', 'its caption; the first of several'),
    'image': ('bytes', 'the image, JPEG, PNG or WebP'),
    'reencoded': ('str', 'what had to change in the image, which was then encoded again; empty: these are the bytes as they came'),
    'sha256': ('str', 'of the image as it came'),
    'width': ('int32', 'pixels, after EXIF orientation'),
    'height': ('int32', 'pixels, after EXIF orientation'),
    'original_width': ('int32', 'pixels before the source resized the image, if it says so (img2dataset); otherwise as width'),
    'original_height': ('int32', 'pixels before the source resized the image, if it says so (img2dataset); otherwise as height'),
}
CAPTIONS = ('json', '[[caption, weight], ...]; the weights add up to 1')


@dataclass(frozen=True)
class Options:
    """What the result of a conversion depends on apart from its source.

    Attributes:
        captions: columns of the source that hold captions, with their weights; empty: what the source takes for them.
        duplicates: `keep`, or a key of KINDS.
        keep_columns: columns of the source to store as JSON, for later filters.
        shard_bytes: size at which a shard is closed.
    """

    filters: Filters = field(default_factory=Filters)
    buckets: Buckets = field(default_factory=OneStream)
    captions: Mapping[str, float] | None = None
    duplicates: str = 'keep'
    keep_columns: tuple[str, ...] = ()
    shard_bytes: int = 64 << 20

    def settings(self) -> dict[str, Any]:
        """For DEST's record."""
        captions = None if self.captions is None else list(self.captions.items())  # their order matters
        more = {'captions': captions, 'duplicates': self.duplicates, 'keep_columns': list(self.keep_columns), 'shard_bytes': self.shard_bytes}
        return {'command': 'convert', **self.filters.settings(), 'buckets': self.buckets.settings(), **more}

    def captioned(self, row: Row) -> Row:
        """The row with the captions that are asked for."""
        return row if self.captions is None else with_captions(row, self.captions)

    def usable_captions(self, row: Row) -> tuple[list[tuple[str, float]], str | None]:
        """(captions with weights that add up to 1, None) of a `captioned` row, or ([], reason); its image is not decoded."""
        reason = self.filters.row_reason(row)
        if reason is not None or row.image is None:
            return [], reason or 'no image'
        return self.filters.usable_captions(row)

    def place(self, width_px: int, height_px: int) -> tuple[str, None] | tuple[None, str]:
        """(stream, None) of an image of this size, or (None, reason)."""
        reason = self.filters.size_reason(width_px, height_px)
        return (None, reason) if reason is not None else self.buckets.place(width_px, height_px)


@dataclass(frozen=True)
class Piece:
    """A part to convert, and which of its rows repeat an earlier image, as bits (see duplicates.py)."""

    part: Part
    repeated: np.ndarray | None = None

    def repeats(self, row: int) -> bool:
        """Whether the row repeats an earlier image."""
        return self.repeated is not None and bool(self.repeated[row >> 3] & (128 >> (row & 7)))


@dataclass(frozen=True)
class SourceFunction(PartFunction[Item, Result]):
    """From a source into the folder of a job; goes to the worker processes."""

    source: Source
    job: Job
    options: Options

    @property
    def reads(self) -> Folder:
        return self.source.folder

    @property
    def writes(self) -> Folder:
        return self.job.dest


@dataclass(frozen=True)
class Conversion(SourceFunction[Piece, Tally]):
    """Converts pieces."""

    label = 'convert'

    columns: Columns

    def __post_init__(self) -> None:
        taken = sorted({*COLUMNS, 'captions'} & set(self.options.keep_columns))
        if taken:
            raise DataError(f'--keep-columns {",".join(taken)}: is there in every dataset already; leave it out')
        inside, outside = (where.url if '://' in where.url else str(Path(where.url).resolve()) for where in (self.job.dest, self.source.folder))
        if f'{inside}/'.startswith(f'{outside}/'):
            raise DataError(f'{self.job.dest.url}: is inside the source {self.source.folder.url}; name a folder outside of it')

    def name(self, piece: Piece) -> str:
        return piece.part.name

    def file(self, piece: Piece) -> str:
        return next(iter(piece.part.files))

    def count(self, piece: Piece, tally: Tally) -> int:
        return tally.attempted_now

    def identity(self, piece: Piece) -> dict[str, Any]:
        """Return what the piece's result depends on apart from the options."""
        repeated = b'' if piece.repeated is None else piece.repeated.tobytes()
        return {**self.source.fingerprint(piece.part), 'repeated': hashlib.sha256(repeated).hexdigest()[:16] if repeated else ''}

    def __call__(self, piece: Piece) -> Tally:
        streams = dict.fromkeys(self.options.buckets.streams(), self.columns)
        identity = self.identity(piece)  # before reading: what changes meanwhile will differ from it
        with closing(PartWriter(self.job, piece.part.name, streams, self.options.shard_bytes)) as writer:
            try:
                for number, row in enumerate(self.source.rows(piece.part, writer.scratch)):
                    reason = self._keep(row, writer, piece.repeats(number))
                    if reason is not None:
                        writer.drop(row.key, row.url, reason)
                    count_row()
            except ColumnError as error:
                raise DataError(f'{self.source.folder.url}, part {piece.part.name}: {error}') from error
            return writer.commit(identity)

    def _keep(self, row: Row, writer: PartWriter, repeated: bool) -> str | None:
        """Write the row as a sample, or say why not."""
        options = self.options
        row = options.captioned(row)
        captions, reason = options.usable_captions(row)
        if reason is not None or row.image is None:
            return reason
        if repeated:
            return KINDS[options.duplicates][1]
        try:
            decoded = canonical(row.image)
        except ImageError as error:
            return str(error)
        width, height = decoded.image.size
        stream, reason = options.place(width, height)
        if stream is None:
            return reason
        blank = is_blank(decoded.image)
        if blank and options.filters.drop_blank:
            return BLANK
        writer.tally.notes.update([BLANK] * blank + [LONG] * any(least_tokens(caption) > CLIP_TOKENS for caption, _ in captions))
        reencoded = row.reencoded or decoded.reencoded
        if decoded.reencoded:
            writer.tally.notes[f're-encoded: {decoded.reencoded}'] += 1
        if None in (row.captions or ()):
            writer.tally.notes['captions that are not text left out, others used'] += 1
        if decoded.note:
            writer.tally.notes[decoded.note] += 1
        original_width, original_height = original_size(row, width, height)
        sample = {
            'key': row.key,
            'url': row.url,
            'caption': captions[0][0],
            'image': decoded.content,
            'reencoded': reencoded,
            'sha256': row.sha256 or hashlib.sha256(row.image).hexdigest(),
            'width': width,
            'height': height,
            'original_width': original_width,
            'original_height': original_height,
            'captions': captions,
            **{name: _json(column_of(row, name)) for name in options.keep_columns},
        }
        hashes = content_hashes(decoded.content, captions if 'captions' in self.columns else captions[:1])
        writer.keep({name: sample[name] for name in self.columns}, stream, min(width, height), hashes)
        return None


def original_size(row: Row, width: int, height: int) -> tuple[int, int]:
    """(width, height) of an upright image before it was resized, as img2dataset records it; `width` and `height` where the source does not say.

    img2dataset looks at no EXIF orientation: of an image that had to be turned, it names the sides as they lay.
    """
    sides = row.columns.get('original_width'), row.columns.get('original_height')
    if row.image is None or not all(isinstance(side, Integral) and 0 < side < 1 << 31 for side in sides):  # type: ignore[operator]
        return width, height
    turned = width != height and size_of(row.image) == (height, width)
    original_width, original_height = sides[::-1] if turned else sides
    return int(original_width), int(original_height)  # type: ignore[arg-type]


def _json(value: Any) -> Any:
    """The value with text for what JSON does not have."""
    if isinstance(value, dict):
        return {text(key) or '': _json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json(item) for item in value]
    return value if isinstance(value, bool | int | float) else text(value)
