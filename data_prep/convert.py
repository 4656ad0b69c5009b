"""Turn captioned images into an MDS data set of images, every row accounted for.

    python -m data_prep.convert SOURCE DEST [--min-side PX]

SOURCE is a folder that img2dataset wrote, `webdataset` or `parquet`. Each picture is fully decoded; JPEG, PNG and WebP are
stored as they are, byte for byte. DEST gets MDS shards with SHA-256 hashes, `manifest.json`, and `failures.parquet` with key,
url and reason of every row left out. Run the same command again after a stop: it goes on.

Exit code 0 when all rows are accounted for, 2 when SOURCE or DEST cannot be used.
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from data_prep.command import run_command
from data_prep.parts import PartTally, Tally, write_dataset
from data_prep.sources import Row, find_source
from diffusion.arguments import positive_int
from diffusion.datasets.transforms import ImageError, open_image

COLUMNS = {
    'key': ('str', 'key of the row in the source'),
    'url': ('str', 'where the picture came from'),
    'caption': ('str', 'its caption'),
    'image': ('bytes', 'the picture as it came, JPEG, PNG or WebP'),
    'sha256': ('str', 'of those bytes'),
    'width': ('int32', 'pixels, after EXIF orientation'),
    'height': ('int32', 'pixels, after EXIF orientation'),
}


def convert(source: Path, dest: Path, min_side_px: int = 1) -> Tally:
    """Convert a folder; returns what became of the rows.

    Raises:
        DataError: SOURCE or DEST cannot be used.
    """
    kind, reader = find_source(source)
    return write_dataset(
        dest,
        reader.parts(source),
        COLUMNS,
        settings={'min_side': min_side_px},
        samples=lambda rows, tally: samples(rows, tally, min_side_px),
        source={'path': str(source), 'format': kind},
        kind='images',
    )


def samples(rows: Iterable[Row], tally: PartTally, min_side_px: int) -> Iterator[dict[str, Any]]:
    """The rows worth keeping, as MDS samples; the tally hears of every row."""
    for row in rows:
        if row.image is None or row.reason is not None:
            tally.drop(row.key, row.url, row.reason or 'no picture')
            continue
        if not (row.caption or '').strip():
            tally.drop(row.key, row.url, 'empty caption')
            continue
        try:
            image = open_image(row.image)
        except ImageError as error:
            tally.drop(row.key, row.url, str(error))
            continue
        if min(image.size) < min_side_px:
            tally.drop(row.key, row.url, f'short side below {min_side_px} px')
            continue
        tally.keep(min(image.size))
        yield {
            'key': row.key,
            'url': row.url,
            'caption': row.caption,
            'image': row.image,
            'sha256': hashlib.sha256(row.image).hexdigest(),
            'width': image.width,
            'height': image.height,
        }


def main() -> int:
    parser = argparse.ArgumentParser(prog='python -m data_prep.convert', description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('source', type=Path, metavar='SOURCE', help='folder that img2dataset wrote')
    parser.add_argument('dest', type=Path, metavar='DEST', help='folder for the MDS data set, new or begun by this command')
    parser.add_argument(
        '--min-side', type=positive_int, default=1, metavar='PX', help='leave out pictures whose short side is smaller (default: keep all)'
    )
    args = parser.parse_args()
    return run_command(args.dest, lambda: convert(args.source, args.dest, args.min_side))


if __name__ == '__main__':
    raise SystemExit(main())
