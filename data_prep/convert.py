"""Turn captioned images into an MDS dataset of images, every row accounted for.

    python -m data_prep.convert SOURCE DEST [filters] [--buckets ...] [--processes N] [--rank I --world-size N]

SOURCE is a folder, on a disk or in object storage (s3://, gs://, oci://), in one of the formats of docs/data.md, recognised by its files, such as
  what img2dataset or data_prep.download wrote (`webdataset` or `parquet`); plain WebDataset (tars of .jpg, .txt, .json, .cls);
  images with a .txt or .caption next to each, or with captions.jsonl, metadata.jsonl, .csv or .parquet (Hugging Face's imagefolder);
  Hugging Face parquet with an image column; COCO captions; an image MDS, to filter or shard it again;
  other MDS shards, whose columns --columns names.

Each image is fully decoded. One that any decoder shows alike is stored as it came, byte for byte; CMYK, palette, 16-bit, alpha (laid over
white), animations (first frame) and EXIF orientations are re-encoded as plain RGB, which the column `reencoded` says.
DEST gets MDS shards with SHA-256 hashes, `manifest.json`, and `failures.parquet` with key, url and reason of every row left out.
Run the same command again after a stop to resume. Several hosts: the same command on each, with --rank and --world-size.
"""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, PositiveFloat, PositiveInt

from data_prep.converting.buckets import Buckets
from data_prep.converting.buckets import buckets as read_buckets
from data_prep.converting.filters import LAION_COLUMNS, Condition, Options, condition, laion_condition
from data_prep.engines.options import EngineRequest
from data_prep.mds.command import EXIT_CODES
from diffusion.common.command_line import Names, option, positional

FILTERS = 'filters, each counted by its reason'


def aspect_ratio(ratio: float) -> float:
    """Return the longer side over the shorter, which no image has below 1."""
    if ratio < 1:
        raise ValueError('is below 1, the longer side over the shorter of a square: it would leave out every image')
    return ratio


def column_names(given: str) -> dict[str, str]:
    """Read `image=jpg,caption=TEXT`."""
    pairs = [item.partition('=') for item in given.split(',') if item.strip()]
    found = {name.strip(): column.strip() for name, _, column in pairs}
    wrong = sorted(found.keys() - {'image', 'caption', 'key', 'url'})
    if wrong or not all(found.values()) or len(found) < len(pairs):
        raise ValueError('is not image=COLUMN,caption=COLUMN with key=COLUMN and url=COLUMN if you like, each once')
    return found


def weights(given: str) -> dict[str, Any]:
    """Read `caption=0.5,recaption=0.5`; a name without a weight has weight 1."""
    pairs = [item.partition('=') for item in given.split(',') if item.strip()]
    return {name.strip(): weight or 1.0 for name, _, weight in pairs}


def _score(name: str, meaning: str) -> Any:
    return option(None, f'{meaning}: column {", ".join(LAION_COLUMNS[name][:2])} ...', 'X', group=FILTERS)


class ConvertRequest(EngineRequest):
    """Rows to convert, and filters that leave some out."""

    source: str = positional('SOURCE', 'folder or URL of captioned images')
    dest: str = positional('DEST', 'folder or URL for the MDS dataset, new or begun by this command')
    split: str | None = option(None, 'which split of the source, such as train, if it has several', 'NAME')
    columns: Annotated[dict[str, str], BeforeValidator(column_names)] | None = option(
        None, 'what the columns of MDS shards without a manifest, or of parquet, are; key= and url= too', 'image=COLUMN,caption=COLUMN'
    )
    min_side: PositiveInt = option(1, 'leave out images whose shorter side is smaller', 'PX', group=FILTERS)
    max_aspect_ratio: Annotated[PositiveFloat, AfterValidator(aspect_ratio)] | None = option(
        None, 'leave out images whose longer side is more than R times the shorter', 'R', group=FILTERS
    )
    drop_blank: bool = option(False, 'leave out images of (almost) one colour', group=FILTERS)
    min_caption_chars: PositiveInt = option(1, 'leave out shorter captions (default: empty ones)', 'N', group=FILTERS)
    max_caption_chars: PositiveInt = option(10_000, 'leave out longer captions', 'N', group=FILTERS)
    max_punsafe: float | None = _score('punsafe', "LAION's probability that an image is unsafe")
    max_pwatermark: float | None = _score('pwatermark', "LAION's probability of a watermark")
    min_similarity: float | None = _score('similarity', 'CLIP similarity of image and caption')
    min_aesthetic: float | None = _score('aesthetic', 'aesthetic score')
    where: list[Annotated[Condition, BeforeValidator(condition)]] = option(
        [], 'any column of the source; may be given several times', '"COLUMN < X"', group=FILTERS
    )
    skip_list: str | None = option(None, 'keys, URLs or SHA-256 digests to leave out (opt-outs): a line each, or parquet', 'FILE', group=FILTERS)
    duplicates: Literal['keep', 'exact', 'near'] = option(
        'keep',
        'keep only the first of images that are the same bit by bit (exact), or to the eye (near); reads the input twice (default: keep all)',
        group=FILTERS,
    )
    buckets: Annotated[Any, BeforeValidator(read_buckets)] = option(
        None,
        'a stream for each min-side:256,512,1024, or for each aspect ratio: aspect:PX, PX a multiple of 128, such as aspect:512',
        'KIND',
        group='layout',
    )
    captions: Annotated[dict[str, PositiveFloat], BeforeValidator(weights)] | None = option(
        None, 'columns that hold captions (default: the one of the format)', 'COLUMN[=WEIGHT],...', group='layout'
    )
    caption: str | None = option(
        None, 'caption of the images of a folder that have none of their own, such as "a photo of sks dog"', 'TEXT', group='layout'
    )
    keep_columns: Names = option((), 'store these columns too, for later filters', 'COLUMN,...', group='layout')

    def options(self) -> Options:
        """Return all that the result depends on, apart from its source."""
        scores = (
            ('punsafe', '<=', self.max_punsafe),
            ('pwatermark', '<=', self.max_pwatermark),
            ('similarity', '>=', self.min_similarity),
            ('aesthetic', '>=', self.min_aesthetic),
        )
        return Options(
            min_side_px=self.min_side,
            max_aspect_ratio=self.max_aspect_ratio,
            drop_blank=self.drop_blank,
            min_caption_chars=self.min_caption_chars,
            max_caption_chars=self.max_caption_chars,
            conditions=(*(laion_condition(name, comparison, bound) for name, comparison, bound in scores if bound is not None), *self.where),
            skip_list=self.skip_list,
            buckets=self.buckets or Buckets(),
            captions=self.captions,
            duplicates=self.duplicates,
            keep_columns=self.keep_columns,
            shard_bytes=self.shard_mb << 20,
        )


def main() -> int:
    args = ConvertRequest.parse('data_prep.convert', __doc__, EXIT_CODES)
    from data_prep.converting.conversion import convert  # what reads and writes is imported after the arguments are read

    return args.run(
        args.dest,
        lambda engine: convert(args.source, args.dest, args.options(), args.split, engine, args.own_share(), args.columns or {}, args.caption),
    )


if __name__ == '__main__':
    raise SystemExit(main())
