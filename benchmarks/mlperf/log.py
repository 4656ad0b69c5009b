"""The record of a run as MLPerf's log lines, which mlperf_logging's checkers read: `:::MLLOG {"key": "run_start", ...}`.

Format: mlperf_logging/mllog/mllog.py; keys that a log must have: compliance_checker/training_5.0.0 (mlcommons/logging 7bbf792). The lines are written
after the run, from its own record, with the times of that record.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from benchmarks.mlperf.runs import BenchmarkRun
from diffusion.contracts.errors import InputError, ManifestError
from diffusion.contracts.manifest import Manifest
from diffusion.recipe.schema import present

BENCHMARK = 'stable_diffusion'
EVAL_SAMPLES = 30_000
POINT, START, END = 'POINT_IN_TIME', 'INTERVAL_START', 'INTERVAL_END'


@dataclass(frozen=True)
class Submission:
    """What a log says of who made it, and the record of a run does not.

    Attributes:
        division: `closed` asks for the reference's arithmetic, which this project does not have to the letter (benchmarks/mlperf.md).
        cache_cleared: whether caches of the system were cleared before the run.
    """

    division: Literal['open', 'closed'] = 'open'
    org: str = ''
    cache_cleared: bool = False


def log_lines(run: BenchmarkRun, submission: Submission) -> list[str]:
    """Return the lines of a run's log in the order of their times.

    Raises:
        InputError: the number of training samples cannot be read from the dataset.
    """
    events = [*_described(run, submission), *_trained(run)]
    lines = []
    where = {'file': 'benchmarks/mlperf/log.py', 'lineno': log_lines.__code__.co_firstlineno}  # what wrote the line, by which seeds are compared
    for time_sec, kind, key, value, metadata in events:
        line = {
            'namespace': '',
            'time_ms': round(1000 * time_sec),
            'event_type': kind,
            'key': key,
            'value': value,
            'metadata': {**where, **metadata},
        }
        lines.append(f':::MLLOG {json.dumps(line, allow_nan=False)}')
    return lines


Event = tuple[float, str, str, Any, dict[str, Any]]  # Unix seconds, type, key, value, metadata


def _described(run: BenchmarkRun, submission: Submission) -> Iterator[Event]:
    """What was run, up to the start of the clock: that of the process. What initialization takes counts, though the rules would leave it out."""
    recipe, environment = run.recipe, run.environment
    gpus, optimizer = environment['num_gpus'], recipe.optimizer
    values = {
        'submission_benchmark': BENCHMARK,
        'submission_division': submission.division,
        'submission_org': submission.org,
        'submission_platform': f'{gpus} x {environment["device"]}',
        'submission_status': 'research',
        'cache_clear': submission.cache_cleared,
        'seed': recipe.seed,
        'global_batch_size': recipe.batch.global_size,
        'gradient_accumulation_steps': max(1, recipe.batch.global_size // (gpus * environment['micro_batch'])),
        'train_samples': train_samples(run),
        'eval_samples': max((score.images for score in run.scores.values()), default=EVAL_SAMPLES),
        'opt_name': 'adamw',
        'opt_adamw_beta_1': optimizer.betas[0],
        'opt_adamw_beta_2': optimizer.betas[1],
        'opt_adamw_epsilon': optimizer.eps,
        'opt_adamw_weight_decay': optimizer.weight_decay,
        'opt_base_learning_rate': optimizer.lr,
        'opt_learning_rate_warmup_steps': optimizer.warmup.batches,
    }
    for key, value in values.items():
        yield run.times.began, POINT, key, value, {}
    yield run.times.began, START, 'init_start', None, {}
    yield run.times.began, END, 'init_stop', None, {}


def _trained(run: BenchmarkRun) -> Iterator[Event]:
    """From the start of the clock to its end: the first passing checkpoint, or the last sign of life."""
    times = run.times
    since, first = times.began, 0
    yield since, START, 'run_start', None, {'starts': times.starts}
    for batch in run.grid:
        yield since, START, 'block_start', None, {'samples_count': run.samples(first)}
        since, first = times.saved[batch], batch
        yield since, END, 'block_stop', None, {'samples_count': run.samples(batch)}
        if batch in run.scores:
            score, counted = run.scores[batch], {'samples_count': run.samples(batch)}
            yield since, POINT, 'eval_accuracy', score.fid, {**counted, 'metric': 'FID'}
            yield since, POINT, 'eval_accuracy', score.clip, {**counted, 'metric': 'CLIP'}
    ended, status = (times.ended, 'aborted') if run.passed is None else (since, 'success')
    yield ended, END, 'run_stop', None, {'status': status}


def train_samples(run: BenchmarkRun) -> int:
    """Samples of the training data, as its manifest says.

    Raises:
        InputError: the manifest cannot be read from here.
    """
    total = 0
    if run.recipe.data.kind == 'synthetic':
        return run.recipe.data.synthetic_samples
    where = ''
    try:
        for stream in present(run.recipe.data.streams).values():
            where = str(stream.remote or stream.local)
            total += Manifest.read(where).num_samples
    except (ManifestError, OSError) as error:
        raise InputError(f'{run.folder}: the log names the number of training samples, and {error}; run this where {where} can be read') from error
    return total
