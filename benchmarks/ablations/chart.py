"""The curves of a study: each figure over FLOP and over time, the mean of the seeds, the baseline with the range of its seeds."""

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.ablations.curves import Axis, RunCurve
from benchmarks.ablations.study import BASELINE, Criterion
from benchmarks.ablations.table import Curves, equal
from diffusion.common.pages import LIGHT, SERIES, new_figure, page_style

LINES = ('-', '--', ':')
LABELS: dict[Axis, str] = {'flop': 'FLOP', 'sec': 'seconds of training'}


@page_style()
def curves_figure(criteria: Sequence[Criterion], curves: Curves) -> Figure:
    """Draw a column per figure, a row per axis that is known; a vertical line is where the table reads them."""
    axes_known = [axis for axis in LABELS if not any(math.isnan(run.total(axis)) for runs in curves.values() for run in runs)]
    figure = new_figure(4.2 * len(criteria), 3.5 * len(axes_known))
    grid = figure.subplots(len(axes_known), len(criteria), squeeze=False)
    for row, axis in zip(grid, axes_known, strict=True):
        for axes, criterion in zip(row, criteria, strict=True):
            axes.axvline(equal(curves, axis), color=LIGHT['line'], linewidth=1)
            for number, (name, runs) in enumerate((name, runs) for name, runs in curves.items() if name != BASELINE):
                look = {'color': LIGHT[SERIES[number % len(SERIES)]], 'linestyle': LINES[number // len(SERIES) % len(LINES)]}
                axes.plot(*_mean(runs, criterion, axis), label=name, linewidth=1.2, **look)
            _draw_baseline(axes, curves[BASELINE], criterion, axis)
            _limit(axes, [_mean(runs, criterion, axis) for runs in curves.values()], equal(curves, axis))
            axes.set_xlabel(LABELS[axis])
            axes.set_title(criterion.title)
            axes.grid(alpha=0.3)
    figure.legend(*grid[0][0].get_legend_handles_labels(), loc='outside lower center', ncols=5, fontsize=9)
    return figure


def _draw_baseline(axes: Axes, runs: Sequence[RunCurve], criterion: Criterion, axis: Axis) -> None:
    x, values = _series(runs, criterion, axis)
    axes.fill_between(x, values.min(axis=0), values.max(axis=0), color=LIGHT['line'], alpha=0.7, linewidth=0)
    axes.plot(x, values.mean(axis=0), label=BASELINE, color=LIGHT['ink'], linewidth=2)


def _limit(axes: Axes, means: Sequence[tuple[np.ndarray, np.ndarray]], end: float) -> None:
    """Show what the curves do in the second half of the budget: the beginning would leave the rest no room."""
    late = np.concatenate([values[x >= 0.5 * end] for x, values in means])
    if late.size:
        room = 0.15 * (late.max() - late.min()) or 1.0
        axes.set_ylim(late.min() - room, late.max() + room)


def _mean(runs: Sequence[RunCurve], criterion: Criterion, axis: Axis) -> tuple[np.ndarray, np.ndarray]:
    x, values = _series(runs, criterion, axis)
    return x, values.mean(axis=0)


def _series(runs: Sequence[RunCurve], criterion: Criterion, axis: Axis) -> tuple[np.ndarray, np.ndarray]:
    """The evaluations that all seeds have: x (N,), mean of the seeds, and values (seeds, N). A run that was stopped at one has skipped it."""
    points = [dict(run.points[criterion.key]) for run in runs]
    batches = sorted(set.intersection(*map(set, points)))
    x = np.array(batches) * np.mean([run.total(axis) / run.batch for run in runs])
    return x, criterion.scale * np.array([[known[batch] for batch in batches] for known in points])
