"""The curves of a study: each figure over FLOP and over time, the mean of the seeds, the baseline with the range of its seeds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.ablations.curves import Axis, RunCurve
from benchmarks.ablations.study import BASELINE, Outcome
from benchmarks.ablations.table import Curves, equal
from diffusion.common.pages.figures import new_figure, page_style
from diffusion.common.pages.palette import LIGHT, SERIES

LINES = ('-', '--', ':')
LABELS: dict[Axis, str] = {'flop': 'FLOP', 'sec': 'seconds of training'}


@page_style()
def curves_figure(figures: Sequence[Outcome], curves: Curves) -> Figure:
    """Draw a column per figure, a row per axis; a vertical line is where the table reads them."""
    drawing = new_figure(4.2 * len(figures), 7)
    grid = drawing.subplots(2, len(figures), squeeze=False)
    for row, axis in zip(grid, LABELS, strict=True):
        for axes, figure in zip(row, figures, strict=True):
            axes.axvline(equal(curves, axis), color=LIGHT['line'], linewidth=1)
            for number, (name, runs) in enumerate((name, runs) for name, runs in curves.items() if name != BASELINE):
                look = {'color': LIGHT[SERIES[number % len(SERIES)]], 'linestyle': LINES[number // len(SERIES) % len(LINES)]}
                axes.plot(*_mean(runs, figure, axis), label=name, linewidth=1.2, **look)
            _draw_baseline(axes, curves[BASELINE], figure, axis)
            axes.set_xlabel(LABELS[axis])
            axes.set_title(figure.title)
            axes.grid(alpha=0.3)
    drawing.legend(*grid[0][0].get_legend_handles_labels(), loc='outside lower center', ncols=5, fontsize=9)
    return drawing


def _draw_baseline(axes: Axes, runs: Sequence[RunCurve], figure: Outcome, axis: Axis) -> None:
    x, mean = _mean(runs, figure, axis)
    values = _values(runs, figure, axis)
    axes.fill_between(x, values.min(axis=0), values.max(axis=0), color=LIGHT['line'], alpha=0.7, linewidth=0)
    axes.plot(x, mean, label=BASELINE, color=LIGHT['ink'], linewidth=2)
    low, high = sorted((values[:, -1].mean(), values[:, 1 if len(x) > 2 else 0].mean()))  # what is untrained would hide the rest
    axes.set_ylim(low - 0.5 * (high - low), high + 0.5 * (high - low))


def _mean(runs: Sequence[RunCurve], figure: Outcome, axis: Axis) -> tuple[np.ndarray, np.ndarray]:
    """Means over the seeds of x and value of each evaluation."""
    x = np.mean([run.series(figure.key, axis)[0] for run in runs], axis=0)
    return x, _values(runs, figure, axis).mean(axis=0)


def _values(runs: Sequence[RunCurve], figure: Outcome, axis: Axis) -> np.ndarray:
    """(seeds, evaluations)."""
    return (100 if figure.percent else 1) * np.array([run.series(figure.key, axis)[1] for run in runs])
