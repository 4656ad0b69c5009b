"""Pictures of a page about runs: curves over the batches (or the samples seen, where batches are not of one size), images, where the time went."""

from collections.abc import Iterable, Mapping, Sequence
from operator import add, sub
from pathlib import Path
from typing import NamedTuple

from markupsafe import Markup
from matplotlib.ticker import FuncFormatter, MaxNLocator
from PIL import Image, UnidentifiedImageError

from diffusion.common.files import open_regular, parse_json
from diffusion.common.images import InlineImage, cells, to_inline
from diffusion.common.pages import LIGHT, new_figure, page_style, svg
from diffusion.contracts.errors import RunError
from diffusion.evaluation.job.results import INTERVAL_ERRORS
from diffusion.evaluation.pages.figures import DISTANCES
from diffusion.monitoring.report.run import ERROR, EVAL, EVAL_LOSS, GRAD_NORM, LOSS, REMEDY, Run
from diffusion.monitoring.time_accounts import Accounts
from diffusion.recipe.techniques import LEARNING_RATE

MOST_GRIDS = 8  # in a page; the folder has all
MOST_GENERATED = 16
FEW_POINTS, SMOOTHED_POINTS = 12, 20  # each point of a short curve is marked; a long loss is smoothed
# Metric: title and factor.
PANELS = {
    LOSS: ('training loss', 1),
    EVAL_LOSS: ('evaluation loss', 1),
    LEARNING_RATE: ('learning rate', 1),
    GRAD_NORM: ('gradient norm, before clipping', 1),
    'throughput/images_per_sec': ('images/s', 1),
    'throughput/mfu': ('MFU, %', 100),
    'throughput/peak_memory_gb': ('peak memory, GB', 1),
    'throughput/data_wait_share': ('waiting for data, %', 100),
}
LOSSES = (LOSS, EVAL_LOSS, GRAD_NORM)  # on a logarithmic scale, and smoothed
# Told apart without colour, and neighbours in the bar by their hatches too: (colour of the palette, hatch).
TEXTURES = {
    'compute': ('series1', ''), 'recompute': ('bad', 'xxx'), 'start': ('panel', '///'), 'data wait': ('page', '...'), 'save': ('series3', ''),
    'upload': ('series5', '+++'),
    'evaluation': ('series2', '---'), 'sampling': ('series4', '|||'), 'stopped': ('page', ''), 'other': ('faint', ''),
}  # fmt: skip


def curves(runs: Mapping[str, Run]) -> list[tuple[Markup, str]]:
    """A figure for each metric that a run has logged, with what it shows.

    Args:
        runs: by the name in the legend, which a single run does not have.
    """
    names = list(PANELS)
    logged = {name for run in runs.values() for record in run.log for name in record}
    scores = sorted({name for run in runs.values() for name in run.scores})
    return [_panel(metric, runs) for metric in [*names[:2], *scores, *names[2:]] if metric in logged]


def name_in_recipes(metric: str) -> str:
    """`kid@random-conv` for `metrics/eval/kid/random-conv`; `cmmd, unbiased` for `metrics/eval/cmmd_unbiased`."""
    return metric.removeprefix(EVAL).replace('/', '@').replace('_unbiased', ', unbiased')


def _panel(metric: str, runs: Mapping[str, Run]) -> tuple[Markup, str]:
    title, factor = PANELS.get(metric, (f'{name_in_recipes(metric)} of drawn images', 1))
    by_samples = len({run.global_size for run in runs.values()}) > 1  # a batch of one is then not a batch of the other
    across = 'samples seen' if by_samples else 'batch'
    with page_style():
        figure = new_figure(4.2, 2.5 if len(runs) == 1 else 2.5 + 0.2 * len(runs))
        axis = figure.subplots()
        lowest, highest, has_errors = 0.0, 0.0, False
        for index, (name, run) in enumerate(runs.items()):
            points = [(batch * (run.global_size if by_samples else 1), value * factor) for batch, value in run.points(metric)]
            if not points:
                continue
            positions, values = zip(*points, strict=True)
            lowest, highest = min(lowest, *values), max(highest, *values)
            colour, marker = f'C{index}', 'o' if len(points) < FEW_POINTS else ''
            smooth = metric in LOSSES and len(points) > SMOOTHED_POINTS
            axis.plot(positions, values, color=colour, marker=marker, markersize=4, linewidth=0.8 if smooth else 1.6, alpha=0.35 if smooth else 1)
            if errors := dict(run.points(metric + ERROR)):
                has_errors, reach = True, [INTERVAL_ERRORS * errors.get(batch, 0.0) for batch, _ in run.points(metric)]
                axis.errorbar(positions, values, yerr=reach, color=colour, linestyle='', elinewidth=1, capsize=2.5)
                lowest, highest = min(lowest, *map(sub, values, reach)), max(highest, *map(add, values, reach))
            if smooth:
                axis.plot(positions, smoothed(values), color=colour, linewidth=1.8)
            if len(runs) > 1:
                axis.plot([], [], color=colour, label=name, linewidth=2)
        if metric in LOSSES and all(value > 0 for run in runs.values() for _, value in run.points(metric)):
            axis.set_yscale('log')
            axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f'{value:g}'))
            lowest, highest = axis.get_ylim()
            digits = '235' if highest > 5 * lowest else '123456789'  # as many as there is room for
            axis.yaxis.set_minor_formatter(FuncFormatter(lambda value, _: f'{value:g}' if f'{value:e}'[0] in digits else ''))
        else:
            axis.set_ylim(1.12 * lowest, 1.12 * highest or 1)  # only scores fall below 0
            axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f'{value:,.0f}' if value >= 1000 else f'{value:.3g}'))
        axis.set_title(title, loc='left')
        axis.set_xlabel(across)
        axis.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        axis.xaxis.set_major_formatter('{x:,.0f}')
        axis.grid(alpha=0.8, linewidth=0.6)
        if len(runs) > 1:
            figure.legend(loc='outside lower left', ncols=1, fontsize=8)
        kind = name_in_recipes(metric).partition('@')[0].partition(',')[0]
        caption = '' if metric in PANELS else 'Lower is better.' if kind in DISTANCES else 'Higher is better.'
        caption += ' Bars: two standard deviations to either side.' if has_errors else ''
        return svg(figure, f'{title} over {"samples seen" if by_samples else "batches"}'), caption


def smoothed(values: Sequence[float], reach: int = 5) -> list[float]:
    """Moving average over `reach` values to either side, fewer at the ends."""
    windows = [values[max(0, i - reach) : i + reach + 1] for i in range(len(values))]
    return [sum(window) / len(window) for window in windows]


def time_bar(accounts: Accounts) -> Markup:
    """Shares of the wall time, as one bar."""
    with page_style():
        figure = new_figure(8.6, 1.5)
        axis = figure.subplots()
        left = 0.0
        for name, (colour, hatch) in TEXTURES.items():
            share = 100 * accounts.sec[name] / accounts.wall_sec
            if share >= 0.05:
                label = f'{name} {share:.1f} %'
                axis.barh(0, share, left=left, color=LIGHT[colour], hatch=hatch, edgecolor=LIGHT['ink'], linewidth=0.8, label=label)
            left += share
        axis.set_xlim(0, 100)
        axis.set_yticks([])
        axis.set_xlabel('% of the wall time')
        axis.spines['left'].set_visible(False)
        figure.legend(loc='outside upper left', ncols=5, handlelength=2.5, handleheight=1.3)
        return svg(figure, 'where the time went')


class Grid(NamedTuple):
    """A file in `samples/`."""

    caption: str
    prompts: Sequence[str]
    images: Sequence[Image.Image]


def sample_grids(run: Path) -> tuple[list[Grid], int]:
    """Read at most MOST_GRIDS of a run's grids, evenly spread, with the first and the last; also return how many there are."""
    paths = sorted((run / 'samples').glob('ba*.png'))
    count = min(MOST_GRIDS, len(paths))
    chosen = sorted({round(i * (len(paths) - 1) / max(1, count - 1)) for i in range(count)})
    return [_read_grid(paths[index]) for index in chosen], len(paths)


def _read_grid(path: Path) -> Grid:
    batch, _, weights = path.stem.removeprefix('ba').partition('-')
    image = _open(path)
    try:
        prompts = parse_json(image.info.get('prompts', '[]'))  # SampleGrid writes them
        if not isinstance(prompts, list) or not all(isinstance(prompt, str) for prompt in prompts):
            raise ValueError('its prompts are no list of texts')
        images = cells(image, len(prompts)) if prompts else [image]
        if not all(images[0].size):
            raise ValueError(f'{len(prompts):,} prompts of {image.width} x {image.height} pixels')
    except ValueError as error:
        raise RunError(f'{path}: is no grid of samples: {error}; {REMEDY}') from error
    return Grid(f'batch {int(batch) if batch.isdecimal() else 0:,}, {weights} weights', prompts or [''], images)


def _open(path: Path) -> Image.Image:
    try:
        with open_regular(path) as file, Image.open(file, formats=('PNG',)) as image:
            image.load()
            return image.copy()  # with its texts
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:  # SyntaxError: Pillow of a broken PNG
        reason = 'not a PNG' if isinstance(error, UnidentifiedImageError) else error
        raise RunError(f'{path}: cannot be read: {reason}; {REMEDY}') from error


def strips(grids: Iterable[tuple[str, Grid]]) -> dict[str, list[InlineImage]]:
    """Arrange the images of all grids by prompt, in order, with these captions."""
    arranged = dict[str, list[InlineImage]]()
    for caption, one in grids:
        for prompt, image in zip(one.prompts, one.images, strict=True):
            arranged.setdefault(prompt, []).append(to_inline(image, caption))
    return arranged


def generated(run: Path) -> tuple[list[InlineImage], int]:
    """Read the first MOST_GENERATED images of the exported model, each with its prompt; also return how many there are."""
    paths = sorted((run / 'generated').glob('[0-9]*.png'))
    images = map(_open, paths[:MOST_GENERATED])
    return [to_inline(image, str(image.info.get('prompt', ''))) for image in images], len(paths)
