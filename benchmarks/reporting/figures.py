"""The figures of a report, readable without colour by markers, line styles and hatches.

Measurements are filled markers, predictions of a law hollow ones.
"""

import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import Formatter, FuncFormatter

from benchmarks.reporting.series import Bar, ScalingSeries, efficiency
from diffusion.common.pages import LIGHT, SERIES, new_figure, page_style
from diffusion.cost.scaling import PredictedRate, ScalingFit, ScalingPoint

# One a series or plan: (marker, colour). Lines are solid as far as something was measured, and dashed beyond.
STYLES = tuple(zip('os^DvP', (LIGHT[name] for name in SERIES), strict=True))
MOST_LETTERS = 95  # of a line in a legend: a figure is little wider
HATCHES = ('', '///', '...', 'xxx', '---', '+++')
MOST_SERIES = len(STYLES)


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
    figure, axes = _axes(f'days to train ({_works(curves)})')
    for curve, style in zip(curves, STYLES, strict=False):
        _draw(axes, curve, style, lambda series, point: series.work.days(point.images_per_sec), intervals=True)
    _scale(axes, 'y', [])
    return _finish(figure, axes, _unit(curves), _legend(curves, intervals=True))


@page_style()
def efficiency_figure(curves: Sequence[Curve]) -> Figure:
    """Draw images per second per GPU, in % of that of the fewest GPUs measured."""
    figure, axes = _axes(f'images/s per {counted(1, _unit(curves))[2:]}, % of that on the fewest {_unit(curves)}')
    axes.axhline(100, color=LIGHT['faint'], linewidth=0.8)
    for curve, style in zip(curves, STYLES, strict=False):
        _draw(axes, curve, style, lambda series, point: 100 * efficiency([series.points[0], point])[1], intervals=False)
    axes.set_ylim(0, max(115, 1.05 * axes.get_ylim()[1]))
    return _finish(figure, axes, _unit(curves), _legend(curves, intervals=False))


class Paid(NamedTuple):
    """Days and dollars of one way to pay on a number of GPUs."""

    num_gpus: int
    days: float
    dollars: float
    is_predicted: bool


@page_style()
def cost_figure(plans: Mapping[str, Sequence[Paid]], work: str) -> Figure:
    """Draw dollars over days for ways to pay; hollow where images per second are predicted."""
    figure = new_figure(8, 5)
    axes = figure.subplots()
    for (name, points), (marker, colour) in zip(plans.items(), STYLES, strict=False):
        axes.plot(
            [one.days for one in points], [one.dollars for one in points], '-', marker=marker, color=colour, linewidth=1, markersize=7, label=name
        )
        hollow = [one for one in points if one.is_predicted]
        axes.plot([one.days for one in hollow], [one.dollars for one in hollow], marker, color=colour, markerfacecolor=LIGHT['page'], markersize=8)
    dearest = max(plans.values(), key=lambda points: max(one.dollars for one in points))
    for one in dearest:
        axes.annotate(counted(one.num_gpus, 'GPUs'), (one.days, one.dollars), textcoords='offset points', xytext=(0, 9), ha='center', fontsize=9)
    axes.margins(x=0.08, y=0.12)  # room for the labels
    axes.set_xlabel('days')
    axes.set_ylabel(f'dollars for {work}')
    every = [one for points in plans.values() for one in points]
    _scale(axes, 'x', [one.days for one in every])
    _scale(axes, 'y', [one.dollars for one in every])
    return _finish(figure, axes, more=[_hollow('-', 'hollow: predicted')] if any(one.is_predicted for one in every) else [])


@page_style()
def bars_figure(panels: Sequence[tuple[str, Sequence[Bar]]]) -> Figure:
    """Draw images per second of configurations, a panel per setting. The factor is over the first bar."""
    names = [[textwrap.fill(bar.name, 34, break_on_hyphens=False) for bar in bars] for _, bars in panels]
    columns = min(2, len(panels))
    lines = -(-len(panels) // columns)
    longest = max(sum(max(1.0, 0.6 * (1 + name.count('\n'))) for name in panel) for panel in names)  # bars, or lines of their names
    figure = new_figure(5.5 * columns, lines * (0.9 + 0.42 * longest))
    grid = figure.subplots(lines, columns, squeeze=False)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    for axes, labels, (title, bars) in zip(grid.flat, names, panels, strict=False):
        for i, bar in enumerate(bars):
            axes.barh(i, bar.images_per_sec, color=LIGHT['panel'], hatch=HATCHES[i % len(HATCHES)], edgecolor=LIGHT['ink'], linewidth=0.9)
            factor = f'  {bar.images_per_sec / bars[0].images_per_sec:.2f}x' if i else ''
            axes.text(bar.images_per_sec, i, f' {plain(bar.images_per_sec)}{factor}', va='center', fontsize=9)
        axes.set_yticks(range(len(bars)), labels, fontsize=9)
        axes.invert_yaxis()
        axes.set_xlim(0, 1.35 * max(bar.images_per_sec for bar in bars))
        axes.set_xlabel('images/s')
        axes.xaxis.set_major_formatter(FuncFormatter(plain))
        axes.set_title(title, fontsize=10)
        axes.spines[['top', 'right']].set_visible(False)
    return figure


def plain(value: float, _: object = None) -> str:
    """Write a number without an exponent, with three significant digits if it is below a thousand."""
    return f'{value:,.0f}' if value >= 1000 else f'{value:.3g}'


def counted(number: int, unit: str) -> str:
    """`1 GPU`, `2 GPUs`, `1 process`."""
    return f'{number:,} {unit if number != 1 else unit.removesuffix("es") if unit.endswith("sses") else unit.removesuffix("s")}'


def _scale(axes: Axes, axis: Literal['x', 'y'], values: Sequence[float]) -> None:
    """Make an axis logarithmic with plain numbers, but from 0 where the values lie so close together that a logarithmic axis would have no ticks."""
    if values and max(values) < 3 * min(values):
        axes.set(**{f'{axis}lim': (0, 1.15 * max(values))})
    else:
        axes.set(**{f'{axis}scale': 'log'})
        (axes.xaxis if axis == 'x' else axes.yaxis).set_minor_formatter(_minor(axes.get_xlim() if axis == 'x' else axes.get_ylim()))
        axes.tick_params(axis=axis, which='minor', length=3.5)  # as major ones, so that their labels stand in a line
    (axes.xaxis if axis == 'x' else axes.yaxis).set_major_formatter(FuncFormatter(plain))


def _minor(limits: tuple[float, float]) -> Formatter:
    """Labels of minor ticks of a logarithmic axis, as many as do not run into each other."""
    decades = math.log10(limits[1] / limits[0])
    shown = '2357' if decades < 1 else '235' if decades < 2 else '25' if decades < 3.5 else ''
    return FuncFormatter(lambda value, _: plain(value) if f'{value:e}'[0] in shown else '')


def _draw(axes: Axes, curve: Curve, style: tuple[str, str], height_in: Callable[[ScalingSeries, ScalingPoint], float], intervals: bool) -> None:
    height = partial(height_in, curve.series)
    marker, colour = style
    hollow = {'markerfacecolor': LIGHT['page'], 'markersize': 8, 'zorder': 3}
    series, predicted = curve.series, [point_of(ahead) for ahead in curve.predictions]

    def plot(points: Sequence[ScalingPoint], line: str, **look: Any) -> None:
        axes.plot([point.num_gpus for point in points], [height(point) for point in points], line, color=colour, **look)

    def by_law(law: ScalingFit, counts: Sequence[int]) -> list[ScalingPoint]:
        sizes = [(n, series.global_size(n)) for n in counts]
        return [ScalingPoint(n, global_size, global_size / law.step_sec(n, global_size)) for n, global_size in sizes]

    plot(series.points, marker, markersize=7, label=f'{series.name}: measured')
    plot(predicted, marker, **hollow)
    counts = sorted({point.num_gpus for point in (*series.points, *predicted)})
    plot(by_law(series.fit_without_outliers, [n for n in counts if n <= series.most_gpus]), '-', linewidth=1)
    plot(by_law(series.fit_without_outliers, [n for n in counts if n >= series.most_gpus]), '--', linewidth=1)
    if curve.with_outliers:
        plot(by_law(series.fit, counts), ':', linewidth=1.3)
        plot([point_of(ahead) for ahead in curve.with_outliers], marker, **hollow)
    for point in series.outliers:
        axes.plot(point.num_gpus, height(point), 'x', color=LIGHT['ink'], markersize=14, markeredgewidth=1.5)
        axes.annotate('outlier', (point.num_gpus, height(point)), textcoords='offset points', xytext=(-9, 9), ha='right', fontsize=9)
    for ahead, point in zip(curve.predictions, predicted, strict=True):
        if intervals and ahead.low is not None and ahead.high is not None:
            best = ahead.high if math.isfinite(ahead.high) else ahead.images_per_sec
            ends = [height(ScalingPoint(ahead.num_gpus, ahead.global_size, rate)) for rate in (ahead.low, best)]
            reach = [[height(point) - min(ends)], [max(ends) - height(point)]]
            axes.errorbar([ahead.num_gpus], [height(point)], yerr=reach, color=colour, linewidth=1, capsize=5, fmt='none')
            if best != ahead.high:
                arrow = {'arrowstyle': '<-', 'color': colour}
                axes.annotate('', (ahead.num_gpus, height(point)), textcoords='offset points', xytext=(0, -30), arrowprops=arrow)


def point_of(ahead: PredictedRate) -> ScalingPoint:
    """A prediction as if it had been measured."""
    return ScalingPoint(ahead.num_gpus, ahead.global_size, ahead.images_per_sec)


def _legend(curves: Sequence[Curve], intervals: bool) -> list[Line2D]:
    """Entries of a legend for hollow markers and crosses, where there are any."""
    without = ' without outliers' if any(curve.with_outliers for curve in curves) else ''
    lines = list[tuple[Literal['--', ':'], str]]()
    if any(curve.predictions for curve in curves):
        endless = any(ahead.high is not None and math.isinf(ahead.high) for curve in curves for ahead in curve.predictions)
        said = f', with 95 % interval{" (arrow: without an end)" if endless else ""}' if intervals else ''
        lines.append(('--', f'hollow: predicted{without}{said}'))
    if without:
        lines.append((':', 'hollow, dotted: predicted with outliers'))
    return [_hollow(style, text) for style, text in lines]


def _hollow(style: Literal['-', '--', ':'], text: str) -> Line2D:
    return Line2D([], [], marker='o', linestyle=style, color=LIGHT['ink'], markerfacecolor=LIGHT['page'], markersize=8, linewidth=1, label=text)


def _axes(ylabel: str) -> tuple[Figure, Axes]:
    figure = new_figure(8, 5.6)
    axes = figure.subplots()
    axes.set_xscale('log', base=2)
    axes.set_ylabel(ylabel)
    return figure, axes


def _finish(figure: Figure, axes: Axes, unit: str = '', more: Sequence[Line2D] = ()) -> Figure:
    if unit:
        axes.set_xlabel(unit)
        axes.xaxis.set_major_formatter(FuncFormatter(plain))
    axes.grid(alpha=0.3, which='major')
    axes.spines[['top', 'right']].set_visible(False)
    handles = [*axes.get_legend_handles_labels()[0], *more]
    labels = [textwrap.fill(str(handle.get_label()), MOST_LETTERS) for handle in handles]
    for ncols in (2, 1) if len(handles) > 3 else (1,):
        legend = figure.legend(handles, labels, loc='outside lower center', ncols=ncols, frameon=False, fontsize=9)
        figure.draw_without_rendering()  # only then has it a size
        if ncols == 1 or legend.get_window_extent().width <= figure.bbox.width:
            break
        legend.remove()
    return figure


def _works(curves: Sequence[Curve]) -> str:
    names = list(dict.fromkeys(curve.series.work.name for curve in curves))
    return names[0] if len(names) == 1 else 'each series its own samples'


def _unit(curves: Sequence[Curve]) -> str:
    return curves[0].series.unit
