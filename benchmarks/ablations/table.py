"""The table of a study: every method against the baseline, at equal FLOP and at equal time. No torch.

A figure of a method differs from the baseline's "beyond the noise" if Welch's t-test says so at 5 %: the 95 % interval of the difference of the
means over seeds, with Welch-Satterthwaite degrees of freedom, does not hold 0. B. L. Welch, Biometrika 34 (1947), pages 28 to 35.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from scipy.stats import t as student

from benchmarks.ablations.curves import Axis, RunCurve
from benchmarks.ablations.study import BASELINE, Criterion
from diffusion.common.text import counted, markdown_table

LEVEL = 0.05
Curves = Mapping[str, Sequence[RunCurve]]
"""Finished runs by variant, one a seed."""
Times = Mapping[str, Sequence[float]]
"""Seconds of a batch by variant, one a round of timing."""


@dataclass(frozen=True)
class Reading:
    """A figure of a variant at one place.

    Attributes:
        values: of its seeds.
    """

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return fmean(self.values)

    @property
    def spread(self) -> float | None:
        """Standard deviation over the seeds, of n - 1; None of one seed."""
        return stdev(self.values) if len(self.values) > 1 else None


@dataclass(frozen=True)
class Difference:
    """Of the means of a method and the baseline.

    Attributes:
        value: method - baseline.
        margin: half of its 95 % interval; None where seeds are too few for one.
    """

    value: float
    margin: float | None

    @property
    def beyond_noise(self) -> bool:
        return self.margin is not None and abs(self.value) > self.margin


def difference(method: Reading, baseline: Reading) -> Difference:
    """Welch's interval; the variances are each group's own."""
    value = method.mean - baseline.mean
    if method.spread is None or baseline.spread is None:
        return Difference(value, None)
    squares = [reading.spread**2 / len(reading.values) for reading in (method, baseline) if reading.spread is not None]
    total = sum(squares)
    if total == 0:
        return Difference(value, 0.0)
    freedom = total**2 / sum(square**2 / (len(reading.values) - 1) for square, reading in zip(squares, (method, baseline), strict=True))
    return Difference(value, float(student.ppf(1 - LEVEL / 2, freedom)) * math.sqrt(total))


def equal(curves: Curves, axis: Axis) -> float:
    """Return the largest FLOP (or seconds) that all runs reached."""
    return min(run.total(axis) for runs in curves.values() for run in runs)


def reading(runs: Sequence[RunCurve], key: str, axis: Axis, x: float) -> Reading | None:
    """Return the figure of the runs at `x`; None if one of them has none there."""
    values = [run.at(key, axis, x) for run in runs]
    known = tuple(value for value in values if value is not None)
    return Reading(known) if len(known) == len(values) else None


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
    costs = {name: Reading(tuple(of_a_batch[name])) for name in curves}
    rows = []
    for name, runs in curves.items():
        cells = [_cell(one, reading(runs, one.key, axis, x), reading(curves[BASELINE], one.key, axis, x)) for one in criteria]
        spread = costs[name].spread  # of the time alone: FLOP are counted
        shown = '' if axis == 'flop' or spread is None else f' ± {spread / costs[BASELINE].mean:.2f}'
        rows.append([name, f'{costs[name].mean / costs[BASELINE].mean:.2f}{shown}', *cells])
    return markdown_table(['method', f'{"FLOP" if axis == "flop" else "time"} of a batch', *(f'{one.title}:' for one in criteria)], rows)


def _cell(criterion: Criterion, method: Reading | None, baseline: Reading | None) -> str:
    """`0.412 ± 0.004, better`."""
    if method is None:
        return '-'
    text = criterion.text(method.mean)
    if method.spread is not None:
        text += f' ± {criterion.text(method.spread)}'
    if baseline is None or method is baseline:
        return text
    apart = difference(method, baseline)
    return text + (f', {"better" if (apart.value < 0) == criterion.lower_is_better else "worse"}' if apart.beyond_noise else '')
