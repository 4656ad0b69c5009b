"""Captioned images to an MDS dataset: the whole of a conversion, of which conversion.py does a row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from data_prep.converting.conversion import CAPTIONS, COLUMNS, Conversion, Options, Piece
from data_prep.converting.digests import check_kind
from data_prep.converting.duplicates import find_duplicates, write_all_digests
from data_prep.mds.dataset import Dataset
from data_prep.mds.job import ALONE, Share
from data_prep.mds.tally import Tally
from data_prep.mds.workers import map_parts
from data_prep.sources.formats import find_source
from diffusion.common.storage import open_folder

KEEP_ALL = Options()


def convert(
    source: str | Path,
    dest: str | Path,
    options: Options = KEEP_ALL,
    split: str | None = None,
    processes: int = 1,
    share: Share = ALONE,
    merge_only: bool = False,
    columns: Mapping[str, str] = MappingProxyType({}),
) -> Tally:
    """Convert a folder; returns what became of the rows.

    Args:
        split: which split of the source, if it has several.
        processes: workers on this host.
        share: which of several hosts this is.
        merge_only: write nothing but what is merged from the parts of all hosts.
        columns: the source's names for `image`, `caption`, `key` and `url`, where its files do not say.

    Raises:
        DataError: SOURCE, DEST or the options cannot be used.
        IncompleteError, StorageError: something outside failed; the same call resumes.
    """
    check_kind(options.duplicates)
    kind, reader = find_source(str(source), split, columns)
    options = replace(options, keep_columns=tuple(dict.fromkeys([*reader.stored_columns, *options.keep_columns])))
    stored = dict(COLUMNS)
    if reader.several_captions or options.captions:
        stored['captions'] = CAPTIONS
    stored |= {name: ('json', f'column {name} of the source, as it came') for name in options.keep_columns}
    parts = reader.parts()
    pieces = {part.name: Piece(part) for part in parts}
    dataset = Dataset(
        dest=open_folder(dest),
        parts=list(pieces),
        identify=lambda name: conversion.identity(pieces[name]),
        columns=dict.fromkeys(options.buckets.streams(), stored),
        settings=options.settings() | {'columns': dict(columns)},
        described={'kind': 'images', 'source': {'path': str(source), 'format': kind, **({'split': split} if split else {})}},
        described_by_stream=options.buckets.streams(),
    )
    conversion = Conversion(reader, dataset.job, options, stored)
    now = Tally()
    with dataset.job.begun():
        if options.duplicates != 'keep' and not merge_only:
            write_all_digests(parts, reader, options.filters, options.duplicates, dataset.job, processes, share, options.buckets, options.captions)
            repeated = find_duplicates(dataset.job, parts, reader)
            pieces |= {part.name: Piece(part, repeated.get(part.name)) for part in parts}
        missing = [] if merge_only else [pieces[name] for name in dataset.missing(share)]
        for tally in map_parts(conversion, missing, processes, 'convert'):
            now.add(tally)
        return dataset.finish(ALONE if merge_only else share, now)
