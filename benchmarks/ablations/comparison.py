"""Runs over FLOP and time, as their logs have them, and the table of a study: every method against the baseline at equal FLOP and time. No torch.

A figure of a method is better or worse than the baseline's if Welch's t-test over the seeds says so at 5 %. B. L. Welch, Biometrika 34 (1947).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Literal

import numpy as np
import yaml
from scipy.stats import ttest_ind

from benchmarks.ablations.study import BASELINE, Criterion, ended
from diffusion.common.text import counted, markdown_table
from diffusion.contracts.errors import RunError
from diffusion.monitoring.report.run import read_log

Axis = Literal['flop', 'sec']
RATE, FLOP = 'throughput/images_per_sec', 'cost/flop'
LEVEL = 0.05


@dataclass(frozen=True)
class RunCurve:
    """The evaluations of a run that reached its end.

    Attributes:
        batch: the last one.
        flop: of the network in all of its batches, forward and backward.
        sec: of training in all of its batches, at the time of a batch that was measured apart; NaN if it was not.
        points: (batch, value) of each evaluation by key of the log, in order.
    """

    batch: int
    flop: float
    sec: float
    points: dict[str, list[tuple[int, float]]]

    def total(self, axis: Axis) -> float:
        return self.flop if axis == 'flop' else self.sec

    def at(self, key: str, axis: Axis, x: float) -> float | None:
        """The value at `x`, linear between evaluations; None outside of them. A batch costs the same throughout a run."""
        xs = [self.total(axis) * batch / self.batch for batch, _ in self.points.get(key, [])]
        if not xs or x < xs[0] or x > xs[-1] * (1 + 1e-9):
            return None
        return float(np.interp(x, xs, [value for _, value in self.points[key]]))


Curves = Mapping[str, Sequence[RunCurve]]
"""Finished runs by variant, one a seed."""
Times = Mapping[str, Sequence[float]]
"""Seconds of a batch by variant, one a round of timing."""


def read_curve(folder: Path, keys: Sequence[str], batch_sec: float = math.nan) -> RunCurve | None:
    """Read a run folder; None if the run has not reached its end.

    Args:
        batch_sec: time of a batch of its recipe.

    Raises:
        RunError: its log does not say how many FLOP it took.
    """
    if not ended(folder):
        return None
    log = read_log(folder / 'log.jsonl')
    flops = [(record['batch'], record[FLOP]) for record in log if FLOP in record]
    if not flops:
        raise RunError(f'{folder}/log.jsonl: no {FLOP}; log.every must be well below train.duration')
    last = int(log[-1]['batch'])
    counted_to, flop = flops[-1]
    points = {key: [(int(record['batch']), record[key]) for record in log if key in record] for key in keys}
    return RunCurve(last, flop * last / counted_to, last * batch_sec, points)


def read_batch_sec(folder: Path) -> float | None:
    """Return the median time of a batch of a run, in seconds; None if the run has not reached its end.

    Raises:
        RunError: its log has no rates.
    """
    if not ended(folder):
        return None
    rates = [record[RATE] for record in read_log(folder / 'log.jsonl') if RATE in record]
    if not rates:
        raise RunError(f'{folder}/log.jsonl: no {RATE}; log.every must be well below train.duration')
    return yaml.safe_load((folder / 'recipe.yaml').read_text())['batch']['global_size'] * median(1 / rate for rate in rates)


def equal(curves: Curves, axis: Axis) -> float:
    """Return the largest FLOP (or seconds) that all runs reached."""
    return min(run.total(axis) for runs in curves.values() for run in runs)


def values_at(runs: Sequence[RunCurve], key: str, axis: Axis, x: float) -> list[float] | None:
    """Return the figure of each run at `x`; None if one of them has none there."""
    values = [run.at(key, axis, x) for run in runs]
    known = [value for value in values if value is not None]
    return known if len(known) == len(values) else None


def beyond_noise(method: Sequence[float], baseline: Sequence[float]) -> bool:
    """Whether Welch's t-test tells the means of two groups of seeds apart; one seed tells nothing."""
    if min(len(method), len(baseline)) < 2:
        return False
    if stdev(method) == stdev(baseline) == 0:
        return fmean(method) != fmean(baseline)
    return bool(ttest_ind(method, baseline, equal_var=False).pvalue < LEVEL)


def study_table(criteria: Sequence[Criterion], curves: Curves, times: Times) -> str:
    """Return the two tables as Markdown; a sentence for that of equal time where no batches were timed, and for both without a baseline."""
    if not curves.get(BASELINE):
        return 'No run of the baseline has finished.'
    counts = sorted({len(runs) for runs in curves.values()})
    seeds = counted(counts[0], 'seed') if len(counts) == 1 else f'{counts[0]} to {counts[-1]} seeds'
    flop_per_batch = {name: [run.flop / run.batch for run in runs] for name, runs in curves.items()}
    x = equal(curves, 'flop')
    parts = [f'At equal FLOP, {x:.3g} FLOP ({seeds}):', _at(criteria, curves, 'flop', x, flop_per_batch)]
    if untimed := [name for name in curves if not times.get(name)]:
        of_what = '' if len(untimed) == len(curves) else f' for {", ".join(untimed)}'
        parts.append(f'At equal time: not measured yet{of_what}.')
    else:
        x = equal(curves, 'sec')
        parts += [f'At equal time, {x:.0f} s of training ({seeds}):', _at(criteria, curves, 'sec', x, times)]
    comparisons = (1 if untimed else 2) * len(criteria) * (len(curves) - 1)
    if counts[0] > 1 and comparisons:
        parts.append(f'Of {comparisons} comparisons, about {LEVEL * comparisons:.1f} would be called better or worse by chance alone.')
    return '\n\n'.join(parts)


def _at(criteria: Sequence[Criterion], curves: Curves, axis: Axis, x: float, of_a_batch: Times) -> str:
    rows, base = [], fmean(of_a_batch[BASELINE])
    for name, runs in curves.items():
        cells = [_cell(one, values_at(runs, one.key, axis, x), values_at(curves[BASELINE], one.key, axis, x)) for one in criteria]
        costs = of_a_batch[name]
        spread = f' ± {stdev(costs) / base:.2f}' if axis == 'sec' and len(costs) > 1 else ''  # FLOP are counted
        rows.append([name, f'{fmean(costs) / base:.2f}{spread}', *cells])
    return markdown_table(['method', f'{"FLOP" if axis == "flop" else "time"} of a batch', *(f'{one.title}:' for one in criteria)], rows)


def _cell(criterion: Criterion, method: Sequence[float] | None, baseline: Sequence[float] | None) -> str:
    """`0.412 ± 0.004, better`."""
    if method is None:
        return '-'
    text = criterion.text(fmean(method)) + (f' ± {criterion.text(stdev(method))}' if len(method) > 1 else '')
    if baseline is None or not beyond_noise(method, baseline):
        return text
    return text + (', better' if (fmean(method) < fmean(baseline)) == criterion.lower_is_better else ', worse')
