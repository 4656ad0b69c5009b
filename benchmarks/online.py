"""Measure training with encoders on other machines against their number (figure 6 of Anyscale's post, in small), on the CPU.

    python -m benchmarks.online [--figure docs/encoders.png] [--out online.jsonl]       on two quiet cores about 10 minutes

Trains a tiny network on drawn images: encoding in the step, then with 1, 2, 3, ... encoders (`data.encoders.ray.actors`). Each encoder is the
product's own, held to a stated rate by this benchmark alone: it sleeps, as an encoder on another machine takes no core of this one. What training
could do if encoding cost nothing is measured on latents, so that the prediction is min(encoders x rate, that). Then twice two encoders without a
limit, once with pixels on the way and once with the stored JPEGs, with the bytes of an image that each puts into Ray's object store.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from benchmarks.convert import write_crawl
from benchmarks.measured import command, environment, print_table, record
from diffusion.common.arguments import positive_float, positive_int
from diffusion.common.processes import end_with_parent

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RECIPE = Path(__file__).parents[1] / 'yamls/sd2-base-256.yaml'
TRAVEL = {'pixels': 2, 'bytes': 2}  # encoders of the runs that compare what travels


@dataclass(frozen=True)
class TrainingRun:
    """One training.

    Attributes:
        data: `data.kind`.
        actors: encoders; 0: none, the step encodes images itself.
        rate: most images/s of one encoder; None: no limit.
        send: what travels to them.
        resolution: in pixels.
    """

    data: str
    actors: int = 0
    rate: float | None = None
    send: str = 'pixels'
    resolution: int = 64


@dataclass(frozen=True)
class Prepared:
    """What all runs share: folders, the batch and the number of batches."""

    folder: str
    batch: int
    batches: int
    warm_up: int

    def source(self, run: TrainingRun) -> str:
        return f'{self.folder}/{run.data}' if run.data == 'images' else f'{self.folder}/latents-{run.resolution}'

    def overrides(self, run: TrainingRun) -> list[str]:
        """That make a tiny training of the shipped recipe."""
        keys: dict[str, Any] = {
            'model.network': 'tiny',
            'model.encoders.source': f'{self.folder}/encoders',
            'model.encoders.revision': 'null',
            'run_folder': f'{self.folder}/runs/{run.data}-{run.resolution}-{run.actors}-{run.rate}-{run.send}',
            'data.kind': run.data,
            'data.resolution': run.resolution,
            'data.workers': 1 if run.data == 'images' else 0,  # another core than training's
            'data.canonical_nodes': 1,
            'data.streams.train': 'null',
            'data.streams.drawn.local': self.source(run),
            'batch.global_size': self.batch,
            'batch.micro_size': self.batch,
            'optimizer.warmup': '1ba',
            'ema.start': '0ba',
            'train.duration': f'{self.warm_up + self.batches}ba',
            'train.precision': 'fp32',
            'train.compile': 'null',
            'train.cpu_threads': 1,
            'log.every': self.warm_up + self.batches,
            'log.samples.every': 'null',
            'checkpoint.every': f'{self.warm_up + self.batches}ba',
        }
        if run.actors:
            keys |= {f'data.encoders.ray.{name}': value for name, value in {'actors': run.actors, 'gpus': 0, 'ahead': 8, 'send': run.send}.items()}
        return [f'{key}={value}' for key, value in keys.items()]


def train(run: TrainingRun, place: Prepared) -> dict[str, float]:
    """Images/s of this training after its warm-up, and the bytes of an image that went to encoders; in a process of its own."""
    from composer.core import Callback

    from diffusion.online import start
    from diffusion.recipe import load_recipe
    from diffusion.training.builder import build_trainer

    class Clock(Callback):
        def __init__(self) -> None:
            self.times: list[float] = []

        def batch_end(self, state: Any, logger: Any) -> None:
            self.times.append(time.perf_counter())

    class MeteredPool(start.Pool):
        sent_bytes = sent_images = 0

        def send(self, images: Any, num_images: int, training: bool) -> Any:
            contents = getattr(images, 'contents', None)
            MeteredPool.sent_bytes += images.nbytes if contents is None else sum(map(len, contents))
            MeteredPool.sent_images += num_images
            return super().send(images, num_images, training)

    start.Pool = MeteredPool  # type: ignore[misc]
    if run.rate is not None:
        start.ImageEncoder = limited(run.rate)  # type: ignore[assignment, misc]
    clock = Clock()
    trainer = build_trainer(load_recipe(RECIPE, place.overrides(run)))
    trainer.state.callbacks.append(clock)
    trainer.fit()
    trainer.close()
    first, last = clock.times[place.warm_up - 1], clock.times[-1]
    sent = MeteredPool.sent_bytes / MeteredPool.sent_images if MeteredPool.sent_images else 0.0
    return {'images_per_sec': place.batches * place.batch / (last - first), 'sent_bytes_per_image': sent}


def limited(rate: float) -> type:
    """The encoder that the product has, with a sleep after each micro-batch so that it does no more than `rate` images a second."""
    from diffusion.online.encoder import ImageEncoder

    class LimitedEncoder(ImageEncoder):
        next_free = 0.0

        def encode(self, images: Any, training: bool) -> Any:
            begun = max(time.monotonic(), self.next_free)  # as if what it computes took no time of its own
            answer = super().encode(images, training)
            self.next_free = begun + (0 if isinstance(answer, Exception) else len(answer)) / rate
            time.sleep(max(0.0, self.next_free - time.monotonic()))
            return answer

    return LimitedEncoder


def run_apart(run: TrainingRun, place: Prepared) -> dict[str, Any]:
    """`train` in a process, with a Ray cluster of this machine that is told to have a core for each encoder: those of a real one are elsewhere."""
    task = json.dumps([asdict(run), asdict(place)])
    variables = {**os.environ, 'OMP_NUM_THREADS': '1', 'RAY_OVERRIDE_RESOURCES': json.dumps({'CPU': max(1, run.actors)})}
    done = subprocess.run([sys.executable, '-m', 'benchmarks.online', '--train', task], capture_output=True, text=True, check=False, env=variables)
    if done.returncode:
        raise SystemExit(f'{run} failed:\n{done.stderr[-3000:]}')
    return {'benchmark': 'online', 'kind': 'online', **asdict(run), **json.loads(done.stdout.splitlines()[-1])}


def prepare(place: Prepared, num_images: int, resolutions: Sequence[int]) -> None:
    """Images, encoders, and latents of the first resolution."""
    from data_prep.converting.conversion import convert
    from data_prep.encoding.dataset import encode
    from data_prep.shapes import vocabulary
    from diffusion.encoders.random_encoders import write_stand_in
    from diffusion.recipe.schema import EncoderSource

    folder = Path(place.folder)
    write_stand_in(folder / 'encoders', 'tiny', words=vocabulary())
    write_crawl(folder / 'crawl', num_images)
    convert(folder / 'crawl', folder / 'images')
    encode(folder / 'images', folder / f'latents-{resolutions[0]}', [resolutions[0]], EncoderSource(str(folder / 'encoders')))


def figure_of(in_step: float, free: float, rate: float, measured: dict[int, float]) -> Figure:
    """Images/s of training over the number of encoders, with what n x rate and the trainer itself allow."""
    from diffusion.common.pages import LIGHT, new_figure, page_style

    with page_style():
        figure = new_figure(6, 3.6)
        axes = figure.add_subplot()
        counts = sorted(measured)
        axes.axhline(in_step, color=LIGHT['series2'], linestyle=':', label=f'encoding in the step: {in_step:.0f} images/s')
        predicted = [min(count * rate, free) for count in (0, free / rate, max(counts[-1], free / rate))]
        axes.plot([0, free / rate, max(counts[-1], free / rate)], predicted, color=LIGHT['faint'], linestyle='--', label='predicted')
        axes.plot(counts, [measured[count] for count in counts], 'o-', color=LIGHT['series1'], label='measured')
        axes.annotate(
            f'training on latents: {free:.0f} images/s', (counts[-1], free), (0, 4), textcoords='offset points', ha='right', color=LIGHT['faint']
        )
        axes.set_xlim(0, counts[-1] + 0.3)
        axes.set_ylim(0, 1.25 * max(free, *measured.values()))
        axes.set_xticks(range(counts[-1] + 1))
        axes.set_xlabel(f'encoders of {rate:g} images/s each')
        axes.set_ylabel('images/s of training')
        axes.grid(axis='y')
        axes.legend(loc='lower right')
    return figure


def main() -> None:
    parser = command('online', __doc__)
    parser.add_argument(
        '--actors', type=positive_int, nargs='+', default=[1, 2, 3, 4, 5, 6], metavar='N', help='numbers of encoders (default 1 to 6)'
    )
    parser.add_argument('--rate', type=positive_float, help='images/s of one encoder (default: a quarter of what training on latents does)')
    parser.add_argument('--resolution', type=positive_int, default=64, metavar='PX', help='of the curve (default %(default)s)')
    parser.add_argument('--travel-resolution', type=positive_int, default=256, metavar='PX', help='of pixels against bytes (default %(default)s)')
    parser.add_argument('--images', type=positive_int, default=500, help='drawn (default %(default)s)')
    parser.add_argument('--batch', type=positive_int, default=16, help='images of a batch (default %(default)s)')
    parser.add_argument('--batches', type=positive_int, default=40, help='that are timed, after 15 to warm up (default %(default)s)')
    parser.add_argument('--figure', type=Path, metavar='FILE', help='draw the curve to this PNG')
    parser.add_argument('--train', help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.train:
        end_with_parent()
        run, place = json.loads(args.train)
        print(json.dumps(train(TrainingRun(**run), Prepared(**place))))
        return
    with tempfile.TemporaryDirectory() as temporary:
        place = Prepared(temporary, args.batch, args.batches, warm_up=15)
        prepare(place, args.images, [args.resolution])
        px = args.resolution
        free = run_apart(TrainingRun('latents', resolution=px), place)
        rate = args.rate or free['images_per_sec'] / 4
        runs = [TrainingRun('images', resolution=px), *(TrainingRun('images', count, rate, resolution=px) for count in args.actors)]
        runs += [TrainingRun('images', count, None, send, args.travel_resolution) for send, count in TRAVEL.items()]
        rows = [run_apart(run, place) for run in tqdm(runs, desc='measure', unit='run')]
    in_step, curve, travel = rows[0], rows[1 : 1 + len(args.actors)], rows[1 + len(args.actors) :]
    for row in curve:
        row['predicted_images_per_sec'] = min(row['actors'] * rate, free['images_per_sec'])
        row['ratio_to_predicted'] = row['images_per_sec'] / row['predicted_images_per_sec']
    print_table(
        ['', 'images/s', 'predicted', 'ratio'],
        [['training on latents', free['images_per_sec'], None, None], ['encoding in the step', in_step['images_per_sec'], None, None]]
        + [[f'{row["actors"]} encoders', row['images_per_sec'], row['predicted_images_per_sec'], row['ratio_to_predicted']] for row in curve],
    )
    print()
    print_table(
        [f'{TRAVEL["pixels"]} encoders, {args.travel_resolution} px', 'images/s', 'bytes of an image'],
        [[row['send'], row['images_per_sec'], row['sent_bytes_per_image']] for row in travel],
    )
    if args.figure:
        from diffusion.common.pages import png

        measured = {row['actors']: row['images_per_sec'] for row in curve}
        args.figure.parent.mkdir(parents=True, exist_ok=True)
        args.figure.write_bytes(png(figure_of(in_step['images_per_sec'], free['images_per_sec'], rate, measured)))
    record(args.out, [free, *rows], {**environment(), 'omp_num_threads': '1'})


if __name__ == '__main__':
    main()
