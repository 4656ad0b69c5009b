"""The figure of a report, readable without colour: measurements are filled markers, predictions of a law hollow ones."""

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter

from benchmarks.reporting.series import ScalingSeries
from diffusion.common.pages import LIGHT, SERIES, new_figure, page_style
from diffusion.cost.scaling import PredictedRate, ScalingFit, ScalingPoint

# One a series: (marker, colour). Lines are solid as far as something was measured, and dashed beyond.
STYLES = tuple(zip('os^DvP', (LIGHT[name] for name in SERIES), strict=True))
MOST_SERIES = len(STYLES)
HOLLOW: dict[str, Any] = {'markerfacecolor': LIGHT['page'], 'markersize': 8}
LEGEND_LETTERS = 95  # of a line: the figure is little wider


@dataclass(frozen=True)
class Curve:
    """A series with the predictions of its law for other numbers of GPUs.

    Attributes:
        predictions: without the outliers, if there are any.
        with_outliers: of the same numbers of GPUs by the law through all points; none without outliers.
    """

    series: ScalingSeries
    predictions: Sequence[PredictedRate]
    with_outliers: Sequence[PredictedRate] = ()


@page_style()
def days_figure(curves: Sequence[Curve]) -> Figure:
    """Draw days of the series' work over the number of GPUs, both axes logarithmic (figure 1 of the MosaicML post)."""
    figure = new_figure(8, 5.6)
    axes = figure.subplots()
    axes.set_xscale('log', base=2)
    for curve, style in zip(curves, STYLES, strict=False):
        _draw(axes, curve, *style)
    axes.set_yscale('log')
    low, high = axes.get_ylim()
    shown = '2357' if high < 10 * low else '235' if high < 100 * low else '25' if high < 3000 * low else ''
    axes.yaxis.set_minor_formatter(FuncFormatter(lambda value, _: plain(value) if f'{value:e}'[0] in shown else ''))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(plain))
    works = {curve.series.work.amount for curve in curves}
    axes.set(xlabel=curves[0].series.unit, ylabel=f'days to train ({works.pop() if len(works) == 1 else "each series its own samples"})')
    axes.grid(alpha=0.3, which='major')
    handles = [*axes.get_legend_handles_labels()[0], *_legend(curves)]
    labels = [textwrap.fill(str(handle.get_label()), LEGEND_LETTERS) for handle in handles]
    figure.legend(handles, labels, loc='outside lower center', frameon=False)
    return figure


def _draw(axes: Axes, curve: Curve, marker: str, colour: str) -> None:
    series, predicted = curve.series, [point_of(ahead) for ahead in curve.predictions]

    def plot(points: Sequence[ScalingPoint], line: str, **look: Any) -> None:
        axes.plot([point.num_gpus for point in points], [series.days(point.images_per_sec) for point in points], line, color=colour, **look)

    def by_law(law: ScalingFit, counts: Sequence[int]) -> list[ScalingPoint]:
        sizes = [(n, series.global_size(n)) for n in counts]
        return [ScalingPoint(n, global_size, global_size / law.step_sec(n, global_size)) for n, global_size in sizes]

    plot(series.points, marker, markersize=7, label=f'{series.name}: measured')
    plot(predicted, marker, zorder=3, **HOLLOW)
    counts = sorted({point.num_gpus for point in (*series.points, *predicted)})
    plot(by_law(series.fit_without_outliers, [n for n in counts if n <= series.most_gpus]), '-', linewidth=1)
    plot(by_law(series.fit_without_outliers, [n for n in counts if n >= series.most_gpus]), '--', linewidth=1)
    if curve.with_outliers:
        plot(by_law(series.fit, counts), ':', linewidth=1.3)
        plot([point_of(ahead) for ahead in curve.with_outliers], marker, zorder=3, **HOLLOW)
    for point in series.outliers:
        place = point.num_gpus, series.days(point.images_per_sec)
        axes.plot(*place, 'x', color=LIGHT['ink'], markersize=14, markeredgewidth=1.5)
        axes.annotate('outlier', place, textcoords='offset points', xytext=(-9, 9), ha='right')
    for ahead in curve.predictions:
        if ahead.low is None or ahead.high is None:
            continue
        days, most, is_endless = series.days(ahead.images_per_sec), series.days(ahead.low), math.isinf(ahead.high)
        least = days if is_endless else series.days(ahead.high)
        axes.errorbar([ahead.num_gpus], [days], yerr=[[days - least], [most - days]], color=colour, linewidth=1, capsize=5, fmt='none')
        if is_endless:
            arrow = {'arrowstyle': '<-', 'color': colour}
            axes.annotate('', (ahead.num_gpus, days), textcoords='offset points', xytext=(0, -30), arrowprops=arrow)


def point_of(ahead: PredictedRate) -> ScalingPoint:
    """A prediction as if it had been measured."""
    return ScalingPoint(ahead.num_gpus, ahead.global_size, ahead.images_per_sec)


def _legend(curves: Sequence[Curve]) -> list[Line2D]:
    """Entries of a legend for hollow markers, where there are any."""
    ahead = [one for curve in curves for one in curve.predictions]
    without = any(curve.with_outliers for curve in curves)
    endless = ' (arrow: without an end)' if any(one.high is not None and math.isinf(one.high) for one in ahead) else ''
    texts: dict[Any, str] = {'--': f'hollow: predicted{" without outliers" if without else ""}, with 95 % interval{endless}'} if ahead else {}
    texts |= {':': 'hollow, dotted: predicted with outliers'} if without else {}
    return [Line2D([], [], marker='o', linestyle=style, color=LIGHT['ink'], linewidth=1, label=text, **HOLLOW) for style, text in texts.items()]


def plain(value: float, _: object = None) -> str:
    """Write a number without an exponent, with three significant digits if it is below a thousand."""
    return f'{value:,.0f}' if value >= 1000 else f'{value:.3g}'


def counted(number: int, unit: str) -> str:
    """`1 GPU`, `2 GPUs`, `1 process`."""
    return f'{number:,} {unit if number != 1 else unit.removesuffix("es") if unit.endswith("sses") else unit.removesuffix("s")}'
