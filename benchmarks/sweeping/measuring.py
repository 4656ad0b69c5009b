"""The numbers of a point, read from the folder of its run while it trains: steps are taken until their rate is steady.

Time is that of events.jsonl: rank 0's, from one synchronization with the GPU to the next, whole windows of steps apart, loader, logging and callbacks
included. No window is left out between the first that counts and the last, so images/s x seconds = images that were trained on.
"""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.sweeping.sweep import Method, Point
from diffusion.common.files import read_json_lines
from diffusion.common.stopwatch import EVENTS, TRAINING, WAITING
from diffusion.cost.hardware import mfu, peak_flops
from diffusion.families.counting.counts import Counter


class Window(NamedTuple):
    """Steps between two records of a run."""

    batch: int  # the last one
    sec: float  # of training, waiting for data included
    wait_sec: float  # rank 0's wait for data


def windows_in(run_folder: Path) -> list[Window]:
    """Return the windows that a run has finished."""
    windows = []
    sec = wait_sec = 0.0
    for line in read_json_lines(run_folder / EVENTS):
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


def numbers(point: Point, images_per_sec: float, environment: Mapping[str, Any], run_folder: Path) -> dict[str, Any]:
    """Return the part of a row that says what the run found out about itself: its setting, its memory and its MFU.

    Args:
        environment: the run's environment.json, with the micro-batch of `auto` and the kernel of attention.
        run_folder: whose log has rank 0's highest memory; reserved is known of a GPU only.
    """
    counts = Counter.from_file().counts(point.recipe)
    logged = {key: value for line in read_json_lines(run_folder / 'log.jsonl') for key, value in line.items()}
    allocated_gb, reserved_gb = (logged.get(f'throughput/{name}_memory_gb') for name in ('peak', 'reserved'))
    images_per_gpu = point.recipe.batch.global_size // point.place.num_gpus
    micro_size = environment.get('micro_batch') or images_per_gpu
    per_gpu = images_per_sec / point.place.num_gpus
    return {
        'device': environment['device'],
        'attention': environment['attention'],
        'micro_size': micro_size,
        'accumulation': images_per_gpu // micro_size,
        'peak_allocated_bytes': None if allocated_gb is None else round(allocated_gb * 1e9),
        'peak_reserved_bytes': None if reserved_gb is None else round(reserved_gb * 1e9),
        'num_parameters': counts.num_parameters,
        'flop_per_image': counts.flop,
        'images_per_sec_per_gpu': per_gpu,
        'mfu': mfu(per_gpu, counts.flop, peak_flops(environment['device'])),
    }
