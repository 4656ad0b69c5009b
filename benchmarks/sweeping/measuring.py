"""The numbers of a point, read from the folder of its run while it trains: steps are taken until their rate is steady.

Time is that of events.jsonl: rank 0's, from one synchronization with the GPU to the next, whole windows of steps apart, loader, logging and callbacks
included. No window is left out between the first that counts and the last, so images/s x seconds = images that were trained on.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.sweeping.sweep import Method
from diffusion.common.json_lines import read_lines
from diffusion.common.stopwatch import EVENTS, TRAINING, WAITING


@dataclass(frozen=True)
class Window:
    """Steps between two records of a run.

    Args:
        batch: the last one.
        sec: of training, waiting for data included.
        wait_sec: rank 0's wait for data.
    """

    batch: int
    sec: float
    wait_sec: float


def windows_in(run_folder: Path) -> list[Window]:
    """Return the windows that a run has finished."""
    windows = []
    sec = wait_sec = 0.0
    for line in read_lines(run_folder / EVENTS):
        sec += sum(line['sec'].get(phase, 0.0) for phase in TRAINING)
        wait_sec += line['sec'].get(WAITING, 0.0)
        if line['event'] == 'steps':
            windows.append(Window(line['batch'], sec, wait_sec))
            sec = wait_sec = 0.0
    return windows


def rate(windows: Sequence[Window], method: Method, global_size: int) -> dict[str, Any] | None:
    """Return the part of a row that says how fast training is: of the steady windows, or if there are none by `max_steps` of the last ones.

    None while there are too few.

    Args:
        global_size: images of a step, over all ranks.
    """
    windows = [window for window in windows if window.batch > method.first_boundary]
    images = method.steps_per_window * global_size
    first = steady_from([images / window.sec for window in windows], method.windows, method.steady_within)
    is_steady = first is not None
    if first is None:
        if not windows or windows[-1].batch + method.steps_per_window <= method.max_steps:
            return None
        first = len(windows) - method.windows
    taken = windows[first:]
    rates, measured_sec = [images / window.sec for window in taken], sum(window.sec for window in taken)
    measured_steps = method.steps_per_window * len(taken)
    low, median, high = statistics.quantiles(rates, n=4, method='inclusive')
    unsteady = (
        f'no {method.windows} windows up to step {method.max_steps} were within {method.steady_within:.0%} of their median (steady_within); the '
        'numbers are of the last ones'
    )
    return {
        'status': 'measured' if is_steady else 'unsteady',
        'reason': None if is_steady else unsteady,
        'images_per_sec': measured_steps * global_size / measured_sec,
        'images_per_sec_spread': (high - low) / median,
        'windows_images_per_sec': rates,
        'step_sec': measured_sec / measured_steps,
        'data_wait_share': sum(window.wait_sec for window in taken) / measured_sec,
        'warmup_steps': taken[0].batch - method.steps_per_window,
        'measured_steps': measured_steps,
        'measured_sec': measured_sec,
    }


def steady_from(rates: Sequence[float], least: int, within: float) -> int | None:
    """Return the first of the longest run of windows up to the last one that are steady, `least` or more of them; None if there is no such run.

    Compilation, tuning, clocks and caches settle in their own time, so the end of the warm-up is judged by the rates themselves: windows are steady
    if none is further from their median than `within` times it, be it by a drift, a jump or an outlier.

    Args:
        rates: of consecutive windows, in any unit.
        least: at least 1.
        within: a share (0..1).
    """
    for first in range(len(rates) - least + 1):
        median = statistics.median(rates[first:])
        if all(abs(value - median) <= within * median for value in rates[first:]):
            return first
    return None


def memory(run_folder: Path) -> dict[str, int | None]:
    """Return the highest memory that rank 0 logged; reserved is known of a GPU only."""
    logged = {key: value for line in read_lines(run_folder / 'log.jsonl') for key, value in line.items()}

    def in_bytes(name: str) -> int | None:
        return None if logged.get(name) is None else round(logged[name] * 1e9)

    return {
        'peak_allocated_bytes': in_bytes('throughput/peak_memory_gb'),
        'peak_reserved_bytes': in_bytes('throughput/reserved_memory_gb'),
    }


def setting_in(environment: Mapping[str, Any], global_size: int, num_gpus: int) -> dict[str, Any]:
    """Return what a run found out about its own setting, from its environment.json: the micro-batch of `auto`, the kernel of attention."""
    micro_size = environment.get('micro_batch') or global_size // num_gpus
    return {
        'device': environment['device'],
        'attention': environment['attention'],
        'micro_size': micro_size,
        'accumulation': global_size // num_gpus // micro_size,
    }
