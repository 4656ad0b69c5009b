"""A sweep's results: one line of JSON a point, whatever became of it, written once and looked up when the sweep goes on."""

from __future__ import annotations

import fcntl
import os
import re
import signal
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.sweeping.launching import Ending
from benchmarks.sweeping.sweep import Point, Sweep, first_boundary
from diffusion.common.json_lines import open_to_append, read_lines, to_line
from diffusion.contracts.exit_codes import BAD_DATA, BAD_RECIPE, STALLED
from diffusion.cost.results import RATED
from diffusion.recipe import Recipe

STATUSES = (*RATED, 'out of memory', 'crashed', 'timed out', 'refused')

# Of a point that was not measured they are null.
NUMBERS = (
    'device', 'num_parameters', 'attention', 'images_per_sec', 'images_per_sec_spread', 'windows_images_per_sec', 'images_per_sec_per_gpu',
    'step_sec', 'flop_per_image', 'mfu', 'peak_allocated_bytes', 'peak_reserved_bytes', 'data_wait_share', 'loader_images_per_sec', 'loader_ratio',
    'warmup_steps', 'measured_steps', 'measured_sec',
)  # fmt: skip


class Held(RuntimeError):
    """Another sweep writes into the same file."""


class RowsFile:
    """The file of a sweep's rows; held by one process at a time, as long as it lives. The last row of a point counts.

    Raises:
        Held: another process has it.
        OSError: it cannot be written.
    """

    def __init__(self, path: Path):
        self.path = path
        self.file = open_to_append(path)
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # not lockf, whose lock would go when the rows have been read
        except BlockingIOError as error:
            raise Held(f'{path}: another sweep writes into it; let it end, or name another file with --out') from error
        self.rows = rows_in(path)

    def add(self, row: dict[str, Any]) -> None:
        self.file.write(to_line(row))
        os.fsync(self.file.fileno())
        self.rows[row['point']] = row


def rows_in(path: Path) -> dict[str, dict[str, Any]]:
    """The last row of each point, by its identity; none where there is no file."""
    return {row['point']: row for row in read_lines(path) if row.get('benchmark') == 'throughput'}


def row_of(sweep: Sweep, point: Point, identity: str, found: dict[str, Any], environment: dict[str, Any]) -> dict[str, Any]:
    """A row: what the point is, what was found of it, and where.

    Args:
        found: at least `status` and `reason`.
        environment: of the machine that it was measured on; its own number of GPUs is not the point's.
    """
    recipe = point.recipe
    micro_size = recipe.batch.micro_size if isinstance(recipe.batch.micro_size, int) else None  # `auto` is known when it was tried
    row = {
        'benchmark': 'throughput',
        'sweep': sweep.name,
        'point': identity,
        'settings': point.settings,
        'status': found['status'],
        'reason': found['reason'],
        **asdict(point.place),
        'interconnect': sweep.interconnect,
        'unet': recipe.model.network,
        'resolution': recipe.data.resolution,
        'kind': recipe.data.kind,
        'global_size': recipe.batch.global_size,
        'micro_size': micro_size,
        'accumulation': recipe.batch.global_size // point.place.num_gpus // micro_size if micro_size else None,
        'precision': recipe.train.precision,
        'sharding': recipe.train.sharding,
        'compile': recipe.train.compile,
        'checkpoint_activations': recipe.train.checkpoint_activations,
        'ema': averages(recipe, found.get('warmup_steps') or first_boundary(sweep), found.get('measured_steps') or sweep.max_steps),
        **dict.fromkeys(NUMBERS),
        **found,
    }
    return {**row, **{key: value for key, value in environment.items() if key not in row}}


def averages(recipe: Recipe, warmup_steps: int, measured_steps: int) -> bool:
    """Whether a moving average is updated in the steps after `warmup_steps`; the first time it is only copied."""
    if recipe.ema.half_life is None:
        return False
    start, interval = recipe.ema.start.batches, recipe.ema.interval.batches
    first = max(warmup_steps + 1, start + 1)
    due = start + -(-(first - start) // interval) * interval
    return due <= warmup_steps + measured_steps


def verdict(ending: Ending, failures: Sequence[dict[str, Any]], log: str, limit_sec: float) -> dict[str, Any]:
    """Why there is no result, as `status` and `reason`.

    Args:
        ending: of the launcher.
        failures: what the point's processes left (benchmarks/point.py).
        log: what they and the launcher printed.
        limit_sec: of a point.
    """
    # Who ran out of memory takes the others along, and who only lost another rank knows nothing.
    failures = sorted(failures, key=lambda failure: (failure['status'] != 'out of memory', failure['code'] == STALLED, failure['rank']))
    if failures:
        first = failures[0]
        return {'status': first['status'], 'reason': f'rank {first["rank"]}: {first["reason"]}'}
    if ending.code is None:
        return {'status': 'timed out', 'reason': f'not done after {limit_sec:g} s (time_limit_sec)'}
    if _killed(ending.code, log):
        reason = "a process was killed by SIGKILL and left no word: often by the kernel, when the host's memory is full (dmesg tells)"
        return {'status': 'crashed', 'reason': reason}
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    how = 'ended without a result' if ending.code == 0 else f'ended with {_name(ending.code)}'
    return {'status': 'crashed', 'reason': f'the launcher {how}{": " + lines[-1][:300] if lines else " and printed nothing"}'}


def status_of_code(code: int) -> str:
    """Of an exit code that diffusion.faults gave an error: what the recipe or the data forbid is not a crash."""
    return 'refused' if code in (BAD_RECIPE, BAD_DATA) else 'crashed'


def _killed(code: int, log: str) -> bool:
    """Whether SIGKILL ended the launcher, or a rank of which the launcher says so."""
    return code in (-signal.SIGKILL, 128 + signal.SIGKILL, 256 - signal.SIGKILL) or bool(re.search(r'exit code -9\b', log))


def _name(code: int) -> str:
    return f'signal {signal.Signals(-code).name}' if code < 0 else f'exit code {code}'
