"""A report on result files: what was measured, where and how; scaling and cost; the loader; which lever gives what."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from benchmarks.reporting.figures import bars_figure, counted
from benchmarks.reporting.more_gpus import ahead, few, scaling_section
from benchmarks.reporting.page import Block, Notes, Picture, Report, Section, Table
from benchmarks.reporting.rows import Group, Result, Results, group, label
from benchmarks.reporting.series import MILLION, Bar, Series
from benchmarks.reporting.ways_to_pay import cost_section
from diffusion.cost.formulas import SD2_BASE, days, dollars, gpu_hours, run_hours
from diffusion.cost.prices import Price, Prices

CLAIMED_LOADER_RATIO = 30  # "at least 30 times the throughput of the model": the MosaicML post of January 2023
MOST_BARS = 12
IN_THE_STEP = {'latents': 'U-Net, text', 'images': 'U-Net, text, VAE', 'synthetic': 'U-Net, text; random latents'}

SPEED = (
    'point', 'status:', 'GPUs', 'images/s', 'per GPU', 'spread', 'MFU', 'ms a step', 'peak GB', 'reserved GB', 'waits for data', 'loader / model',
    'warm-up', 'steps', 'where',
)  # fmt: skip
SETTINGS = (
    'point', 'nodes x GPUs', 'U-Net:', 'px', 'in the step:', 'precision:', 'global', 'micro', 'accumulation', 'sharding:', 'compiled:',
    'attention:', 'recomputed:', 'EMA:', 'GFLOP an image',
)  # fmt: skip
MACHINES = ('where', 'device:', 'memory GB', 'CPU:', 'cores', 'torch', 'CUDA', 'driver', 'commit', 'date:')

WORDS = (
    'images/s: wall clock over whole windows of steps after the warm-up, loader and logging included, evaluation and checkpoints not; the median '
    'of the windows, and their interquartile range as a share of it (spread). MFU = images/s per GPU x FLOP of the U-Net per image, forward and '
    'backward (2 FLOP a multiply-add, no encoders, nothing computed twice) / dense 16-bit peak of the GPU; empty where the peak is unknown.'
)


def report_of(results: Results, source: str, prices: Prices, gpus: Sequence[int], gpu: str | None, published: Sequence[Series]) -> Report:
    """Of what result files hold.

    Args:
        source: the files, in words.
        gpus: numbers of GPUs to predict; none: twice and four times those measured.
        gpu: whose price, by its name in the list of prices; None: by the name of the device.
        published: series of others, to be shown beside measurements of the same work.
    """
    groups = group(results.throughput)
    sections: list[Section | None] = []
    if results.throughput:
        sections += [_speed(results.throughput), _settings(results.throughput)]
    if groups:
        series = [one.series for one in groups]
        priced = [price_of(one, prices, gpu) for one in groups]
        sections.append(scaling_section(series, gpus, priced, published))
        sections += [*_runs(groups, gpus, prices, gpu), _loader(results.throughput)]
    bars = [*_sweep_bars(results.throughput), *_step_bars(results.steps)]
    if bars:
        caption = 'Images per second by configuration; factors are over the first bar of a panel.'
        sections.append(Section('Levers', [Picture('ablation', bars_figure(bars), caption)]))
    return Report('Throughput, scaling and cost', _lead(results, source), [section for section in sections if section is not None])


def gpu_of(one: Group, prices: Prices, gpu: str | None) -> str | None:
    """The name in the list of prices: the one given, or the first all of whose words are in the device's name; None: there is none."""
    names = dict.fromkeys(name.split('.')[1] for name in prices if name.startswith('gpu_hour.'))
    device = one.device.lower()
    return gpu or next((name for name in names if all(word in device for word in name.split('-'))), None)


def price_of(one: Group, prices: Prices, gpu: str | None) -> Price | None:
    """The first price of the group's GPU, or None.

    Raises:
        PriceError: there is none of the name given.
    """
    name = gpu_of(one, prices, gpu)
    return None if name is None else prices[f'gpu_hour.{name}']


def _lead(results: Results, source: str) -> str:
    rows = [*results.throughput, *results.steps]
    rated = sum(result.is_rated for result in rows)
    text = f'{source}: {len(rows)} points, {rated} with numbers.'
    if results.num_superseded:
        text += f' Of points that were measured again only the last row counts ({results.num_superseded} left out).'
    if results.num_unread:
        text += f' Lines that could not be read, as a kill leaves them: {results.num_unread}.'
    return text


def _speed(results: Sequence[Result]) -> Section:
    machines = _machines(results)
    rows, notes = [], list[str]()
    for result in results:
        status = result.status
        if result.text('reason'):
            notes.append(f'{result.label}: {result.status}: {result.text("reason")}')
            status += f' [{len(notes)}]'
        rows.append([
            result.label, status, str(result.num_gpus),
            _number(result, 'images_per_sec', '{:,.1f}'), _number(result, 'images_per_sec_per_gpu', '{:,.2f}'),
            _number(result, 'images_per_sec_spread', '{:.1%}'), _number(result, 'mfu', '{:.1%}'), _number(result, 'step_sec', '{:,.1f}', 1e3),
            _number(result, 'peak_allocated_bytes', '{:,.2f}', 1e-9), _number(result, 'peak_reserved_bytes', '{:,.2f}', 1e-9),
            _number(result, 'data_wait_share', '{:.1%}'), _number(result, 'loader_ratio', '{:,.1f}'), _number(result, 'warmup_steps', '{:,.0f}'),
            _number(result, 'measured_steps', '{:,.0f}'), str(1 + list(machines).index(_machine(result))),
        ])  # fmt: skip
    blocks: list[Block] = [WORDS, Table(SPEED, rows)]
    if notes:
        blocks += ['Why:', Notes(notes)]
    named = [[str(i), *row] for i, row in enumerate(machines.values(), 1)]
    return Section('Measured', [*blocks, 'Where and when:', Table(MACHINES, named)])


def _settings(results: Sequence[Result]) -> Section:
    rows = [
        [
            result.label, f'{result.text("num_nodes") or "?"} x {result.text("gpus_per_node") or "?"}', result.text('unet'),
            result.text('resolution'), IN_THE_STEP.get(result.text('kind'), result.text('kind')),
            result.text('precision'), result.text('global_size'), result.text('micro_size'), result.text('accumulation'), result.text('sharding'),
            result.text('compile') or 'no', result.text('attention'), _yes(result, 'checkpoint_activations'), _yes(result, 'ema'),
            _number(result, 'flop_per_image', '{:,.4g}', 1e-9),
        ]
        for result in results
    ]  # fmt: skip
    same = [i for i in range(1, len(SETTINGS)) if len({row[i] for row in rows}) == 1]
    kept = [i for i in range(len(SETTINGS)) if i not in same]
    equal = '; '.join(f'{SETTINGS[i].removesuffix(":")}: {rows[0][i] or "not known"}' for i in same)
    blocks: list[Block] = [f'The same for all points: {equal}.'] if equal else []
    return Section('Settings', [*blocks, Table([SETTINGS[i] for i in kept], [[row[i] for i in kept] for row in rows])])


def _machine(result: Result) -> tuple[str, ...]:
    """What tells measurements' surroundings apart; by day, for rows of one sweep differ by minutes."""
    keys = ('gpu', 'cpu', 'num_cores', 'torch', 'cuda', 'driver', 'commit')
    return (*(result.text(key) for key in keys), result.text('date')[:10])


def _machines(results: Iterable[Result]) -> dict[tuple[str, ...], list[str]]:
    machines: dict[tuple[str, ...], list[str]] = {}
    for result in results:
        device = result.text('gpu') or result.text('device') or 'unknown'
        texts = [result.text(key) for key in ('cpu', 'num_cores', 'torch', 'cuda', 'driver', 'commit')]
        memory = _number(result, 'gpu_memory_bytes', '{:,.0f}', 1e-9)
        machines.setdefault(_machine(result), [device, memory, *texts, result.text('date')[:10]])
    return machines


def _runs(groups: Sequence[Group], gpus: Sequence[int], prices: Prices, gpu: str | None) -> list[Section | None]:
    """Days, GPU-hours and dollars of all phases of Stable Diffusion 2 base, where each was measured in the same way; else of single phases."""
    sections: list[Section | None] = []
    for parts in _phases(groups):
        first = parts[min(parts)]
        phases = [phase for phase in SD2_BASE if phase.resolution in parts]
        name = first.series.name if len(parts) == 1 else f'{first.series.name}, and the same at {phases[1].resolution} px'
        measured = set.intersection(*({point.num_gpus for point in part.series.points} for part in parts.values()))
        foretold = {n for part in parts.values() for n in ahead(part.series, gpus)}
        rates = {n: {resolution: rate_of(part.series, n) for resolution, part in parts.items()} for n in sorted(measured | foretold)}
        price = price_of(first, prices, gpu)
        if len(parts) > 1:
            sections.append(Section('Stable Diffusion 2 base, both phases', _both_phases(name, rates, measured, price)))
        priced = gpu_of(first, prices, gpu)
        if priced is not None:
            stem = f'-{len(sections)}' if sections and len(groups) > len(parts) else ''
            sections.append(cost_section(f'{name}: {" and ".join(phase.amount for phase in phases)}', phases, rates, priced, prices, stem))
    return sections


def _phases(groups: Sequence[Group]) -> list[dict[int, Group]]:
    """Groups of Stable Diffusion 2 base by resolution, those together that were measured in the same way."""
    families: dict[str, dict[int, Group]] = {}
    for one in groups:
        if one.series.work != MILLION:
            families.setdefault(one.family, {})[one.resolution] = one
    return list(families.values())


def _both_phases(name: str, rates: Mapping[int, Mapping[int, float]], measured: set[int], price: Price | None) -> list[Block]:
    rows = []
    for num_gpus, images_per_sec in rates.items():
        wall = run_hours(SD2_BASE, images_per_sec)
        total = gpu_hours(wall, num_gpus)
        row = ['measured' if num_gpus in measured else 'predicted', str(num_gpus), few(days(wall)), few(total)]
        rows.append([*row, f'${few(dollars(total, price.dollars))}'] if price is not None else row)
    head = ('', 'GPUs', 'days', 'GPU-hours')
    blocks: list[Block] = [f'{name}.', Table((*head, 'dollars') if price is not None else head, rows)]
    if price is not None:
        blocks.append(f'Dollars at {price}. Training alone: encoding, storage, restarts and evaluation come on top.')
    return blocks


def rate_of(series: Series, num_gpus: int) -> float:
    """Images per second as measured, or else as the law says."""
    for point in series.points:
        if point.num_gpus == num_gpus:
            return point.images_per_sec
    return series.fit_without_outliers.predict(num_gpus, series.global_size(num_gpus)).images_per_sec


def _loader(results: Sequence[Result]) -> Section | None:
    ratios = [(ratio, result) for result in results if (ratio := result.number('loader_ratio')) is not None and result.is_rated]
    if not ratios:
        return None
    worst, result = min(ratios, key=lambda pair: pair[0])
    enough = sum(ratio >= CLAIMED_LOADER_RATIO for ratio, _ in ratios)
    text = (
        f'With nothing else to do the loader gives between {worst:,.1f} ({result.label}) and {max(ratio for ratio, _ in ratios):,.1f} times what the '
        f'model takes. The MosaicML post claims at least {CLAIMED_LOADER_RATIO} for its own: {enough} of {len(ratios)} points reach that. '
        'Below 1 training would wait for data.'
    )
    return Section('Loader', [text])


def _sweep_bars(results: Sequence[Result]) -> list[tuple[str, list[Bar]]]:
    """A panel a sweep, U-Net, resolution and number of GPUs, of settings that differ in something else."""
    panels: dict[str, list[Result]] = {}
    for result in results:
        if result.is_rated:
            unit = 'GPUs' if result.on_gpus else 'processes'
            title = f'{result.text("sweep")}: {result.text("unet")}, {result.text("resolution")} px, {counted(result.num_gpus, unit)}'
            panels.setdefault(title, []).append(result)
    return [
        (title, [Bar(name, row.number('images_per_sec') or 0.0) for name, row in zip(_differing(rows), rows, strict=True)])
        for title, rows in panels.items()
        if 1 < len(rows) <= MOST_BARS
    ]


def _differing(rows: Sequence[Result]) -> list[str]:
    """Labels without what is equal for all."""
    axes = [key for key in rows[0].settings if len({str(row.settings.get(key)) for row in rows}) > 1]
    return [label({key: row.settings.get(key) for key in axes}) or row.label for row in rows]


def _step_bars(results: Sequence[Result]) -> list[tuple[str, list[Bar]]]:
    """A panel a setting of benchmarks/step.py."""
    panels: dict[str, list[Bar]] = {}
    for result in results:
        rate = result.number('images_per_sec')
        if result.is_rated and rate:
            setting = f'{result.text("unet")}, {result.text("resolution")} px, {result.text("kind")}, micro-batch {result.text("micro_batch")}'
            title = f'{setting}\n{result.text("gpu") or result.text("cpu")}, {result.text("commit")}'
            panels.setdefault(title, []).append(Bar(result.label, rate))
    return list(panels.items())


def _number(result: Result, key: str, pattern: str, factor: float = 1.0) -> str:
    value = result.number(key)
    return '' if value is None else pattern.format(value * factor)


def _yes(result: Result, key: str) -> str:
    value = result.row.get(key)
    return '' if value is None else 'yes' if value else 'no'
