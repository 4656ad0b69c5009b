"""Turn captioned images into an MDS dataset of images, every row accounted for.

    python -m data_prep.convert SOURCE DEST [filters] [--buckets ...] [--processes N] [--rank I --world-size N]

SOURCE is a folder, on a disk or in object storage (s3://, gs://, oci://), in one of these formats, recognised by its files:
  what img2dataset or data_prep.download wrote (`webdataset` or `parquet`); plain WebDataset (tars of .jpg, .txt, .json, .cls);
  images with a .txt or .caption next to each, or with captions.jsonl, metadata.jsonl, .csv or .parquet (Hugging Face's imagefolder);
  Hugging Face parquet with an image column; COCO captions; an image MDS, to filter or shard it again;
  other MDS shards, whose columns --columns names.

Each image is fully decoded. One that any decoder shows alike is stored as it came, byte for byte; CMYK, palette, 16-bit, alpha (laid over
white), animations (first frame) and EXIF orientations are re-encoded as plain RGB, which the column `reencoded` says.
DEST gets MDS shards with SHA-256 hashes, `manifest.json`, and `failures.parquet` with key, url and reason of every row left out.
Run the same command again after a stop to resume. Several hosts: the same command on each, with --rank and --world-size.
"""

import argparse
from contextlib import closing

from data_prep.converting.buckets import OneStream, buckets
from data_prep.converting.filters import DUPLICATES, LAION_COLUMNS, Filters, Options, condition, laion_condition
from data_prep.engines.options import add_engine_options, engine_of
from data_prep.mds.command import add_shard_size, add_sharing_options, parser, run_command
from diffusion.common.arguments import positive_float, positive_int

SCORES = (
    ('max', 'punsafe', '<=', "LAION's probability that an image is unsafe"),
    ('max', 'pwatermark', '<=', "LAION's probability of a watermark"),
    ('min', 'similarity', '>=', 'CLIP similarity of image and caption'),
    ('min', 'aesthetic', '>=', 'aesthetic score'),
)


def main() -> int:
    options = parser('data_prep.convert', __doc__)
    options.add_argument('source', metavar='SOURCE', help='folder or URL of captioned images')
    options.add_argument('dest', metavar='DEST', help='folder or URL for the MDS dataset, new or begun by this command')
    options.add_argument('--split', metavar='NAME', help='which split of the source, such as train, if it has several')
    of_files = 'what the columns of MDS shards without a manifest, or of parquet, are; key= and url= too'
    options.add_argument('--columns', type=column_names, default={}, metavar='image=COLUMN,caption=COLUMN', help=of_files)

    add = options.add_argument_group('filters, each counted by its reason').add_argument
    add('--min-side', type=positive_int, default=1, metavar='PX', help='leave out images whose shorter side is smaller')
    add('--max-aspect-ratio', type=aspect_ratio, metavar='R', help='leave out images whose longer side is more than R times the shorter')
    add('--drop-blank', action='store_true', help='leave out images of (almost) one colour')
    add('--min-caption-chars', type=positive_int, default=1, metavar='N', help='leave out shorter captions (default: empty ones)')
    add('--max-caption-chars', type=positive_int, default=10_000, metavar='N', help='leave out longer captions (default %(default)s)')
    for bound, name, _, score in SCORES:
        add(f'--{bound}-{name}', type=float, metavar='X', help=f'{score}: column {", ".join(LAION_COLUMNS[name][:2])} ...')
    any_column = 'any column of the source; may be given several times'
    add('--where', type=condition, action='append', default=[], metavar='"COLUMN < X"', help=any_column)
    add('--skip-list', metavar='FILE', help='keys, URLs or SHA-256 digests to leave out (opt-outs): a line each, or parquet')
    same = 'keep only the first of images that are the same bit by bit (exact), or to the eye (near); reads the input twice (default: keep all)'
    add('--duplicates', choices=['keep', *DUPLICATES], default='keep', help=same)

    layout = options.add_argument_group('layout')
    kinds = 'a stream for each min-side:256,512,1024, or for each aspect ratio: aspect:PX, PX a multiple of 128, such as aspect:512'
    layout.add_argument('--buckets', type=buckets, default=OneStream(), metavar='KIND', help=kinds)
    layout.add_argument('--captions', type=weights, metavar='COLUMN[=WEIGHT],...', help='columns that hold captions (default: the one of the format)')
    own = 'caption of the images of a folder that have none of their own, such as "a photo of sks dog"'
    layout.add_argument('--caption', metavar='TEXT', help=own)
    layout.add_argument('--keep-columns', type=names, default=(), metavar='COLUMN,...', help='store these columns too, for later filters')
    add_shard_size(layout)
    add_sharing_options(options)
    add_engine_options(options)

    args = options.parse_args()
    engine = engine_of(options, args)
    from data_prep.converting.conversion import convert  # what reads and writes is imported after the arguments are read

    scores = [(name, comparison, getattr(args, f'{bound}_{name}')) for bound, name, comparison, _ in SCORES]
    filters = Filters(
        min_side_px=args.min_side,
        max_aspect_ratio=args.max_aspect_ratio,
        drop_blank=args.drop_blank,
        min_caption_chars=args.min_caption_chars,
        max_caption_chars=args.max_caption_chars,
        conditions=(*(laion_condition(*score) for score in scores if score[-1] is not None), *args.where),
        skip_list=args.skip_list,
    )
    chosen = Options(filters, args.buckets, args.captions, args.duplicates, args.keep_columns, shard_bytes=args.shard_mb << 20)
    with closing(engine):
        return run_command(args, lambda share: convert(args.source, args.dest, chosen, args.split, engine, share, args.columns, args.caption))


def names(given: str) -> tuple[str, ...]:
    """Argparse type: names with commas between them."""
    return tuple(name.strip() for name in given.split(',') if name.strip())


def aspect_ratio(given: str) -> float:
    """Argparse type: the longer side over the shorter, which no image has below 1."""
    ratio = positive_float(given)
    if ratio < 1:
        raise argparse.ArgumentTypeError(f"'{given}' is below 1, the longer side over the shorter of a square: it would leave out every image")
    return ratio


def column_names(given: str) -> dict[str, str]:
    """Argparse type: `image=jpg,caption=TEXT`."""
    pairs = [item.partition('=') for item in names(given)]
    found = {name.strip(): column.strip() for name, _, column in pairs}
    wrong = sorted(found.keys() - {'image', 'caption', 'key', 'url'})
    if wrong or not all(found.values()) or len(found) < len(pairs):
        raise argparse.ArgumentTypeError(f'{given!r} is not image=COLUMN,caption=COLUMN with key=COLUMN and url=COLUMN if you like, each once')
    return found


def weights(given: str) -> dict[str, float]:
    """Argparse type: `caption=0.5,recaption=0.5`; a name without a weight has weight 1."""
    pairs = [item.partition('=') for item in names(given)]
    return {name.strip(): positive_float(weight) if weight else 1.0 for name, _, weight in pairs}


if __name__ == '__main__':
    raise SystemExit(main())
