"""Turn captioned images into an MDS data set of images, every row accounted for.

    python -m data_prep.convert SOURCE DEST [filters] [--buckets ...] [--processes N] [--rank I --world-size N]

SOURCE is a folder, on a disk or in object storage (s3://, gs://, oci://), in one of these formats, recognised by its files:
  what img2dataset or data_prep.download wrote (`webdataset` or `parquet`); pictures with a .txt beside each, or with captions.jsonl,
  metadata.jsonl or metadata.csv; Hugging Face parquet with an image column; COCO captions; an image MDS, to filter or shard it anew.

Each picture is fully decoded. One that any decoder shows alike is stored as it came, byte for byte; CMYK, palette, 16-bit, alpha (laid over
white), animations (first frame) and EXIF orientations are re-encoded as plain RGB, which the column `reencoded` says.
DEST gets MDS shards with SHA-256 hashes, `manifest.json`, and `failures.parquet` with key, url and reason of every row left out.
Run the same command again after a stop: it goes on. Several hosts: the same command on each, with --rank and --world-size.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from data_prep.command import add_sharing_options, parser, run_command, shard_mb
from data_prep.converting.buckets import OneStream, buckets
from data_prep.converting.conversion import CAPTIONS, COLUMNS, Conversion, Options, Piece
from data_prep.converting.duplicates import KINDS, check_kind, find_duplicates, write_all_digests
from data_prep.converting.filters import LAION_COLUMNS, Filters, condition, laion_condition
from data_prep.mds.dataset import ALONE, Dataset, Share
from data_prep.mds.tally import Tally
from data_prep.mds.workers import map_parts
from data_prep.sources import find_source
from diffusion.arguments import positive_float, positive_int
from diffusion.storage import open_folder

KEEP_ALL = Options()


def convert(
    source: str | Path,
    dest: str | Path,
    options: Options = KEEP_ALL,
    split: str | None = None,
    processes: int = 1,
    share: Share = ALONE,
    merge_only: bool = False,
) -> Tally:
    """Convert a folder; returns what became of the rows.

    Args:
        split: which split of the source, if it has several.
        processes: workers on this host.
        share: which of several hosts this is.
        merge_only: write nothing but what is merged from the parts of all hosts.

    Raises:
        DataError: SOURCE, DEST or the options cannot be used.
        IncompleteError, StorageError: something outside failed; the same call goes on.
    """
    check_kind(options.duplicates)
    kind, reader = find_source(str(source), split)
    options = replace(options, keep_columns=tuple(dict.fromkeys([*reader.stored_columns, *options.keep_columns])))
    columns = dict(COLUMNS)
    if reader.several_captions or options.captions:
        columns['captions'] = CAPTIONS
    columns |= {name: ('json', f'column {name} of the source, as it came') for name in options.keep_columns}
    conversion = Conversion(reader, open_folder(dest), options, columns)
    parts = reader.parts()
    pieces = {part.name: Piece(part) for part in parts}
    dataset = Dataset(
        dest=conversion.dest,
        parts=list(pieces),
        identify=lambda name: conversion.identity(pieces[name]),
        columns=dict.fromkeys(options.buckets.streams(), columns),
        settings=options.settings(),
        described={'kind': 'images', 'source': {'path': str(source), 'format': kind, **({'split': split} if split else {})}},
        described_by_stream=options.buckets.streams(),
    )
    dataset.begin()
    now = Tally()
    if not merge_only:
        if options.duplicates != 'keep':
            write_all_digests(
                parts, reader, options.filters, options.duplicates, conversion.dest, processes, share, options.buckets, options.captions
            )
            repeated = find_duplicates(conversion.dest, parts, reader)
            pieces |= {part.name: Piece(part, repeated.get(part.name)) for part in parts}
        missing = [pieces[name] for name in dataset.missing(share)]
        for tally in map_parts(conversion, missing, processes, 'convert'):
            now.add(tally)
    return dataset.finish(ALONE if merge_only else share, now)


def main() -> int:
    options = parser('data_prep.convert', __doc__)
    options.add_argument('source', metavar='SOURCE', help='folder or URL of captioned pictures')
    options.add_argument('dest', metavar='DEST', help='folder or URL for the MDS data set, new or begun by this command')
    options.add_argument('--split', metavar='NAME', help='which split of the source, such as train, if it has several')

    filters = options.add_argument_group('filters, each counted by its reason')
    filters.add_argument('--min-side', type=positive_int, default=1, metavar='PX', help='leave out pictures whose shorter side is smaller')
    filters.add_argument(
        '--max-aspect-ratio', type=positive_float, metavar='R', help='leave out pictures whose longer side is more than R times the shorter'
    )
    filters.add_argument('--min-caption-chars', type=positive_int, default=1, metavar='N', help='leave out shorter captions (default: empty ones)')
    filters.add_argument(
        '--max-caption-chars', type=positive_int, default=10_000, metavar='N', help='leave out longer captions (default %(default)s)'
    )
    for name, comparison, what in SCORES:
        bound = 'max' if comparison == '<=' else 'min'
        filters.add_argument(f'--{bound}-{name}', type=float, metavar='X', help=f'{what}: column {", ".join(LAION_COLUMNS[name][:2])} ...')
    filters.add_argument(
        '--where', type=condition, action='append', default=[], metavar='"COLUMN < X"', help='any column of the source; may be given several times'
    )
    filters.add_argument('--skip-list', metavar='FILE', help='keys, URLs or SHA-256 digests to leave out (opt-outs): a line each, or parquet')
    filters.add_argument(
        '--duplicates',
        choices=['keep', *KINDS],
        default='keep',
        help='keep only the first of pictures that are the same bit by bit (exact), or to the eye (near); reads the input twice (default: keep all)',
    )

    layout = options.add_argument_group('layout')
    layout.add_argument(
        '--buckets',
        type=buckets,
        default=OneStream(),
        metavar='KIND',
        help='a stream for each min-side:256,512,1024 or each aspect ratio, aspect:512',
    )
    layout.add_argument('--captions', type=weights, metavar='COLUMN[=WEIGHT],...', help='columns that hold captions (default: the one of the format)')
    layout.add_argument('--keep-columns', type=names, default=(), metavar='COLUMN,...', help='store these columns too, for later filters')
    layout.add_argument('--shard-mb', type=shard_mb, default=64, metavar='MB', help='size of a shard (default %(default)s)')
    add_sharing_options(options)

    args = options.parse_args()
    scores = [(name, comparison, getattr(args, f'{"max" if comparison == "<=" else "min"}_{name}')) for name, comparison, _ in SCORES]
    chosen = Options(
        filters=Filters(
            min_side_px=args.min_side,
            max_aspect_ratio=args.max_aspect_ratio,
            min_caption_chars=args.min_caption_chars,
            max_caption_chars=args.max_caption_chars,
            conditions=(*(laion_condition(name, comparison, bound) for name, comparison, bound in scores if bound is not None), *args.where),
            skip_list=args.skip_list,
        ),
        buckets=args.buckets,
        captions=args.captions,
        duplicates=args.duplicates,
        keep_columns=args.keep_columns,
        shard_bytes=args.shard_mb << 20,
    )
    return run_command(
        args.dest, lambda: convert(args.source, args.dest, chosen, args.split, args.processes, Share(args.rank, args.world_size), args.merge)
    )


SCORES = (
    ('punsafe', '<=', "LAION's probability that a picture is unsafe"),
    ('pwatermark', '<=', "LAION's probability of a watermark"),
    ('similarity', '>=', 'CLIP similarity of picture and caption'),
    ('aesthetic', '>=', 'aesthetic score'),
)


def names(given: str) -> tuple[str, ...]:
    """An argparse type: names with commas between them."""
    return tuple(name.strip() for name in given.split(',') if name.strip())


def weights(given: str) -> dict[str, float]:
    """An argparse type: `caption=0.5,recaption=0.5`; a name without a weight has weight 1."""
    pairs = [item.partition('=') for item in names(given)]
    return {name.strip(): positive_float(weight) if weight else 1.0 for name, _, weight in pairs}


if __name__ == '__main__':
    raise SystemExit(main())
