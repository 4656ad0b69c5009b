"""A run folder as the benchmark sees it: whether the recipe is the benchmark's, when each checkpoint was there, and what it scored.

Rules: training_rules.adoc of mlcommons/training_policies 87a1364, "Benchmark specific rules for deprecated benchmarks", Stable Diffusion: a
checkpoint every CEIL(512000 / batch) batches; scored afterwards, off the clock, in any order; the run has converged at the first that passes, and
that one and the one before it have to be scored. Nothing here imports torch.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from diffusion.common.files import parse_json_object
from diffusion.common.stopwatch import EVENTS
from diffusion.contracts.errors import InputError
from diffusion.evaluation.job.results import RESULT_NAME, read_evaluation
from diffusion.monitoring.time_accounts import read_events
from diffusion.recipe import Recipe, changed_fields, load_recipe, recipe_from_yaml, to_dict
from diffusion.recipe.schema import present

RECIPE = Path(__file__).with_name('stable-diffusion.yaml')
PRESET = 'mlperf'  # of diffusion.evaluate
FID, CLIP = 'fid', 'clip@openclip-vit-h14'
TARGETS = {'FID': 90.0, 'CLIP': 0.15}  # at most, at least
CHECKPOINT_SAMPLES = 512_000

# Keys that the rules leave free, or that do not change what is computed: the table of hyperparameters has the first three as unconstrained.
FREE = {
    'batch.global_size',
    'optimizer.lr',
    'optimizer.warmup',
    'seed',
    'train.precision',  # bf16 and fp32 are pre-approved numerical formats
    'data.streams',  # named by their owner; that it is one is checked
    'data.shuffle_block_size',  # random order, whatever its generator
    'data.canonical_nodes',
    'model.encoders.source',  # a folder or a Hub id of the same encoders
    'model.encoders.revision',
}


class CheckpointScore(NamedTuple):
    """Of a checkpoint: FID, and the mean cosine of image and caption."""

    fid: float
    clip: float
    images: int

    @property
    def passes(self) -> bool:
        return self.fid <= TARGETS['FID'] and self.clip >= TARGETS['CLIP']


@dataclass(frozen=True)
class Times:
    """When things happened, in Unix seconds by the clock of the first rank's machine.

    Attributes:
        began: start of the first process of the run.
        saved: end of the save of each checkpoint, by its batch; the last one if a rollback or a lost disk made it twice.
        ended: last sign of life.
        starts: processes of the first rank.
    """

    began: float
    saved: Mapping[int, float]
    ended: float
    starts: int


@dataclass(frozen=True)
class BenchmarkRun:
    """A run with its record.

    Attributes:
        environment: content of environment.json.
        scores: by batch.
    """

    folder: Path
    recipe: Recipe
    environment: Mapping[str, Any]
    times: Times
    scores: Mapping[int, CheckpointScore]

    @property
    def grid(self) -> range:
        """Batches of the checkpoints that count: up to the first that is known to pass, else up to the last one saved."""
        step = interval(self.recipe)
        return range(step, (self.passed or max(self.times.saved, default=0)) + 1, step)

    @property
    def passed(self) -> int | None:
        """Batch of the first checkpoint that is known to pass; None: none."""
        return min((batch for batch, score in self.scores.items() if score.passes), default=None)

    def samples(self, batch: int) -> int:
        return batch * self.recipe.batch.global_size

    @property
    def samples_to_target(self) -> float:
        return math.inf if self.passed is None else self.samples(self.passed)

    @property
    def minutes_to_target(self) -> float:
        """Wall time from the start of the first process to the passing checkpoint; restarts and what ran in between are in it."""
        return math.inf if self.passed is None else (self.times.saved[self.passed] - self.times.began) / 60


def interval_of(batch: int) -> int:
    """Batches between checkpoints at a global batch."""
    return -(-CHECKPOINT_SAMPLES // batch)


def interval(recipe: Recipe) -> int:
    """Batches between the checkpoints that count: what `differences` asks for, in a rehearsal the recipe's own."""
    every = recipe.checkpoint.every
    return every.value if every.unit == 'ba' else interval_of(recipe.batch.global_size)


def read_run(folder: Path, rehearsal: bool = False) -> BenchmarkRun:
    """Read the folder of a run, finished or not.

    Args:
        rehearsal: take any recipe, to try the mode out.

    Raises:
        InputError: no run of the benchmark, or checkpoints or scores that the rules ask for are missing.
        RunError: its events.jsonl is damaged.
    """
    try:
        recipe = recipe_from_yaml((folder / 'recipe.yaml').read_text(), str(folder / 'recipe.yaml'))
        environment = parse_json_object((folder / 'environment.json').read_text())
    except (OSError, ValueError) as error:
        raise InputError(f'{folder}: cannot be read as a run folder: {error}; name the run_folder of a run') from error
    errors = [] if rehearsal else differences(recipe)
    if errors:
        raise InputError(
            '\n  - '.join([f'{folder}: differs from the benchmark (its value -> what is asked for); train again, or name --rehearsal', *errors])
        )
    times = read_times(read_events(folder / EVENTS), str(folder))
    run = BenchmarkRun(folder, recipe, environment, times, read_scores(folder / 'evaluations', interval(recipe)))
    missing = missing_scores(run)
    if missing:
        unsure = f'{folder}: its record does not say where it converged; evaluations of other protocols and of checkpoints in between do not count'
        raise InputError('\n  - '.join([unsure, *missing]))
    return run


def differences(recipe: Recipe) -> list[str]:
    """List what a resolved recipe does otherwise than the benchmark allows, with the value that it asks for."""
    changed = [line for line in changed_fields(to_dict(recipe), _benchmark()) if line.partition(':')[0] not in FREE]
    errors = [line for line in changed if not line.startswith('data.streams.')]
    streams = list(present(recipe.data.streams).values())
    if len(streams) != 1 or streams[0].loss_weight != 1:
        errors.append(f'data.streams: {len(streams)} streams; the benchmark trains on one, with a loss_weight of 1')
    if recipe.load_path is not None:
        errors.append(f'load_path: {recipe.load_path} -> None: the benchmark starts from random weights')
    wanted = interval_of(recipe.batch.global_size)
    if str(recipe.checkpoint.every) != f'{wanted}ba':
        errors.append(f'checkpoint.every: {recipe.checkpoint.every} -> {wanted}ba: CEIL({CHECKPOINT_SAMPLES} / {recipe.batch.global_size}) batches')
    return errors


@cache
def _benchmark() -> dict[str, Any]:
    return to_dict(load_recipe(RECIPE, ['data.streams.train.local=.']))


def read_times(events: Iterable[Mapping[str, Any]], where: str) -> Times:
    """Read the lines of an events.jsonl.

    A checkpoint was there when the line that first says so was written: its own, or, of a process that was killed in between, the first line
    with a batch of the process that resumed from it, which is later and so never flatters.

    Raises:
        InputError: there is no line.
    """
    began: float | None = None
    ended, known, processes, saved = 0.0, 0, set[str](), dict[int, float]()
    for line in events:
        if began is None:
            began = line['time'] - sum(line['sec'].values())
        ended = max(ended, line['time'])
        processes.add(line['process'])
        batch = line.get('saved')
        if batch and batch != known:
            if batch > known or batch not in saved:  # else the run went back to it
                saved[batch] = line['time']
            known = batch
    if began is None:
        raise InputError(f'{where}/{EVENTS}: holds no line; name the folder of a run that has started')
    return Times(began, saved, ended, len(processes))


def read_scores(folder: Path, step: int) -> dict[int, CheckpointScore]:
    """Scores by batch of the evaluations in a folder that are by the benchmark's protocol and of every `step`th batch.

    Raises:
        InputError: two are of the same checkpoint, or their protocols differ in what the preset leaves open.
    """
    scores, digests = dict[int, CheckpointScore](), dict[str, Path]()
    for path in sorted(folder.glob(f'*/{RESULT_NAME}')):
        evaluation = read_evaluation(path.parent)
        batches = evaluation['model']['batches']
        if evaluation['protocol']['preset'] != PRESET or not batches or batches % step:
            continue
        if batches in scores:
            raise InputError(f'{path}: is the second evaluation of batch {batches:,}; keep one')
        digests.setdefault(evaluation['digest'], path)
        (score,) = evaluation['scores']  # the preset has one guidance scale
        scores[batches] = CheckpointScore(score['metrics'][FID]['value'], score['metrics'][CLIP]['value'] / 100, score['count'])
    if len(digests) > 1:
        first, second, *_ = digests.values()
        raise InputError(f'{second}: has another protocol than {first} (prompts, statistics, seed or weights differ); evaluate all alike')
    return scores


def missing_scores(run: BenchmarkRun) -> list[str]:
    """List what the rules need to know of a run and its record does not say; each with what to do."""
    grid, step = run.grid, run.grid.step
    errors = [f'batch {batch:,} has no checkpoint; the rules ask for each {step:,}th' for batch in grid if batch not in run.times.saved]
    if run.passed is not None and run.passed > step and run.passed - step not in run.scores:
        errors.append(f'batch {run.passed - step:,}, the checkpoint before the one that passes, is not scored: {command(run, run.passed - step)}')
    if run.passed is None and grid and grid[-1] not in run.scores:
        errors.append(f'no checkpoint is known to pass, and the last one is not scored: {command(run, grid[-1])}')
    return errors


def command(run: BenchmarkRun, batch: int) -> str:
    """The command that scores a checkpoint."""
    return (
        f'python -m diffusion.evaluate {run.recipe.checkpoint.folder}/ba{batch:08d}.pt --protocol {PRESET} --data val2014_30k_stats.npz '
        f'--prompts prompts.txt --out {run.folder}/evaluations/ba{batch:08d}'
    )
