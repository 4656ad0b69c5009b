"""Captioned images to an MDS dataset: `convert` is the whole; `Conversion` runs in worker processes, and makes of a row a sample or a reason."""

import hashlib
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from numbers import Integral
from pathlib import Path
from types import MappingProxyType
from typing import Any

from data_prep.converting.duplicates import DigestWriter, SourceFunction, find_duplicates, write_all_digests
from data_prep.converting.filters import DUPLICATES, ColumnError, Options, column_of
from data_prep.engines.engine import IN_THIS_PROCESS, Engine, count_row
from data_prep.mds.dataset import Columns, Dataset, PartWriter
from data_prep.mds.job import ALONE, Share, Tally
from data_prep.mds.oddities import BLANK, CLIP_TOKENS, LONG, ODDITIES, content_hashes, is_blank, least_tokens, warn
from data_prep.sources.base import Part, Row, text
from data_prep.sources.formats import find_source
from diffusion.common.storage import open_folder
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
KEEP_ALL = Options()


def convert(
    source: str | Path,
    dest: str | Path,
    options: Options = KEEP_ALL,
    split: str | None = None,
    engine: Engine = IN_THIS_PROCESS,
    share: Share = ALONE,
    columns: Mapping[str, str] = MappingProxyType({}),
    caption: str | None = None,
) -> Tally:
    """Convert a folder; returns what became of the rows.

    Args:
        split: which split of the source, if it has several.
        engine: who does the work; the result does not depend on it.
        share: which of several hosts this is.
        columns: the source's names for `image`, `caption`, `key` and `url`, where its files do not say.
        caption: of images in a folder that have none of their own.

    Raises:
        DataError: SOURCE, DEST or the options cannot be used.
        IncompleteError, StorageError: something outside failed; the same call resumes.
    """
    if options.duplicates == 'near' and find_spec('imagehash') is None:
        raise DataError("--duplicates near needs ImageHash: uv pip install -e '.[near-duplicates]'")
    kind, reader = find_source(str(source), split, columns, caption)
    options = replace(options, keep_columns=tuple(dict.fromkeys([*reader.stored_columns, *options.keep_columns])))
    stored = dict(COLUMNS)
    if reader.several_captions or options.captions:
        stored['captions'] = CAPTIONS
    stored |= {name: ('json', f'column {name} of the source, as it came') for name in options.keep_columns}
    parts = dict[str, Part]()
    for part in reader.parts():
        if part.name in parts:
            first, second = (one.path or one.name for one in (parts[part.name], part))
            raise DataError(f'{reader.folder.url}: {first} and {second} would both become the part {part.name}; rename one')
        parts[part.name] = part
    dataset = Dataset(
        dest=open_folder(dest),
        parts=parts,
        identify=lambda part: conversion.identity(part),
        columns=dict.fromkeys(options.buckets.streams(), stored),
        settings=options.settings() | {'columns': dict(columns)} | ({} if caption is None else {'caption': caption}),
        described={'kind': 'images', 'source': {'path': str(source), 'format': kind, **({'split': split} if split else {})}},
        described_by_stream=options.buckets.streams(),
    )
    conversion = Conversion(reader, dataset.job, options, stored)
    with dataset.job.begun():
        if options.duplicates != 'keep' and not share.merge_only:
            write_all_digests(list(parts.values()), DigestWriter(reader, dataset.job, options), engine, share)
            repeated = find_duplicates(dataset.job, list(parts.values()), reader)
            parts |= {name: replace(part, repeated=repeated.get(name)) for name, part in parts.items()}
        tally = dataset.complete(partial(engine.map, conversion), share)
    definitions = {oddity: about.definition.format(tokens=CLIP_TOKENS) for oddity, about in ODDITIES.items()}
    odd = [f'  warning: {warning}' for oddity in ODDITIES if (warning := warn(oddity, tally.notes[oddity], tally.kept, definitions[oddity]))]
    tally.remarks += [*odd, f'  python -m data_prep.audit {dest} names them'] if odd else []
    return tally


@dataclass(frozen=True)
class Conversion(SourceFunction):
    """Converts parts."""

    label = 'convert'

    columns: Columns

    def __post_init__(self) -> None:
        taken = sorted({*COLUMNS, 'captions'} & set(self.options.keep_columns))
        if taken:
            raise DataError(f'--keep-columns {",".join(taken)}: is there in every dataset already; leave it out')
        inside, outside = (where.url if '://' in where.url else str(Path(where.url).resolve()) for where in (self.job.dest, self.source.folder))
        if f'{inside}/'.startswith(f'{outside}/'):
            raise DataError(f'{self.job.dest.url}: is inside the source {self.source.folder.url}; name a folder outside of it')

    def identity(self, part: Part) -> dict[str, Any]:
        """Return what the part's result depends on apart from the options."""
        repeated = b'' if part.repeated is None else part.repeated.tobytes()
        return {**self.source.fingerprint(part), 'repeated': hashlib.sha256(repeated).hexdigest()[:16] if repeated else ''}

    def __call__(self, part: Part) -> Tally:
        streams = dict.fromkeys(self.options.buckets.streams(), self.columns)
        identity = self.identity(part)  # before reading: what changes meanwhile will differ from it
        with closing(PartWriter(self.job, part.name, streams, self.options.shard_bytes)) as writer:
            try:
                for number, row in enumerate(self.source.rows(part, writer.scratch)):
                    reason = self._keep(row, writer, part.repeats(number))
                    if reason is not None:
                        writer.drop(row.key, row.url, reason)
                    count_row()
            except ColumnError as error:
                raise DataError(f'{self.source.folder.url}, part {part.name}: {error}') from error
            return writer.commit(identity)

    def _keep(self, row: Row, writer: PartWriter, repeated: bool) -> str | None:
        """Write the row as a sample, or say why not."""
        options = self.options
        row = options.captioned(row)
        captions, reason = options.usable_captions(row)
        if reason is not None or row.image is None:
            return reason
        if repeated:
            return DUPLICATES[options.duplicates]
        try:
            decoded = canonical(row.image)
        except ImageError as error:
            return str(error)
        width, height = decoded.image.size
        stream, reason = options.place(width, height)
        if stream is None:
            return reason
        blank = is_blank(decoded.image)
        if blank and options.drop_blank:
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
