"""Curves of evaluations: a metric over guidance or over batches, and one metric against another."""

from collections.abc import Sequence
from typing import Any

from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from diffusion.common.pages import LIGHT, SERIES, new_figure, page_style, svg
from diffusion.evaluation.job.results import CEILING_TITLE, FLOOR_TITLE, INTERVAL_ERRORS, Value
from diffusion.evaluation.pages.comparing import Group, Measure, interval

MARKERS = 'os^DvPX*'
NAME_LIMIT = 44  # letters in a legend as wide as a telephone
# Lower is better; Frechet distances, or the first that was measured, are drawn against the CLIP score.
DISTANCES = ('fid', 'fid_clean', 'fd_dinov2', 'kid', 'kid_clean', 'mmd_dinov2', 'cmmd')
REFERENCES = (  # of a subject: field of a point, its line, what the caption calls the line, its title
    ('floor', (0, (6, 3)), 'Long dashes', FLOOR_TITLE),
    ('ceiling', (0, (1, 2)), 'Dotted', CEILING_TITLE),
)
AROUND = ((6, 5, 'left'), (6, -11, 'left'), (-6, 5, 'right'), (-6, -11, 'right'))  # places of labels next to points, in points, line by line
Line = tuple[str, Sequence[tuple[float, Value]]]  # name, and (position, point) in order


def over_guidance(group: Group) -> list[tuple[Markup, str]]:
    """A panel for each measure of a group, a line a model; none if there is only a single point, unless it has a floor or a ceiling."""
    several = len(group.models) > 1
    one_scale = len(group.guidance) == 1 and several
    panels = []
    for measure in (measure for measure in group.measures if measure.has_curve and not group.of_autoencoders):
        points = [point for model in group.models for point in model.curves.get(measure, {}).values()]
        if not several and len(group.guidance) == 1 and not any('floor' in point or 'ceiling' in point for point in points):
            continue
        series = [
            (model.name, [(number if one_scale else guidance, point) for guidance, point in model.curves.get(measure, {}).items()])
            for number, model in enumerate(group.models)
        ]
        label = f'models, at guidance {group.guidance[0]:g}' if one_scale else 'guidance'
        panels.append(_panel(measure, series, label, with_legend=several, ticks=[] if one_scale else group.guidance))
    return panels


def against_clip(group: Group) -> list[tuple[Markup, str]]:
    """FID (or the first distance there is) against each CLIP score: a line a model through its scales of guidance, which label the points.

    None if there is only a single point.
    """
    if len(group.models) == 1 and len(group.guidance) == 1:
        return []
    curves = [measure for measure in group.measures if measure.has_curve]
    distances = [measure for measure in curves if measure.kind in DISTANCES]
    distances = [measure for measure in distances if measure.kind.startswith(('fid', 'fd_'))] or distances[:1]
    scores = [measure for measure in curves if measure.kind == 'clip']
    return [_against(group, distance, score) for distance in distances for score in scores]


def over_batches(group: Group) -> list[tuple[Markup, str]]:
    """Draw checkpoints of a run: a panel a measure over the batches trained, a line a guidance scale; none for fewer than two checkpoints."""
    trained = {model.name: batches for model in group.models if (batches := model.result['model']['batches']) is not None}
    models = sorted((model for model in group.models if model.name in trained), key=lambda model: trained[model.name])
    panels = list[tuple[Markup, str]]()
    for measure in (measure for measure in group.measures if measure.has_curve and len(set(trained.values())) > 1):
        curves = [(trained[model.name], model.curves.get(measure, {})) for model in models]
        series = [
            (f'guidance {guidance:g}', [(batches, curve[guidance]) for batches, curve in curves if guidance in curve]) for guidance in group.guidance
        ]
        panels.append(_panel(measure, series, 'batch', with_legend=True))
    return panels


def _panel(measure: Measure, series: Sequence[Line], label: str, with_legend: bool, ticks: Sequence[float] | None = None) -> tuple[Markup, str]:
    """A measure over `label`, with intervals and the band of two halves of the real images; and its caption.

    Args:
        ticks: of the horizontal axis; None: chosen, whole numbers.
    """
    points = [point for _, line in series for _, point in line]
    nulls = {point['null']: point.get('null_count') for point in points if 'null' in point}
    null = max(nulls, default=None)
    captions = list[str]()
    with page_style():
        figure = new_figure(4.2, 2.6 + (0.2 * len(series) if with_legend else 0))
        axis = figure.subplots()
        if null is not None:
            axis.axhline(null, color=LIGHT['faint'], linewidth=1, linestyle=(0, (2, 2)))
            if measure.lower_is_better:
                axis.axhspan(min(0.0, null), max(0.0, null), color=LIGHT['faint'], alpha=0.25, linewidth=0)
        for number, (_, line) in enumerate(series):
            if line:
                _draw(axis, number, [x for x, _ in line], [point['value'] for _, point in line], [point for _, point in line])
        captions += _draw_references(axis, series)
        axis.margins(0.08, 0.12)
        if null is not None and measure.lower_is_better:  # distances begin at zero, so that their height over the band is their size
            lowest = min(null, *(interval(point)[0] for point in points))
            axis.set_ylim(bottom=0.0 if lowest >= 0 else lowest - 0.05 * (axis.get_ylim()[1] - lowest))
        if ticks is None:
            axis.xaxis.set_major_locator(MaxNLocator(5, integer=True))
            axis.xaxis.set_major_formatter('{x:,.0f}')
        else:
            axis.set_xticks(_spaced(ticks), [f'{tick:g}' for tick in _spaced(ticks)])
        axis.set_title(f'{measure.title} ({measure.direction})', loc='left')
        axis.set_xlabel(label)
        axis.grid(alpha=0.8, linewidth=0.6)
        if with_legend:
            _legend(figure, [name for name, _ in series])
        each = f', {count:,} each' if null is not None and (count := nulls[null]) else ''
        if null is not None:
            captions.insert(0, f'Dashed: {null:.3g}, between two halves of the real images{each}.')
        return svg(figure, f'{measure.title} over {label}'), ' '.join(captions)


def _against(group: Group, distance: Measure, score: Measure) -> tuple[Markup, str]:
    several = len(group.models) > 1
    with page_style():
        figure = new_figure(4.2, 3.2 + (0.2 * len(group.models) if several else 0))
        axis = figure.subplots()
        for number, model in enumerate(group.models):
            across, down = model.curves.get(score, {}), model.curves.get(distance, {})
            scales = [guidance for guidance in across if guidance in down]
            if scales:
                xs, ys = [across[guidance] for guidance in scales], [down[guidance] for guidance in scales]
                _draw(axis, number, [x['value'] for x in xs], [y['value'] for y in ys], ys, xs)
                right, up, alignment = AROUND[number % len(AROUND)]
                options: dict[str, Any] = {'color': _colour(number), 'fontsize': 8, 'horizontalalignment': alignment}
                for x, y, guidance in zip(xs, ys, scales, strict=True):
                    axis.annotate(f'{guidance:g}', (x['value'], y['value']), (right, up), textcoords='offset points', **options)
        axis.margins(0.12, 0.14)
        axis.xaxis.set_major_locator(MaxNLocator(5))
        axis.set_xlabel(f'{score.title} ({score.direction})')
        axis.set_ylabel(f'{distance.title} ({distance.direction})')
        axis.grid(alpha=0.8, linewidth=0.6)
        if several:
            _legend(figure, [model.name for model in group.models])
        caption = 'Next to the points: guidance. Better models lie further to the right and lower.'
        return svg(figure, f'{distance.title} against {score.title}'), caption


def _draw(axis: Axes, number: int, xs: Sequence[float], ys: Sequence[float], y_points: Sequence[Value], x_points: Sequence[Value] = ()) -> None:
    """A line with markers and intervals; a point whose error is not known has none."""
    axis.errorbar(
        xs,
        ys,
        yerr=_reach(y_points),
        xerr=_reach(x_points) if x_points else None,
        color=_colour(number),
        marker=MARKERS[number % len(MARKERS)],
        linestyle='-' if number < len(SERIES) else '--',
        markersize=4.5,
        linewidth=1.5,
        elinewidth=1,
        capsize=2.5,
    )


def _draw_references(axis: Axes, series: Sequence[Line]) -> list[str]:
    """Draw floor and ceiling of a subject, across the whole panel where they are one number; return what the caption says of them."""
    captions = list[str]()
    for name, dashes, called, title in REFERENCES:
        curves: dict[tuple[tuple[float, float], ...] | float, int] = {}  # by the first line that has it: lines of one base share their floor
        for number, (_, line) in enumerate(series):
            points: list[tuple[float, float]] = [(x, point[name]) for x, point in line if name in point]  # type: ignore[literal-required]
            if points:
                values = {value for _, value in points}
                curves.setdefault(values.pop() if len(values) == 1 else tuple(points), number)
        for curve, number in curves.items():
            colour = LIGHT['faint'] if len(curves) == 1 else _colour(number)
            if isinstance(curve, float):
                axis.axhline(curve, color=colour, linewidth=1.2, linestyle=dashes)
            else:
                axis.plot(*zip(*curve, strict=True), color=colour, linewidth=1.2, linestyle=dashes)
        single = f', {next(iter(curves)):.3g}' if len(curves) == 1 and isinstance(next(iter(curves)), float) else ''
        captions += [f'{called}: {title}{single}.'] if curves else []
    return captions


def _reach(points: Sequence[Value]) -> list[float]:
    return [INTERVAL_ERRORS * point.get('error', 0.0) for point in points]


def _colour(number: int) -> str:
    return LIGHT[SERIES[number % len(SERIES)]]


def _legend(figure: Figure, names: Sequence[str]) -> None:
    lines = [
        figure.axes[0].plot(
            [], [], color=_colour(number), marker=MARKERS[number % len(MARKERS)], linestyle='-' if number < len(SERIES) else '--', markersize=4.5
        )[0]
        for number in range(len(names))
    ]
    shown = [f' {name if len(name) <= NAME_LIMIT else name[:NAME_LIMIT] + "…"}' for name in names]  # Matplotlib leaves out names that begin with _
    figure.legend(lines, shown, loc='outside lower left', ncols=1, fontsize=8)


def _spaced(ticks: Sequence[float], least: float = 0.06) -> list[float]:
    """Choose ticks that leave each other room for a number: at least this share of the whole length."""
    chosen = list(ticks[:1])
    for tick in ticks[1:]:
        if tick - chosen[-1] >= least * (ticks[-1] - ticks[0]):
            chosen.append(tick)
    return chosen
