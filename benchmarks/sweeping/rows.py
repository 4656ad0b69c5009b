"""The results of a sweep: one line of JSON a point, whatever became of it, written once and looked up when the sweep resumes."""

import os
import re
import signal
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.measured import hold
from benchmarks.sweeping.sweep import Point, Sweep
from diffusion.common.files import json_line, read_json_lines
from diffusion.contracts.errors import BAD_DATA, BAD_RECIPE
from diffusion.cost.results import RATED
from diffusion.recipe import Recipe
from diffusion.recipe.averaging import profiles

CRASHED = 'crashed'
STATUSES = (*RATED, 'out of memory', CRASHED, 'timed out', 'refused')

# Null in the row of a point that was not measured.
NUMBERS = (
    'device', 'num_parameters', 'attention', 'images_per_sec', 'images_per_sec_spread', 'windows_images_per_sec', 'images_per_sec_per_gpu',
    'step_sec', 'flop_per_image', 'mfu', 'peak_allocated_bytes', 'peak_reserved_bytes', 'data_wait_share',
    'warmup_steps', 'measured_steps', 'measured_sec',
)  # fmt: skip

# In what a run printed: a line about memory that ran out (PyTorch's, of a library, of `batch.micro_size: auto`), the last line of a traceback, and
# what train.py says where it knows the cause.
_OUT_OF_MEMORY = re.compile(
    r"^.*(?:OutOfMemoryError|MemoryError|CUDA out of memory|ALLOC_FAILED|can't allocate memory|not even one sample fits).*$", re.M
)
_EXCEPTION = re.compile(r'^[A-Za-z_][\w.]*(?:Error|Exception)\b.*$', re.M)
_EXPLAINED = re.compile(r'^\(exit code (\d+), docs/', re.M)
MAX_REASON = 500  # letters


class RowsFile:
    """The file of a sweep's rows; held by one process at a time, as long as it lives. The last row of a point counts.

    Raises:
        InputError: another process has it.
        OSError: it cannot be written.
    """

    def __init__(self, path: Path):
        self.path = path
        self.file = hold(path, 'another sweep writes into it; let it end, or name another file with --out')
        self.rows = rows_in(path)

    def add(self, row: dict[str, Any]) -> None:
        self.file.write(json_line(row))
        os.fsync(self.file.fileno())
        self.rows[row['point']] = row


def rows_in(path: Path) -> dict[str, dict[str, Any]]:
    """Return the last row of each point, by its identity; none where there is no file."""
    return {row['point']: row for row in read_json_lines(path) if row.get('benchmark') == 'throughput'}


def row_of(sweep: Sweep, point: Point, identity: str, found: dict[str, Any], environment: dict[str, Any]) -> dict[str, Any]:
    """Return a row: what the point is, what was found of it, and where.

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
        'network': recipe.model.network,
        'resolution': recipe.data.resolution,
        'kind': recipe.data.kind,
        'global_size': recipe.batch.global_size,
        'micro_size': micro_size,
        'accumulation': recipe.batch.global_size // point.place.num_gpus // micro_size if micro_size else None,
        'precision': recipe.train.precision,
        'sharding': recipe.train.sharding,
        'compile': recipe.train.compile,
        'checkpoint_activations': recipe.train.checkpoint_activations,
        'ema': averages(recipe, found.get('warmup_steps') or sweep.first_boundary, found.get('measured_steps') or sweep.max_steps),
        **dict.fromkeys(NUMBERS),
        **found,
    }
    return {**row, **{key: value for key, value in environment.items() if key not in row}}


def averages(recipe: Recipe, warmup_steps: int, measured_steps: int) -> bool:
    """Return whether a moving average is updated in the steps after `warmup_steps`; the first time it is only copied."""
    if not profiles(recipe.ema):
        return False
    start, interval = recipe.ema.start.batches, recipe.ema.interval.batches
    first = max(warmup_steps + 1, start + 1)
    due = start + -(-(first - start) // interval) * interval
    return due <= warmup_steps + measured_steps


def verdict(code: int | None, log: str, limit_sec: float) -> dict[str, Any]:
    """Return why there is no result, as `status` and `reason`.

    Args:
        code: of the launcher's end; None: it was stopped.
        log: what the launcher and the ranks printed.
        limit_sec: of a point.
    """
    full, explained = _OUT_OF_MEMORY.search(log), _EXPLAINED.search(log)
    lines = [line.strip() for line in log[: explained.start() if explained else None].splitlines() if line.strip()]
    if full:  # the rank that ran out of memory takes the others along, which then say other things
        status, reason = 'out of memory', full[0].strip()
    elif code is None:
        status, reason = 'timed out', f'not done after {limit_sec:g} s (time_limit_sec)'
    elif explained and int(explained[1]) in (BAD_RECIPE, BAD_DATA):
        status, reason = 'refused', _cause(lines)
    elif code in (-signal.SIGKILL, 128 + signal.SIGKILL, 256 - signal.SIGKILL) or re.search(r'exit code -9\b', log):
        status = CRASHED
        reason = "a process was killed by SIGKILL: often by the kernel, when the host's memory is full (dmesg tells)"
    else:
        exceptions = _EXCEPTION.findall(log)
        last = _cause(lines) if explained else exceptions[-1] if exceptions else lines[-1] if lines else ''
        how = 'ended without a result' if code == 0 else f'ended with {_name(code)}'
        status, reason = CRASHED, f'the launcher {how}{f": {last}" if last else " and printed nothing"}'
    return {'status': status, 'reason': ' '.join(reason.split())[:MAX_REASON]}


def _cause(lines: list[str]) -> str:
    """Return the message that ends with these lines: the errors of a recipe, or the last line."""
    errors: list[str] = []
    while lines and lines[-1].startswith('- '):
        errors.insert(0, lines.pop().removeprefix('- '))
    return '; '.join(errors) or (lines[-1] if lines else '')


def _name(code: int) -> str:
    return f'signal {signal.Signals(-code).name}' if code < 0 else f'exit code {code}'
