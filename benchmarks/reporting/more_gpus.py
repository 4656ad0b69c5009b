"""The part of a report about more GPUs: the law through each series, its predictions with their uncertainty, days, GPU-hours and dollars."""

from collections.abc import Sequence

from benchmarks.reporting.figures import MOST_SERIES, Curve, counted, days_figure, efficiency_figure, point_of
from benchmarks.reporting.page import Block, FigureBlock, Section, Table
from benchmarks.reporting.series import MEASURED, PREDICTED, WITH_OUTLIER, ScalingSeries, efficiency, published_series
from diffusion.cost.prices import Price
from diffusion.cost.scaling import ScalingPoint, fit, miss

HEAD = ('', 'GPUs', 'images/s', 'interval', 'each', 'efficiency', 'leave-one-out', 'times measured', 'days', 'GPU-hours')

SINGLE = ('', 'on:', 'images/s', 'days', 'GPU-hours', 'dollars', 'of:')

LAW = (
    'The law: seconds of a step = a x images per GPU + c x (m - 1)/m on m nodes + f, with a, c and f of at least 0: computation, communication '
    'that is not hidden, and what every step costs. Intervals are those of one more measurement with 95 % probability, if the law is true, '
    'and end where a GPU would do 10 % more than the best that was measured. '
    'Leave-one-out: what the law through the other points says of a point, against the point; of a prediction, the root mean square over the '
    'points that it is made of. [no network]: nothing was measured on several nodes, and the prediction takes their network for free.'
)


def scaling_section(series: Sequence[tuple[ScalingSeries, Price | None]], gpus: Sequence[int]) -> Section:
    """Return tables, statements and figures of some series.

    Args:
        series: each with its price of a GPU-hour, if it has one.
        gpus: numbers of GPUs to predict, where they were not measured; none: twice and four times as many as measured.
    """
    blocks: list[Block] = [LAW]
    curves = []
    for one, price in series:
        laws = [one.fit_without_outliers, *([one.fit] if one.outliers else [])]
        curve = Curve(one, *([law.predict(n, one.global_size(n)) for n in ahead(one, gpus)] for law in laws))
        curves.append(curve)
        law = str(laws[0])
        blocks += [f'{one.name}. {law[0].upper()}{law[1:]}.', *_outliers(one)]
        blocks += [f'Not to be relied on: {laws[0].doubt}.'] if laws[0].doubt else []
        blocks.append(_table(curve, price))
        if missing := left_out(one, gpus):
            blocks.append(missing)
        if price is not None:
            blocks.append(f'Dollars at {price}. GPU-hours and dollars are those of {one.work.name}, training alone.')
        else:
            blocks.append(f'Days and GPU-hours are those of {one.work.name}, training alone.')
    shown = curves[:MOST_SERIES]
    if len(shown) < len(curves):
        blocks.append(f'The figures show the first {len(shown)} of {len(curves)} series.')
    others = [Curve(one, []) for one in published_series()][: MOST_SERIES - len(shown)]
    return Section('Scaling', [*blocks, *_figures(shown, others)])


def single_section(series: Sequence[tuple[ScalingSeries, Price | None]]) -> Section:
    """Return days, GPU-hours and dollars of series with one number of GPUs each."""
    rows = []
    for one, price in series:
        for point in one.points:
            rate, work = point.images_per_sec, one.work
            gpu_hours = work.gpu_hours(point)
            numbers = [f'{rate:,.1f}', few(work.days(rate)), few(gpu_hours), '' if price is None else f'${few(gpu_hours * price.dollars)}']
            rows.append([one.name, counted(point.num_gpus, one.unit), *numbers, work.name])
    named = [f'Dollars at {price}.' for price in dict.fromkeys(price for _, price in series) if price is not None]
    blocks: list[Block] = [Table(SINGLE, rows), *named, 'Training alone. More GPUs: --gpus 16,32, which takes scaling for linear.']
    return Section('One number of GPUs', blocks)


def ahead(series: ScalingSeries, gpus: Sequence[int]) -> list[int]:
    """Return the numbers of GPUs to predict: those asked for that were not measured, and that a batch can be divided among."""
    return [n for n in _asked(series, gpus) if not series.global_size(n) % n]


def left_out(series: ScalingSeries, gpus: Sequence[int]) -> str:
    """Say which of those asked for are not predicted, and why; nothing if all are."""
    impossible = [n for n in _asked(series, gpus) if series.global_size(n) % n]
    if not impossible:
        return ''
    named = ', '.join(f'{n:,}' for n in impossible)
    return (
        f'Not predicted: {named} {series.unit}, as the global batch of {series.global_size(impossible[0]):,} images cannot be divided among so many. '
        'Ask for a divisor of it, or measure with another batch.'
    )


def _asked(series: ScalingSeries, gpus: Sequence[int]) -> list[int]:
    measured = {point.num_gpus for point in series.points}
    return sorted({*(gpus or (2 * series.most_gpus, 4 * series.most_gpus))} - measured)


def _outliers(series: ScalingSeries) -> list[str]:
    texts = []
    for odd in series.outliers:
        error = miss(fit(series.points, series.gpus_per_node, [odd]), odd)
        texts.append(
            f'Outlier: {odd.images_per_sec:,.1f} images/s on {odd.num_gpus} {series.unit}. The law through the other points says '
            f'{odd.images_per_sec * (1 + error):,.1f}, {error:+.1%}. It is left out of the fit; with it: {series.fit}. '
            'Predictions are given without it and with it: measure before relying on the better.'
        )
    return texts


def _table(curve: Curve, price: Price | None) -> Table:
    series, law = curve.series, curve.series.fit_without_outliers
    errors = dict(zip(law.points, law.leave_one_out, strict=True))
    first = series.points[0]
    rows = []
    for point, share in zip(series.points, efficiency(series.points), strict=True):
        odd = point in series.outliers
        error = miss(law, point) if odd else errors[point]
        spread = '' if point.spread is None else f'spread {point.spread:.1%}'
        kind = 'outlier' if odd else MEASURED
        rows.append([kind, *_numbers(series, point, spread, share, '' if error is None else f'{error:+.1%}', '', price)])
    for kind, prediction in [*((PREDICTED, one) for one in curve.predictions), *((WITH_OUTLIER, one) for one in curve.with_outliers)]:
        point = point_of(prediction)
        interval = prediction.interval or 'none'
        typical = '' if prediction.leave_one_out is None else f'{prediction.leave_one_out:.1%}'
        share = efficiency([first, point])[1]
        reach = f'{prediction.extrapolation:.3g}x{" [no network]" if prediction.is_network_unseen else ""}'
        rows.append([kind, *_numbers(series, point, interval, share, typical, reach, price)])
    head = tuple(title.replace('GPUs', series.unit).replace('GPU-', f'{counted(1, series.unit)[2:]}-') for title in HEAD)
    return Table((*head, 'dollars') if price is not None else head, rows)


def _numbers(series: ScalingSeries, point: ScalingPoint, interval: str, share: float, error: str, reach: str, price: Price | None) -> list[str]:
    work, rate = series.work, point.images_per_sec
    numbers = [
        str(point.num_gpus), f'{rate:,.1f}', interval, f'{rate / point.num_gpus:,.2f}', f'{share:.1%}', error, reach,
        few(work.days(rate)), few(work.gpu_hours(point)),
    ]  # fmt: skip
    return numbers if price is None else [*numbers, f'${few(work.gpu_hours(point) * price.dollars)}']


def few(value: float) -> str:
    """Write a number with three or four significant digits."""
    return f'{value:,.0f}' if value >= 1000 else f'{value:,.2f}' if value >= 1 else f'{value:.3g}'


def _figures(curves: Sequence[Curve], others: Sequence[Curve]) -> list[FigureBlock]:
    if all(len(curve.series.points) + len(curve.predictions) < 2 for curve in curves):
        return []
    same = [other for other in others if any(other.series.work == curve.series.work for curve in curves)]
    caption = 'Time to train over the number of GPUs: filled markers are measured, hollow ones predicted with their interval'
    return [
        FigureBlock('days', days_figure([*curves, *same]), f'{caption}{"; published series next to ours" if same else ""}.'),
        FigureBlock('efficiency', efficiency_figure(curves), 'Images per second per GPU, in % of that of the fewest GPUs measured.'),
    ]
