"""Curves over the batches, or over the samples seen where batches are not of one size; a panel a metric, one line a run."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from markupsafe import Markup
from matplotlib.ticker import FuncFormatter, MaxNLocator

from diffusion.common.pages import new_figure, page_style, svg
from diffusion.evaluation.pages.figures import DISTANCES
from diffusion.monitoring.metrics import LEARNING_RATE
from diffusion.monitoring.report.run import EVAL, EVAL_LOSS, GRAD_NORM, LOSS, Run


class Panel(NamedTuple):
    metric: str
    title: str
    factor: float = 1.0
    is_loss: bool = False
    caption: str = ''


PANELS = (
    Panel(LOSS, 'training loss', is_loss=True),
    Panel(EVAL_LOSS, 'evaluation loss', is_loss=True),
    Panel(LEARNING_RATE, 'learning rate'),
    Panel(GRAD_NORM, 'gradient norm, before clipping', is_loss=True),
    Panel('throughput/images_per_sec', 'images/s'),
    Panel('throughput/mfu', 'MFU, %', 100.0),
    Panel('throughput/peak_memory_gb', 'peak memory, GB'),
    Panel('throughput/data_wait_share', 'waiting for data, %', 100.0),
)


def curves(runs: Mapping[str, Run]) -> list[tuple[Markup, str]]:
    """A figure for each metric that a run has logged, with what it shows.

    Args:
        runs: by the name in the legend, which a single run does not have.
    """
    by_samples = len({run.global_size for run in runs.values()}) > 1  # a batch of one is then not a batch of the other
    scores = (Panel(metric, score_title(metric), caption=direction(metric)) for metric in score_names(runs.values()))
    panels = [*PANELS[:2], *scores, *PANELS[2:]]
    return [_panel(panel, runs, by_samples) for panel in panels if any(run.points(panel.metric) for run in runs.values())]


def score_names(runs: Iterable[Run]) -> list[str]:
    """The metrics of drawn images that the runs have logged, sorted; those of the loss are not among them."""
    return sorted({name for run in runs for record in run.log for name in record if name.startswith(EVAL) and not name.startswith(EVAL_LOSS)})


def score_title(metric: str) -> str:
    """`kid@random-conv of drawn images`, named as in the recipe."""
    return f'{name_in_recipes(metric)} of drawn images'


def direction(metric: str) -> str:
    """Which way a score gets better."""
    kind = name_in_recipes(metric).partition('@')[0].partition(',')[0]
    return 'Lower is better.' if kind in DISTANCES else 'Higher is better.'


def name_in_recipes(metric: str) -> str:
    """`kid@random-conv` for `metrics/eval/kid/random-conv`; `cmmd, unbiased` for `metrics/eval/cmmd_unbiased`."""
    return metric.removeprefix(EVAL).replace('/', '@').replace('_unbiased', ', unbiased')


def _panel(panel: Panel, runs: Mapping[str, Run], by_samples: bool) -> tuple[Markup, str]:
    with page_style():
        figure = new_figure(4.2, 2.5 if len(runs) == 1 else 2.5 + 0.2 * len(runs))
        axis = figure.subplots()
        lowest, highest, few = 0.0, 0.0, False
        for index, (name, run) in enumerate(runs.items()):
            points = [(batch * (run.global_size if by_samples else 1), value * panel.factor) for batch, value in run.points(panel.metric)]
            if not points:
                continue
            positions, values = zip(*points, strict=True)
            lowest, highest, few = min(lowest, *values), max(highest, *values), few or len(points) < 12
            colour, marker = f'C{index}', 'o' if len(points) < 12 else ''
            smooth = panel.is_loss and len(points) > 20
            axis.plot(positions, values, color=colour, marker=marker, markersize=4, linewidth=0.8 if smooth else 1.6, alpha=0.35 if smooth else 1)
            if smooth:
                axis.plot(positions, smoothed(values), color=colour, linewidth=1.8)
            if len(runs) > 1:
                axis.plot([], [], color=colour, label=name, linewidth=2)
        if panel.is_loss and all(value > 0 for run in runs.values() for _, value in run.points(panel.metric)):
            axis.set_yscale('log')
            axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f'{value:g}'))
            lowest, highest = axis.get_ylim()
            digits = '235' if highest > 5 * lowest else '123456789'  # as many as there is room for
            axis.yaxis.set_minor_formatter(FuncFormatter(lambda value, _: f'{value:g}' if f'{value:e}'[0] in digits else ''))
        else:
            axis.set_ylim(1.12 * lowest, 1.12 * highest or 1)  # only scores fall below 0
            axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f'{value:,.0f}' if value >= 1000 else f'{value:.3g}'))
        axis.set_title(panel.title, loc='left')
        axis.set_xlabel('samples seen' if by_samples else 'batch')
        axis.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        axis.xaxis.set_major_formatter('{x:,.0f}')
        axis.grid(alpha=0.8, linewidth=0.6)
        if len(runs) > 1:
            figure.legend(loc='outside lower left', ncols=1, fontsize=8)
        return svg(figure, f'{panel.title} over {"samples seen" if by_samples else "batches"}'), panel.caption


def smoothed(values: Sequence[float], reach: int = 5) -> list[float]:
    """Moving average over `reach` values to either side, fewer at the ends."""
    windows = [values[max(0, i - reach) : i + reach + 1] for i in range(len(values))]
    return [sum(window) / len(window) for window in windows]
