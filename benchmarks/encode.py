"""Measure data_prep.encode by engine: processes of this host, Ray actors that decode themselves, Ray actors fed by decoding tasks.

    python -m benchmarks.encode [--images 2560] [--out encode.jsonl]     on two quiet cores about 7 minutes
    python -m benchmarks.encode --memory --resolution 64                 peak memory for 1,000 and for 10,000 images: 5 minutes

Draws JPEGs of about 512 x 384 px into MDS shards of 128 and encodes them by the command itself, each engine in a process of its own; a Ray cluster is
made and ended by that process. Of each run: seconds to the first committed part, images/s between the first quarter of the parts and the last tenth
(when all workers are at work), and the rest of the time, which is the fixed cost of a job. Memory is the peak of all processes together (shared
memory counts once), looked at often with --memory only, because looking takes a core from what is measured; and what of Ray's object store has ever
been in use. The stages, one after another in one process, say what limits.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from tqdm import tqdm

from benchmarks.convert import write_crawl
from benchmarks.measured import command, environment_apart, print_table, record, run_watched
from diffusion.common.arguments import positive_int
from diffusion.encoders.sizes import KINDS

IMAGES_PER_PART = 128
MIN_PARTS = 8
SHARD_BYTES = IMAGES_PER_PART * 52_000  # of JPEGs as benchmarks.convert draws them
MEMORY_IMAGES = (1000, 10_000)
RATE_POLL_SEC, MEMORY_POLL_SEC = 2.0, 0.2  # to look at ten processes takes 50 ms of a core
TARGETS = {'actors': 1.5, 'streamed': 0.85}  # of the local engine's images/s: with two actors, with one that tasks feed
BATCH = 16
PARTS = 'parts'


@dataclass(frozen=True)
class EngineSetup:
    """How to encode.

    Attributes:
        name: for the table.
        engine: as `--engine` has it.
        num_encoders: VAEs at work.
        decoders: tasks that decode for them; 0: they do so themselves.
    """

    name: str
    engine: str
    num_encoders: int
    decoders: int = 0

    @property
    def arguments(self) -> list[object]:
        if self.engine == 'local':
            return ['--processes', 1]  # one decodes, the command's own process encodes
        return ['--engine', 'ray', '--ray-actors', self.num_encoders, *(['--ray-decoders', self.decoders] if self.decoders else [])]


def ways_of(actors: int) -> dict[str, EngineSetup]:
    return {
        'local': EngineSetup('local: 1 decodes, 1 encodes', 'local', 1),
        'actors': EngineSetup(f'ray: {actors} actors that decode and encode', 'ray', actors),
        'streamed': EngineSetup('ray: 1 actor, pixels from 1 task', 'ray', 1, decoders=1),
    }


def draw(folder: Path, num_images: int) -> Path:
    """An image MDS in parts of IMAGES_PER_PART."""
    from data_prep.converting.conversion import Options, convert

    write_crawl(folder / f'crawl-{num_images}', num_images)
    convert(folder / f'crawl-{num_images}', folder / f'images-{num_images}', Options(shard_bytes=SHARD_BYTES))
    return folder / f'images-{num_images}'


def write_encoders(folder: Path, kind: str) -> str:
    """Where the encoders are: random ones of a size that diffusion.stand_in knows, or those that the user has."""
    if kind not in KINDS:
        return kind
    from data_prep.shapes import vocabulary
    from diffusion.encoders.random_encoders import write_stand_in

    write_stand_in(folder / 'encoders', kind, words=vocabulary())
    return str(folder / 'encoders')


@dataclass(frozen=True)
class Commits:
    """When the parts of a dataset were committed (seconds since the epoch, ascending), and the images of each."""

    times: Sequence[float]
    images: Sequence[int]

    @classmethod
    def of(cls, dest: Path) -> Commits:
        markers = sorted((dest / PARTS).glob('*.json'), key=lambda path: path.stat().st_mtime)
        tallies = [json.loads(path.read_text())['tally'] for path in markers]
        return cls([path.stat().st_mtime for path in markers], [sum(tally['kept_in'].values()) for tally in tallies])

    @property
    def images_per_sec(self) -> float:
        """Between the first quarter and the last tenth of the parts: all workers have begun, and none has run out of work."""
        begin, end = len(self.times) // 4, len(self.times) - 1 - len(self.times) // 10
        if len(self.times) < MIN_PARTS:
            raise SystemExit(f'{len(self.times)} parts are too few to measure a rate ({MIN_PARTS} at least); give more --images')
        return sum(self.images[begin + 1 : end + 1]) / (self.times[end] - self.times[begin])


class ObjectStore:
    """The most memory of Ray's object store that was ever in use, in bytes: its pages are made at their first use and stay."""

    def __init__(self) -> None:
        self.peak_bytes = 0

    def look(self, process: psutil.Process) -> None:
        if process.name() == 'raylet':
            files = [file for file in Path(f'/proc/{process.pid}/fd').iterdir() if '/plasma' in os.readlink(file)]  # deleted, and still open
            self.peak_bytes = max(self.peak_bytes, sum(512 * file.stat().st_blocks for file in files))


def measure(way: EngineSetup, source: Path, dest: Path, encoders: str, resolution: int, batch: int, poll_sec: float) -> dict[str, Any]:
    store, begun = ObjectStore(), time.time()
    seconds, peak_mb = run_watched(
        ['-m', 'data_prep.encode', source, dest, '--resolution', resolution, '--encoders', encoders, '--batch-size', batch, *way.arguments],
        poll_sec,
        look=store.look,
    )
    commits = Commits.of(dest)
    num_images, rate = sum(commits.images), commits.images_per_sec
    return {
        'benchmark': 'encode',
        'kind': 'encode',
        'way': way.name,
        'engine': way.engine,
        'num_encoders': way.num_encoders,
        'num_decoders': way.decoders,
        'resolution': resolution,
        'with_text': False,
        'batch': batch,
        'images': num_images,
        'parts': len(commits.times),
        'images_per_sec': rate,
        'first_part_sec': commits.times[0] - begun,
        'fixed_sec': max(0.0, seconds - num_images / rate),
        'seconds': seconds,
        'peak_mb': peak_mb,
        'object_store_mb': store.peak_bytes / 1e6,
    }


def stages(source: Path, dest: Path, encoders: str, resolution: int, batch: int) -> dict[str, float]:
    """Images/s of each stage by itself: reading with decoding and resizing, encoding, writing. It is the command's own work, one part at a time."""
    from data_prep.encoding.dataset import EncodeWork, encode
    from data_prep.engines.batches import ImageBatch, PartsWriting
    from data_prep.engines.engine import Engine
    from diffusion.recipe.schema import EncoderSource

    spent = {'decode': 0.0, 'encode': 0.0, 'write': 0.0}
    num_images = 0

    class OneStageAfterAnother(Engine):
        def map(self, work: Any, items: Sequence[Any]) -> Iterator[Any]:
            nonlocal num_images
            assert isinstance(work, EncodeWork)
            _ = work.encoders.vae.module  # read before the clock starts
            for shard in items:
                begun = time.perf_counter()
                messages = list(work.messages(shard))
                decoded = time.perf_counter()
                batches, end = [message for message in messages if isinstance(message, ImageBatch)], messages[-1]
                encoded = [work.encoders.encode(batch)[0].cpu() for batch in batches]  # without .cpu() a GPU would not be done
                done = time.perf_counter()
                with PartsWriting(work) as writing:
                    for batch, moments in zip(batches, encoded, strict=True):
                        writing.submit(shard, work.write, batch, moments, {})
                    writing.submit(shard, writing.end, end)
                    writing.finish()
                    yield from writing.committed()
                written = time.perf_counter()
                for stage, seconds in zip(spent, (decoded - begun, done - decoded, written - done), strict=True):
                    spent[stage] += seconds
                num_images += shard.num_samples

    encode(source, dest, [resolution], EncoderSource(encoders), batch_size=batch, engine=OneStageAfterAnother())
    return {stage: num_images / seconds for stage, seconds in spent.items()}


def main() -> None:
    parser = command('encode', __doc__)
    parser.add_argument('--images', type=positive_int, default=2560, help='drawn and encoded (default %(default)s)')
    parser.add_argument('--memory', action='store_true', help=f'encode {MEMORY_IMAGES[0]:,} and {MEMORY_IMAGES[1]:,} images and compare the peaks')
    parser.add_argument('--resolution', type=positive_int, default=256, metavar='PX', help='encoded squares (default %(default)s)')
    parser.add_argument(
        '--encoders', default='tiny', metavar='WHERE', help=f'random ones like {", ".join(KINDS)} (default %(default)s), or a folder or Hub id'
    )
    parser.add_argument('--batch-size', type=positive_int, default=BATCH, help='as data_prep.encode has it (default %(default)s)')
    parser.add_argument('--actors', type=positive_int, default=2, help='that decode and encode (default %(default)s)')
    parser.add_argument('--only', nargs='+', choices=list(ways_of(2)), default=list(ways_of(2)), help='ways to measure (default: all)')
    parser.add_argument('--rounds', type=positive_int, default=1, help='of all ways in turn, of which the fastest counts (default %(default)s)')
    parser.add_argument('--stages', nargs=3, metavar=('SOURCE', 'DEST', 'JSON'), type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.stages:
        source, dest, out = args.stages
        out.write_text(json.dumps(stages(source, dest, args.encoders, args.resolution, args.batch_size)))
        return
    machine = environment_apart()
    device = machine['gpu'] or machine['cpu']
    ways = {name: way for name, way in ways_of(args.actors).items() if name in args.only}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        encoders = write_encoders(folder, args.encoders)
        what = (encoders, args.resolution, args.batch_size, MEMORY_POLL_SEC if args.memory else RATE_POLL_SEC)
        sources = {num_images: draw(folder, num_images) for num_images in (MEMORY_IMAGES if args.memory else (args.images,))}
        best: dict[tuple[str, int], dict[str, Any]] = {}
        turns = [(name, number, i) for i in range(args.rounds) for number in sources for name in ways]
        for name, number, i in tqdm(turns, desc='measure', unit='run'):
            row = measure(ways[name], sources[number], folder / f'{name}-{number}-{i}', *what)
            row |= {'device': device, 'encoders': args.encoders}
            if (name, number) not in best or row['images_per_sec'] > best[name, number]['images_per_sec']:
                best[name, number] = row
        largest = sources[max(sources)]
        options = ['--encoders', encoders, '--resolution', args.resolution, '--batch-size', args.batch_size]
        run_watched(['-m', 'benchmarks.encode', '--stages', largest, folder / 'stages', folder / 'stages.json', *options])
        by_stage = json.loads((folder / 'stages.json').read_text())
    show(best, by_stage)
    stage_rows = [
        {'benchmark': 'encode', 'kind': 'encode-stage', 'stage': stage, 'device': device, 'encoders': args.encoders}
        | {'resolution': args.resolution, 'images_per_sec': rate}
        for stage, rate in by_stage.items()
    ]
    record(args.out, [*best.values(), *stage_rows], machine)


def show(best: dict[tuple[str, int], dict[str, Any]], by_stage: dict[str, float]) -> None:
    """Print the tables, and how far the targets are met."""
    rates = {name: row['images_per_sec'] for (name, _), row in best.items()}  # of the most images
    local = rates.get('local')
    header = ['', 'images', 'images/s', 'of local', 'first part s', 'fixed s', 'peak MB', 'object store MB']
    keys = ('way', 'images', 'images_per_sec', 'of_local', 'first_part_sec', 'fixed_sec', 'peak_mb', 'object_store_mb')
    for row in best.values():
        row['of_local'] = row['images_per_sec'] / local if local else None
    print_table(header, [[row[key] for key in keys] for row in best.values()])
    print()
    print_table(['stage, in one process', 'images/s'], [[stage, rate] for stage, rate in by_stage.items()])
    for name, target in TARGETS.items():
        if local and name in rates:
            print(f'{name}: {rates[name] / local:.2f} of local (target {target}: {"met" if rates[name] >= target * local else "missed"})')


if __name__ == '__main__':
    main()
