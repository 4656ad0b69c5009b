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
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from PIL import Image
from tqdm import tqdm

from benchmarks.measured import command, print_table, record
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
    """Write `num_rows` captioned images in img2dataset's webdataset layout."""
    import pyarrow as pa  # after the arguments are read
    import pyarrow.parquet as pq

    jpegs = [draw_jpeg(seed) for seed in range(200)]  # drawn once; what follows the end of a JPEG makes each file another
    folder.mkdir(parents=True)
    for shard, start in enumerate(tqdm(range(0, num_rows, ROWS_PER_SHARD), desc='draw', unit='shard')):
        rows = []
        with tarfile.open(folder / f'{shard:05d}.tar', 'w') as tar:
            for i in range(start, min(start + ROWS_PER_SHARD, num_rows)):
                key, caption, jpeg = f'{shard:05d}{i - start:04d}', f'image {i}', jpegs[i % len(jpegs)] + i.to_bytes(8, 'little')
                row = {'key': key, 'url': f'https://example.org/{key}.jpg', 'caption': caption, 'status': 'success', 'error_message': None}
                for suffix, content in (('jpg', jpeg), ('txt', caption.encode()), ('json', json.dumps(row).encode())):
                    entry = tarfile.TarInfo(f'{key}.{suffix}')
                    entry.size = len(content)
                    tar.addfile(entry, io.BytesIO(content))
                rows.append(row)
        pq.write_table(pa.Table.from_pylist(rows), folder / f'{shard:05d}.parquet')


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


def run_watched(arguments: list[object]) -> tuple[float, float]:
    """Run `python ARGUMENTS` and return its seconds and the peak memory in MB of it and all its descendants together.

    Memory is the proportional set size: what several processes share counts once.

    Raises:
        SystemExit: it failed.
    """
    start, peak_bytes = time.perf_counter(), 0
    words, environment = [sys.executable, *map(str, arguments)], {**os.environ, 'OMP_NUM_THREADS': '1'}
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment) as process:
        watched = psutil.Process(process.pid)
        while True:
            try:
                _, errors = process.communicate(timeout=0.1)
                break
            except subprocess.TimeoutExpired:
                with suppress(psutil.Error, FileNotFoundError, ProcessLookupError):  # one of them has just ended
                    peak_bytes = max(peak_bytes, sum(one.memory_full_info().pss for one in [watched, *watched.children(recursive=True)]))
    if process.returncode:
        raise SystemExit(f'{" ".join(words[1:])} failed:\n{errors[-3000:]}')
    return time.perf_counter() - start, peak_bytes / 1e6


WAYS: dict[str, Callable[[Path, Path], list[object]]] = {
    'floor': lambda source, dest: ['-m', 'benchmarks.convert', '--only', source, dest],
    'convert, 1 process': lambda source, dest: ['-m', 'data_prep.convert', source, dest, '--processes', 1],
    'convert, 2 processes': lambda source, dest: ['-m', 'data_prep.convert', source, dest, '--processes', 2],
}


def main() -> None:
    parser = command('convert', __doc__)
    parser.add_argument('--rows', type=positive_int, default=10_000, help='images (default %(default)s)')
    parser.add_argument('--only', nargs=2, metavar=('SOURCE', 'DEST'), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.only:
        floor(*map(Path, args.only))
        return
    with tempfile.TemporaryDirectory() as temporary:
        crawls = {num_rows: Path(temporary) / f'crawl{num_rows}' for num_rows in (args.rows // 10, args.rows)}
        for num_rows, folder in crawls.items():
            write_crawl(folder, num_rows)
        rows = [measure(way, crawls, Path(temporary)) for way in tqdm(WAYS, desc='measure', unit='way')]
    base = rows[0]['images_per_sec']
    for row in rows:
        row['ratio_to_floor'] = row['images_per_sec'] / base
    header = ['', 'images/s', 'of the floor', f'peak MB, {min(crawls):,} rows', f'peak MB, {max(crawls):,} rows', 'start-up s']
    keys = ('way', 'images_per_sec', 'ratio_to_floor', 'peak_mb_tenth', 'peak_mb', 'startup_sec')
    print_table(header, [[row[key] for key in keys] for row in rows])
    print(f'two processes over one: {rows[2]["images_per_sec"] / rows[1]["images_per_sec"]:.2f}')
    record(args.out, rows)


def measure(way: str, crawls: dict[int, Path], temporary: Path) -> dict[str, Any]:
    """Seconds and memory on both sizes; the rate is that of the rows by which they differ."""
    seconds, peak_mb = {}, {}
    for num_rows, source in crawls.items():
        seconds[num_rows], peak_mb[num_rows] = run_watched(WAYS[way](source, temporary / f'{way}-{num_rows}'))
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
