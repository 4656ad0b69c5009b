"""The part of a report about GPUs: the law through each series, its predictions with their uncertainty, days, GPU-hours and dollars."""

from collections.abc import Sequence

from benchmarks.reporting.figures import MOST_SERIES, Curve, counted, days_figure, point_of
from benchmarks.reporting.page import Block, FigureBlock, Section, Table
from benchmarks.reporting.series import MEASURED, PREDICTED, WITH_OUTLIER, ScalingSeries, efficiency
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
Priced = tuple[ScalingSeries, Price | None]
"""A series with its price of a GPU-hour, if it has one."""


def scaling_section(series: Sequence[Priced], gpus: Sequence[int]) -> Section:
    """Return tables, statements and the figure of some series.

    Args:
        gpus: numbers of GPUs to predict, where they were not measured; none: twice and four times as many as measured.
    """
    blocks: list[Block] = [LAW]
    curves = []
    for one, price in series:
        laws = [one.fit_without_outliers, *([one.fit] if one.outliers else [])]
        possible, impossible = ahead(one, gpus)
        curve = Curve(one, *([law.predict(n, one.global_size(n)) for n in possible] for law in laws))
        curves.append(curve)
        law = str(laws[0])
        blocks += [f'{one.name}. {law[0].upper()}{law[1:]}.', *(_about_outlier(one, odd) for odd in one.outliers)]
        blocks += [f'Not to be relied on: {laws[0].doubt}.'] if laws[0].doubt else []
        blocks.append(_table(curve, price))
        if impossible:
            named = ', '.join(f'{n:,}' for n in impossible)
            blocks.append(
                f'Not predicted: {named} {one.unit}, as the global batch of {one.global_size(impossible[0]):,} images cannot be divided among so '
                'many. Ask for a divisor of it, or measure with another batch.'
            )
        paid = 'Days and GPU-hours' if price is None else f'Dollars at {price}. GPU-hours and dollars'
        blocks.append(f'{paid} are those of {one.work.amount}, training alone.')
    shown = curves[:MOST_SERIES]
    if len(shown) < len(curves):
        blocks.append(f'The figure shows the first {len(shown)} of {len(curves)} series.')
    if any(len(curve.series.points) + len(curve.predictions) > 1 for curve in shown):
        blocks.append(FigureBlock(days_figure(shown), 'Time to train: filled markers are measured, hollow ones predicted with their interval.'))
    return Section('Scaling', blocks)


def single_section(series: Sequence[Priced]) -> Section:
    """Return days, GPU-hours and dollars of series with one number of GPUs each."""
    rows = []
    for one, price in series:
        (point,) = one.points
        gpu_hours = one.gpu_hours(point)
        numbers = [f'{point.images_per_sec:,.1f}', few(one.days(point.images_per_sec)), few(gpu_hours)]
        paid = '' if price is None else f'${few(gpu_hours * price.dollars)}'
        rows.append([one.name, counted(point.num_gpus, one.unit), *numbers, paid, one.work.amount])
    named = [f'Dollars at {price}.' for price in dict.fromkeys(price for _, price in series) if price is not None]
    blocks: list[Block] = [Table(SINGLE, rows), *named, 'Training alone. More GPUs: --gpus 16,32, which takes scaling for linear.']
    return Section('One number of GPUs', blocks)


def ahead(series: ScalingSeries, gpus: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the numbers of GPUs to predict, those asked for that were not measured, and of these the ones that no batch can be divided among."""
    asked = sorted({*(gpus or (2 * series.most_gpus, 4 * series.most_gpus))} - {point.num_gpus for point in series.points})
    return [n for n in asked if not series.global_size(n) % n], [n for n in asked if series.global_size(n) % n]


def _about_outlier(series: ScalingSeries, odd: ScalingPoint) -> str:
    error = miss(fit(series.points, series.gpus_per_node, [odd]), odd)
    return (
        f'Outlier: {odd.images_per_sec:,.1f} images/s on {odd.num_gpus} {series.unit}. The law through the other points says '
        f'{odd.images_per_sec * (1 + error):,.1f}, {error:+.1%}. It is left out of the fit; with it: {series.fit}. '
        'Predictions are given without it and with it: measure before relying on the better.'
    )


def _table(curve: Curve, price: Price | None) -> Table:
    series, law = curve.series, curve.series.fit_without_outliers
    errors = dict(zip(law.points, law.leave_one_out, strict=True))
    rows = []

    def add(kind: str, point: ScalingPoint, interval: str, error: str, reach: str) -> None:
        rate, gpu_hours = point.images_per_sec, series.gpu_hours(point)
        share = efficiency([series.points[0], point])[1]
        numbers = [f'{rate:,.1f}', interval, f'{rate / point.num_gpus:,.2f}', f'{share:.1%}', error, reach, few(series.days(rate)), few(gpu_hours)]
        rows.append([kind, str(point.num_gpus), *numbers, *([] if price is None else [f'${few(gpu_hours * price.dollars)}'])])

    for point in series.points:
        odd = point in series.outliers
        error = miss(law, point) if odd else errors[point]
        spread = '' if point.spread is None else f'spread {point.spread:.1%}'
        add('outlier' if odd else MEASURED, point, spread, '' if error is None else f'{error:+.1%}', '')
    for kind, predictions in ((PREDICTED, curve.predictions), (WITH_OUTLIER, curve.with_outliers)):
        for one in predictions:
            typical = '' if one.leave_one_out is None else f'{one.leave_one_out:.1%}'
            add(kind, point_of(one), one.interval or 'none', typical, f'{one.extrapolation:.3g}x{" [no network]" if one.is_network_unseen else ""}')
    head = tuple(title.replace('GPUs', series.unit).replace('GPU-', f'{counted(1, series.unit)[2:]}-') for title in HEAD)
    return Table(head if price is None else (*head, 'dollars'), rows)


def few(value: float) -> str:
    """Write a number with three or four significant digits."""
    return f'{value:,.0f}' if value >= 1000 else f'{value:,.2f}' if value >= 1 else f'{value:.3g}'
