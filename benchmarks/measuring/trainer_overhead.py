"""A bare loop, our Trainer and stock composer.Trainer take the same steps in turns."""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import composer
from composer.core import Callback, State
from composer.loggers import Logger
from tqdm import tqdm

from benchmarks.ablation import build_step, possible, recipe_of
from benchmarks.host_syncs import HostSyncs
from benchmarks.levers import ladder
from benchmarks.measured import print_table, record
from benchmarks.timing import Timing, device, free_memory, synchronize
from diffusion.cost.hardware import device_name
from diffusion.encoders.random_encoders import write_stand_in
from diffusion.recipe import Recipe
from diffusion.training import builder as training

SKIPPED_STEPS = 2  # of a segment: the loader fills its queues
TARGET_STEP_SEC = 0.5  # of which the overhead should be 3 % at most


def clocks() -> tuple[float, float]:
    """Seconds that have passed, and those that a processor spent on this thread: what others do on the machine adds to the first alone."""
    synchronize()
    return time.perf_counter(), time.thread_time()


class Stopwatch(Callback):
    """Mean seconds of a segment's steps, after the first few, by both clocks."""

    def __init__(self, steps: int):
        self.steps, self.seen = steps, 0

    def batch_end(self, state: State, logger: Logger) -> None:
        self.seen += 1
        if self.seen == SKIPPED_STEPS:
            self.start = clocks()
        if self.seen == SKIPPED_STEPS + self.steps:
            self.step_sec = since(self.start, self.steps)
            self.seen = 0


def since(start: tuple[float, float], steps: int) -> tuple[float, float]:
    """Mean of so many steps, by both clocks."""
    now = clocks()
    return (now[0] - start[0]) / steps, (now[1] - start[1]) / steps


class SyncsByStep(Callback):
    """Host synchronisations before each step, and thus in each from its start to the next one's."""

    def __init__(self, syncs: HostSyncs):
        self.syncs = syncs
        self.counts: list[int] = []

    def batch_start(self, state: State, logger: Logger) -> None:
        self.counts.append(self.syncs.count)


def stock_trainer(log_every: int, left_out: object, **arguments: Any) -> composer.Trainer:
    """Composer's own Trainer with the arguments of ours."""
    return composer.Trainer(**arguments)


BARE = 'bare loop'
TRAINERS: dict[str, Callable[..., composer.Trainer]] = {'our Trainer': training.Trainer, 'composer.Trainer': stock_trainer}
EVERYTHING = possible(list(ladder().values())[-1], device(), may_compile=device().type == 'cuda')


def segments_of(recipe: Recipe, trainer_class: Callable[..., composer.Trainer], steps: int) -> Callable[[], tuple[float, float]]:
    """A function that trains for a segment and returns the mean seconds of its timed steps, by both clocks."""
    with mock.patch.object(training, 'Trainer', trainer_class):
        trainer = training.build_trainer(recipe)
    watch = Stopwatch(steps)
    trainer.state.callbacks.append(watch)

    def segment() -> tuple[float, float]:
        trainer.fit(duration=f'{SKIPPED_STEPS + steps}ba')
        return watch.step_sec

    return segment


def bare_segments(step: Callable[[], None], steps: int) -> Callable[[], tuple[float, float]]:
    """The same for a loop around a function."""

    def segment() -> tuple[float, float]:
        for _ in range(SKIPPED_STEPS):
            step()
        start = clocks()
        for _ in range(steps):
            step()
        return since(start, steps)

    return segment


def syncs_per_step(recipe: Recipe, trainer_class: Callable[..., composer.Trainer]) -> tuple[float, float]:
    """Host synchronisations of a step between two log records, and of one that logs: means over a short run of `recipe`."""
    with mock.patch.object(training, 'Trainer', trainer_class):
        trainer = training.build_trainer(recipe)
    with HostSyncs() as syncs:
        watch = SyncsByStep(syncs)
        trainer.state.callbacks.insert(0, watch)  # before those that log at a batch's start
        trainer.fit()
    trainer.close()
    of_step = {number: after - before for number, (before, after) in enumerate(itertools.pairwise(watch.counts), start=1)}
    logging = [count for number, count in of_step.items() if number % recipe.log.every == 0]
    between = [count for number, count in of_step.items() if number % recipe.log.every != 0]
    return statistics.mean(between), statistics.mean(logging)


def recipe_at(folder: Path, name: str, setting: dict[str, Any], workers: int, samples: int, **more: Any) -> Recipe:
    """The last row of the ablation, run in a folder of its own; an epoch has `samples`."""
    overrides = {
        'run_folder': folder / name.replace(' ', '-'),
        'data.workers': workers,
        'data.synthetic_samples': samples,
        'optimizer.warmup': '1ba',
        'ema.start': '0ba',
        'checkpoint.every': '1000000ba',
        'log.samples.every': 'null',
    }
    return recipe_of(EVERYTHING, encoders=folder / 'encoders', device=device(), **setting, **{**overrides, **more})


def measure(folder: Path, setting: dict[str, Any], workers: int, steps: int, rounds: int) -> list[dict[str, Any]]:
    """A row for each way."""
    samples = (SKIPPED_STEPS + steps) * setting['micro_batch']  # a segment is an epoch
    counting = {'train.compile': 'null', 'train.duration': '12ba', 'log.every': 5}
    syncs = {}
    for name, trainer_class in TRAINERS.items():
        recipe = recipe_at(folder, f'syncs of {name}', setting, workers, 12 * setting['micro_batch'], **counting)
        syncs[name] = syncs_per_step(recipe, trainer_class)
    free_memory()
    _, _, step = build_step(EVERYTHING, recipe_at(folder, BARE, setting, workers, samples), device())
    ways = {BARE: bare_segments(step, steps)}
    for name, trainer_class in TRAINERS.items():
        ways[name] = segments_of(recipe_at(folder, name, setting, workers, samples), trainer_class, steps)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    host_sec: dict[str, list[float]] = {name: [] for name in ways}
    for _ in tqdm(range(rounds), desc='rounds'):
        for name, segment in ways.items():
            for clock, value in zip((seconds, host_sec), segment(), strict=True):
                clock[name].append(value)
    rows = []
    for name, values in seconds.items():
        overhead_sec = statistics.median(way - bare for way, bare in zip(values, seconds[BARE], strict=True))
        timing = Timing.of(values, rounds * steps)
        between, logging = syncs.get(name, (None, None))
        row = {'benchmark': 'trainer_overhead', 'way': name, **setting, 'workers': workers, 'num_gpus': int(device().type == 'cuda')}
        row |= {**asdict(timing), 'overhead_sec': overhead_sec, 'fastest_overhead_sec': min(values) - min(seconds[BARE])}
        row |= {'host_overhead_sec': statistics.median(host_sec[name]) - statistics.median(host_sec[BARE])}
        row |= {'overhead_share': overhead_sec / timing.median_sec, 'overhead_share_of_500_ms': overhead_sec / TARGET_STEP_SEC}
        rows.append({**row, 'host_syncs_per_step': between, 'host_syncs_per_logging_step': logging})
    return rows


def run(args: argparse.Namespace) -> None:
    """Measure, print a table and record its rows."""
    setting = {'unet': args.unet, 'resolution': args.resolution, 'kind': 'latents', 'micro_batch': args.micro_batch}
    with tempfile.TemporaryDirectory() as temporary:
        write_stand_in(Path(temporary) / 'encoders', args.unet)
        rows = measure(Path(temporary), setting, args.workers, args.steps, args.rounds)
    print(f'{args.unet}, {args.resolution} px, micro-batch {args.micro_batch}, {args.workers} loader processes, {device_name()}')
    lines = [
        [
            row['way'],
            row['median_sec'] * 1e3,
            f'{row["spread"]:.0%}',
            row['overhead_sec'] * 1e3,
            row['fastest_overhead_sec'] * 1e3,
            row['host_overhead_sec'] * 1e3,
            f'{row["overhead_share"]:.1%}',
            f'{row["overhead_share_of_500_ms"]:.1%}',
            row['host_syncs_per_step'],
            row['host_syncs_per_logging_step'],
        ]
        for row in rows
    ]
    header = [
        '',
        'ms a step',
        'spread',
        'overhead ms',
        'of the fastest',
        'of the host',
        'of the step',
        'of 0.5 s',
        'host syncs a step',
        'when logging',
    ]
    print_table(header, lines)
    record(args.out, rows)
