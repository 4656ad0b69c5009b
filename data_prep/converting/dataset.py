"""Captioned images to an MDS dataset: the whole of a conversion, of which conversion.py does a row."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from data_prep.converting.conversion import CAPTIONS, COLUMNS, Conversion, Options, Piece
from data_prep.converting.digests import check_kind
from data_prep.converting.duplicates import DigestWriter, find_duplicates, write_all_digests
from data_prep.engines.engine import Engine
from data_prep.engines.local import IN_THIS_PROCESS
from data_prep.mds.dataset import Dataset
from data_prep.mds.job import ALONE, Share, Tally
from data_prep.mds.oddities import CLIP_TOKENS, ODDITIES, warn
from data_prep.sources.formats import find_source
from diffusion.common.storage import open_folder
from diffusion.contracts.errors import DataError

KEEP_ALL = Options()


def convert(
    source: str | Path,
    dest: str | Path,
    options: Options = KEEP_ALL,
    split: str | None = None,
    engine: Engine = IN_THIS_PROCESS,
    share: Share = ALONE,
    merge_only: bool = False,
    columns: Mapping[str, str] = MappingProxyType({}),
    caption: str | None = None,
) -> Tally:
    """Convert a folder; returns what became of the rows.

    Args:
        split: which split of the source, if it has several.
        engine: who does the work; the result does not depend on it.
        share: which of several hosts this is.
        merge_only: write nothing but what is merged from the parts of all hosts.
        columns: the source's names for `image`, `caption`, `key` and `url`, where its files do not say.
        caption: of images in a folder that have none of their own.

    Raises:
        DataError: SOURCE, DEST or the options cannot be used.
        IncompleteError, StorageError: something outside failed; the same call resumes.
    """
    check_kind(options.duplicates)
    kind, reader = find_source(str(source), split, columns, caption)
    options = replace(options, keep_columns=tuple(dict.fromkeys([*reader.stored_columns, *options.keep_columns])))
    stored = dict(COLUMNS)
    if reader.several_captions or options.captions:
        stored['captions'] = CAPTIONS
    stored |= {name: ('json', f'column {name} of the source, as it came') for name in options.keep_columns}
    parts, pieces = reader.parts(), dict[str, Piece]()
    for part in parts:
        if part.name in pieces:
            first, second = (next(iter(one.files), one.name) for one in (pieces[part.name].part, part))
            raise DataError(f'{reader.folder.url}: {first} and {second} would both become the part {part.name}; rename one')
        pieces[part.name] = Piece(part)
    dataset = Dataset(
        dest=open_folder(dest),
        parts=list(pieces),
        identify=lambda name: conversion.identity(pieces[name]),
        columns=dict.fromkeys(options.buckets.streams(), stored),
        settings=options.settings() | {'columns': dict(columns)} | ({} if caption is None else {'caption': caption}),
        described={'kind': 'images', 'source': {'path': str(source), 'format': kind, **({'split': split} if split else {})}},
        described_by_stream=options.buckets.streams(),
    )
    conversion = Conversion(reader, dataset.job, options, stored)
    with dataset.job.begun():
        if options.duplicates != 'keep' and not merge_only:
            write_all_digests(parts, DigestWriter(reader, dataset.job, options), engine, share)
            repeated = find_duplicates(dataset.job, parts, reader)
            pieces |= {part.name: Piece(part, repeated.get(part.name)) for part in parts}
        tally = dataset.complete(lambda names: engine.map(conversion, [pieces[name] for name in names]), share, merge_only)
    definitions = {oddity: about.definition.format(tokens=CLIP_TOKENS) for oddity, about in ODDITIES.items()}
    odd = [f'  warning: {warning}' for oddity in ODDITIES if (warning := warn(oddity, tally.notes[oddity], tally.kept, definitions[oddity]))]
    tally.remarks += [*odd, f'  python -m data_prep.audit {dest} names them'] if odd else []
    return tally
