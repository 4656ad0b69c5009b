"""Measure the speed and memory of data_prep.convert.

    python -m benchmarks.convert [--rows 10000] [--out convert.jsonl]

Draws JPEGs of about 512 x 384 into img2dataset shards, then reads them in three ways, in one run: a plain loop that decodes with Pillow
and writes with MDSWriter (the floor: what no converter can go below), ours in one process, ours in two.
Each way runs on a tenth of the rows and on all of them; the images/s are those of the difference, so that start-up does not count.
Memory is the peak of all processes together.
"""

import argparse
import io
import json
import random
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tqdm import tqdm

from benchmarks.measured import command, print_table, record, run_watched
from diffusion.common.arguments import positive_int

ROWS_PER_SHARD = 250


def draw_jpeg(seed: int) -> bytes:
    """Return a JPEG with edges and texture, so that it decodes at the speed of a photograph: about 50 kB."""
    rng = np.random.default_rng(seed)
    width, height = (int(side * factor) for side, factor in zip((512, 384), rng.uniform(0.9, 1.1, 2), strict=True))
    coarse = Image.fromarray(rng.integers(0, 256, (12, 16, 3), dtype=np.uint8)).resize((width, height), Image.Resampling.BICUBIC)
    pixels = np.asarray(coarse, dtype=np.float32) + rng.normal(0, 6, (height, width, 1)).astype(np.float32)
    buffer = io.BytesIO()
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(buffer, 'JPEG', quality=90)
    return buffer.getvalue()


def write_crawl(folder: Path, num_rows: int) -> None:
    """`num_rows` captioned images in img2dataset's webdataset layout, and a list of them as files."""
    import pyarrow as pa  # after the arguments are read
    import pyarrow.parquet as pq

    jpegs = [draw_jpeg(seed) for seed in range(200)]  # drawn once; what follows the end of a JPEG makes each file another
    folder.mkdir(parents=True)
    (folder.parent / f'{folder.name}-files').mkdir()
    urls = []
    for shard, start in enumerate(tqdm(range(0, num_rows, ROWS_PER_SHARD), desc='draw', unit='shard')):
        rows = []
        with tarfile.open(folder / f'{shard:05d}.tar', 'w') as tar:
            for i in range(start, min(start + ROWS_PER_SHARD, num_rows)):
                key, caption, jpeg = f'{shard:05d}{i - start:04d}', f'image {i}', jpegs[i % len(jpegs)] + i.to_bytes(8, 'little')
                file = folder.parent / f'{folder.name}-files' / f'{key}.jpg'
                file.write_bytes(jpeg)
                row = {'key': key, 'url': file.resolve().as_uri(), 'caption': caption, 'status': 'success', 'error_message': None}
                for suffix, content in (('jpg', jpeg), ('txt', caption.encode()), ('json', json.dumps(row).encode())):
                    entry = tarfile.TarInfo(f'{key}.{suffix}')
                    entry.size = len(content)
                    tar.addfile(entry, io.BytesIO(content))
                rows.append(row)
        pq.write_table(pa.Table.from_pylist(rows), folder / f'{shard:05d}.parquet')
        urls += [{'url': row['url'], 'caption': row['caption']} for row in rows]
    random.Random(0).shuffle(urls)
    pq.write_table(pa.Table.from_pylist(urls), folder.parent / f'{folder.name}-urls.parquet')


def floor(source: Path, dest: Path) -> None:
    """The least that can be done: read, decode, write."""
    from streaming import MDSWriter

    columns = {'key': 'str', 'caption': 'str', 'image': 'bytes'}
    with MDSWriter(out=str(dest), columns=columns, progress_bar=False) as writer:
        for shard in sorted(source.glob('*.tar')):
            with tarfile.open(shard) as tar:
                content: dict[str, bytes] = {}
                for member in tar:
                    stem, _, suffix = member.name.partition('.')
                    content[suffix] = tar.extractfile(member).read()  # type: ignore[union-attr]
                    if suffix == 'json':
                        with Image.open(io.BytesIO(content['jpg']), formats=('JPEG',)) as image:
                            image.load()
                        writer.write({'key': stem, 'caption': content['txt'].decode(), 'image': content['jpg']})


WAYS: dict[str, Callable[[Path, Path], list[object]]] = {
    'floor': lambda source, dest: ['-m', 'benchmarks.convert', '--only', source, dest],
    'convert, 1 process': lambda source, dest: ['-m', 'data_prep.convert', source, dest, '--processes', 1],
    'convert, 2 processes': lambda source, dest: ['-m', 'data_prep.convert', source, dest, '--processes', 2],
}


def main() -> None:
    parser = command('convert', __doc__)
    parser.add_argument('--rows', type=positive_int, default=10_000, help='images (default %(default)s)')
    parser.add_argument('--repeats', type=positive_int, default=1, help='runs of each way, of which the fastest counts (default %(default)s)')
    parser.add_argument('--only', nargs=2, metavar=('SOURCE', 'DEST'), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.only:
        floor(*map(Path, args.only))
        return
    with tempfile.TemporaryDirectory() as temporary:
        crawls = {num_rows: Path(temporary) / f'crawl{num_rows}' for num_rows in (args.rows // 10, args.rows)}
        for num_rows, folder in crawls.items():
            write_crawl(folder, num_rows)
        rows = [measure(way, crawls, Path(temporary), args.repeats) for way in tqdm(WAYS, desc='measure', unit='way')]
    base = rows[0]['images_per_sec']
    for row in rows:
        row['ratio_to_floor'] = row['images_per_sec'] / base
    header = ['', 'images/s', 'of the floor', f'peak MB, {min(crawls):,} rows', f'peak MB, {max(crawls):,} rows', 'start-up s']
    keys = ('way', 'images_per_sec', 'ratio_to_floor', 'peak_mb_tenth', 'peak_mb', 'startup_sec')
    print_table(header, [[row[key] for key in keys] for row in rows])
    print(f'two processes over one: {rows[2]["images_per_sec"] / rows[1]["images_per_sec"]:.2f}')
    record(args.out, rows)


def measure(way: str, crawls: dict[int, Path], temporary: Path, repeats: int) -> dict[str, Any]:
    """Seconds and memory on both sizes; the rate is that of the rows by which they differ."""
    seconds, peak_mb = {}, {}
    for num_rows, source in crawls.items():
        runs = [run_watched(WAYS[way](source, temporary / f'{way}-{num_rows}-{i}')) for i in range(repeats)]
        seconds[num_rows], peak_mb[num_rows] = min(sec for sec, _ in runs), max(peak for _, peak in runs)
    small, large = sorted(crawls)
    rate = (large - small) / (seconds[large] - seconds[small])
    return {
        'benchmark': 'convert',
        'way': way,
        'rows': large,
        'images_per_sec': rate,
        'startup_sec': max(0.0, seconds[small] - small / rate),
        'peak_mb_tenth': peak_mb[small],
        'peak_mb': peak_mb[large],
    }


if __name__ == '__main__':
    main()
