"""A report on result files: measurements with their hardware and settings; scaling and cost; the loader; bars by setting."""

from collections.abc import Iterable, Mapping, Sequence

from benchmarks.reporting.figures import bars_figure, counted
from benchmarks.reporting.more_gpus import ahead, few, scaling_section, single_section
from benchmarks.reporting.page import Block, FigureBlock, Notes, Report, Section, Table
from benchmarks.reporting.series import LOWER_LAW, MEASURED, MILLION, PREDICTED, WITH_OUTLIER, Bar, ScalingSeries, group, label_of, settings_of
from benchmarks.reporting.ways_to_pay import cost_section
from benchmarks.sweeping.sweep import label
from diffusion.cost.formulas import HOURS_PER_DAY, SD2_BASE, Phase, run_hours
from diffusion.cost.hardware import gpu_name
from diffusion.cost.prices import Price, Prices, price_of_gpu
from diffusion.cost.results import Result, Results

CLAIMED_LOADER_RATIO = 30  # "at least 30 times the throughput of the model": the MosaicML post of January 2023
MOST_BARS = 30
IN_THE_STEP = {'latents': 'network, text', 'images': 'network, text, VAE', 'synthetic': 'network, text; random latents'}

SPEED = (
    '', 'point:', 'status:', 'GPUs', 'images/s', 'per GPU', 'spread', 'MFU', 'ms a step', 'peak GB', 'reserved GB', 'waits for data',
    'loader / model', 'warm-up', 'steps', 'where',
)  # fmt: skip
SETTINGS = (
    '', 'nodes x GPUs', 'network:', 'px', 'in the step:', 'precision:', 'global', 'micro', 'accumulation', 'sharding:', 'compiled:',
    'attention:', 'recomputed:', 'EMA:', 'GFLOP an image',
)  # fmt: skip
ALL_PHASES = ('', 'GPUs', 'days', 'GPU-hours', 'dollars', 'measured with:')
MACHINES = ('where', 'device:', 'memory GB', 'interconnect:', 'CPU:', 'cores', 'torch', 'CUDA', 'driver', 'commit', 'date:')

WORDS = (
    'images/s: measured images over measured seconds, in whole windows of steps after the warm-up, loader and logging included, evaluation and '
    'checkpoints not; spread: interquartile range of the windows over their median. MFU = images/s per GPU x FLOP of the network per image, forward '
    'and backward (2 FLOP a multiply-add, no encoders, nothing computed twice) / dense 16-bit peak of the GPU; empty where the peak is unknown.'
)


def measured_report(
    results: Results,
    source: str,
    prices: Prices,
    gpus: Sequence[int],
    gpu: str | None,
    phases: Sequence[Phase] | None = None,
) -> Report:
    """Report on the rows of result files.

    Args:
        source: the files, in words.
        gpus: numbers of GPUs to predict; none: twice and four times those measured.
        gpu: whose price, by its name in the list of prices; None: by the name of the device.
        phases: what is to be trained, one a resolution; None: Stable Diffusion 2 base where its U-Net was measured, else a million samples.
    """
    groups = group(results.throughput, phases)
    sections: list[Section | None] = []
    if results.throughput:
        sections += [_speed(results.throughput), _settings(results.throughput)]
    if groups:
        priced = [(one, price_of(one, prices, gpu)) for one in groups]
        is_single = [len(one.points) == 1 and not gpus for one in groups]
        several, single = ([pair for pair, alone in zip(priced, is_single, strict=True) if alone == wanted] for wanted in (False, True))
        if several:
            sections.append(scaling_section(several, gpus))
        if single:
            sections.append(single_section(single))
        title = 'Stable Diffusion 2 base, both phases' if phases is None else 'All phases'
        sections += [*_runs(groups, phases or SD2_BASE, title, gpus, prices, gpu), _loader(results.throughput)]
    bars = [*_sweep_bars(results.throughput), *_step_bars(results.steps)]
    if bars:
        caption = 'Images per second by configuration; factors are over the first bar of a panel.'
        sections.append(Section('Settings compared', [FigureBlock('ablation', bars_figure(bars), caption)]))
    lead = _lead(results, source) + unpriced(groups, prices, gpu)
    return Report('Throughput, scaling and cost', lead, [section for section in sections if section is not None])


def gpu_of(one: ScalingSeries, prices: Prices, gpu: str | None) -> str | None:
    """Return the name in the list of prices: the one given, or that of the device; None: there is none."""
    return gpu or gpu_name(one.device, prices.gpus())


def gpus_of(results: Iterable[Result], prices: Prices) -> list[str]:
    """Return the GPUs that have rows with numbers, by their names in the list of prices, or by such as it could have."""
    devices = dict.fromkeys(result.text('device') for result in results if result.is_rated and result.on_gpus)
    names = (gpu_name(device, prices.gpus()) or gpu_name(device) or '-'.join(device.lower().split()) for device in devices)
    return list(dict.fromkeys(names))


def unpriced(groups: Iterable[ScalingSeries], prices: Prices, gpu: str | None) -> str:
    """Say which devices have no price, and the remedy; nothing if all have, and of a CPU."""
    devices = dict.fromkeys(one.device for one in groups if one.results[0].on_gpus and gpu_of(one, prices, gpu) is None)
    remedy = 'give it with --price DOLLARS, name another GPU of the list with --gpu NAME, or add one with --price gpu_hour.NAME.on-demand=DOLLARS'
    return f' There is no price for {" and ".join(repr(device) for device in devices)}: {remedy}.' if devices else ''


def price_of(one: ScalingSeries, prices: Prices, gpu: str | None) -> Price | None:
    """Return the first price of the group's GPU, or None.

    Raises:
        PriceError: there is none of the name given.
    """
    name = gpu_of(one, prices, gpu)
    return None if name is None else price_of_gpu(name, prices, 'give one with --price DOLLARS')


def _lead(results: Results, source: str) -> str:
    rows = [*results.throughput, *results.steps]
    rated = sum(result.is_rated for result in rows)
    text = f'{source}: {counted(len(rows), "points")}, {rated} with numbers.'
    if results.num_superseded:
        text += f' Of points that were measured again only the last row counts ({results.num_superseded} left out).'
    if results.num_unread:
        text += f' Lines that could not be read, as a kill leaves them: {results.num_unread}.'
    return text


def _speed(results: Sequence[Result]) -> Section:
    machines = list(dict.fromkeys(map(_machine, results)))
    rows, notes = [], list[str]()
    for i, result in enumerate(results, 1):
        status = result.status
        if result.text('reason'):
            notes.append(f'Point {i}, {result.status}: {result.text("reason")}')
            status += f' [{len(notes)}]'
        rows.append([
            str(i), _differing(result, results), status, _number(result, 'num_gpus', '{:,.0f}'),
            _number(result, 'images_per_sec', '{:,.1f}'), _number(result, 'images_per_sec_per_gpu', '{:,.2f}'),
            _number(result, 'images_per_sec_spread', '{:.1%}'), _number(result, 'mfu', '{:.1%}'), _number(result, 'step_sec', '{:,.1f}', 1e3),
            _number(result, 'peak_allocated_bytes', '{:,.2f}', 1e-9), _number(result, 'peak_reserved_bytes', '{:,.2f}', 1e-9),
            _number(result, 'data_wait_share', '{:.1%}'), _number(result, 'loader_ratio', '{:,.1f}'), _number(result, 'warmup_steps', '{:,.0f}'),
            _number(result, 'measured_steps', '{:,.0f}'), str(1 + machines.index(_machine(result))),
        ])  # fmt: skip
    blocks: list[Block] = [WORDS, Table(SPEED, rows)]
    if notes:
        blocks += ['Why:', Notes(notes)]
    return Section('Measured', [*blocks, 'Where and when:', _where_and_when(machines)])


def _where_and_when(machines: Sequence[tuple[str, ...]]) -> Table:
    """Table of machines by number; with the network between them if rows name one."""
    rows = [[str(i), *row] for i, row in enumerate(machines, 1)]
    shown = [i for i, name in enumerate(MACHINES) if name != 'interconnect:' or any(row[i] for row in rows)]
    return Table([MACHINES[i] for i in shown], [[row[i] for i in shown] for row in rows])


def _settings(results: Sequence[Result]) -> Section:
    rows = [
        [
            str(i), f'{result.text("num_nodes") or "?"} x {result.text("gpus_per_node") or "?"}', result.text('network'),
            result.text('resolution'), IN_THE_STEP.get(result.text('kind'), result.text('kind')),
            result.text('precision'), result.text('global_size'), result.text('micro_size'), result.text('accumulation'), result.text('sharding'),
            result.text('compile') or 'no', result.text('attention'), _yes(result, 'checkpoint_activations'), _yes(result, 'ema'),
            _number(result, 'flop_per_image', '{:,.4g}', 1e-9),
        ]
        for i, result in enumerate(results, 1)
    ]  # fmt: skip
    same = [i for i in range(1, len(SETTINGS)) if len({row[i] for row in rows}) == 1]
    kept = [i for i in range(len(SETTINGS)) if i not in same]
    equal = '; '.join(f'{SETTINGS[i].removesuffix(":")}: {rows[0][i] or "not known"}' for i in same)
    blocks: list[Block] = [f'The same for all points: {equal}.'] if equal else []
    return Section('Settings', [*blocks, Table([SETTINGS[i] for i in kept], [[row[i] for i in kept] for row in rows])])


def _machine(result: Result) -> tuple[str, ...]:
    """Hardware and software of a measurement, as MACHINES has them after the number; by day, for rows of one sweep differ by minutes."""
    device = result.text('gpu') or result.text('device') or 'unknown'
    texts = [result.text(key) for key in ('interconnect', 'cpu', 'num_cores', 'torch', 'cuda', 'driver', 'commit')]
    return device, _number(result, 'gpu_memory_bytes', '{:,.0f}', 1e-9), *texts, result.text('date')[:10]


def _runs(
    groups: Sequence[ScalingSeries], phases: Sequence[Phase], title: str, gpus: Sequence[int], prices: Prices, gpu: str | None
) -> list[Section | None]:
    """Days, GPU-hours and dollars of all phases together, where each was measured in the same way; and ways to pay for the best."""
    families = [_Run(parts, phases, gpus) for parts in _families(groups)]
    whole = [one for one in families if len(one.phases) == len(phases) > 1 and one.rates]
    blocks = _all_phases([(one, price_of(one.first, prices, gpu)) for one in whole])
    sections: list[Section | None] = [Section(title, blocks) if blocks else None]
    best = max(families, key=lambda one: one.merit, default=None)
    name = gpu_of(best.first, prices, gpu) if best is not None else None
    if best is not None and name is not None:
        chosen = best.name
        if len(families) > 1:
            chosen = f'Of {len(families)} configurations that with the most phases, then numbers of GPUs, then images/s per GPU: {best.name}'
        what = f'{chosen}: {" and ".join(phase.amount for phase in best.phases)}'
        sections.append(cost_section(what, best.phases, best.rates, best.origins, name, prices, has_outliers=best.has_outliers))
    return sections


def _families(groups: Sequence[ScalingSeries]) -> list[dict[int, ScalingSeries]]:
    """Groups that were measured in the same way, by resolution; of several at one resolution the one with most points."""
    families: dict[str, dict[int, ScalingSeries]] = {}
    for one in groups:
        parts = families.setdefault(one.family, {})
        if one.work != MILLION and (one.resolution not in parts or len(one.results) > len(parts[one.resolution].results)):
            parts[one.resolution] = one
    return [dict(sorted(parts.items())) for parts in families.values() if parts]


class _Run:
    """One way to train, in some of the phases or all, on several numbers of GPUs."""

    def __init__(self, parts: Mapping[int, ScalingSeries], phases: Sequence[Phase], gpus: Sequence[int]):
        self.parts = parts
        self.first, *others = parts.values()
        self.phases = [phase for phase in phases if phase.resolution in parts]
        same = ' and '.join(f'{part.resolution} px' for part in others)
        self.name = self.first.name + (f', and the same at {same}' if same else '')
        series = list(parts.values())
        self.measured = set.intersection(*({point.num_gpus for point in one.points} for one in series))
        # Of single points, which say nothing about scaling, only what is asked for.
        foretold = {n for one in series for n in ahead(one, gpus)} if gpus or len(self.measured) > 1 else set[int]()
        self.rates = {n: {px: part.rate(n) for px, part in parts.items()} for n in sorted(self.measured | foretold)}
        self.origins = {n: max((one.origin(n) for one in series), key=(MEASURED, PREDICTED, WITH_OUTLIER).index) for n in self.rates}
        self.has_outliers = any(one.outliers for one in series)

    @property
    def merit(self) -> tuple[int, int, float]:
        """Key of the choice: phases, numbers of GPUs, images per second per GPU."""
        return len(self.parts), len(self.measured), max((rates[min(rates)] / n for n, rates in self.rates.items()), default=0.0)


def _all_phases(runs: Sequence[tuple[_Run, Price | None]]) -> list[Block]:
    rows = []
    for run, price in runs:
        for num_gpus, images_per_sec in run.rates.items():
            wall = run_hours(run.phases, images_per_sec)
            paid = '' if price is None else f'${few(wall * num_gpus * price.dollars)}'
            rows.append([run.origins[num_gpus], str(num_gpus), few(wall / HOURS_PER_DAY), few(wall * num_gpus), paid, run.name])
    if not rows:
        return []
    named = [f'Dollars at {price}.' for price in dict.fromkeys(price for _, price in runs) if price is not None]
    words = ['Training alone: encoding, storage, restarts and evaluation come on top.']
    if any(run.has_outliers for run, _ in runs):
        words.append(LOWER_LAW)
    return [Table(ALL_PHASES, rows), *named, ' '.join(words)]


def _loader(results: Sequence[Result]) -> Section | None:
    ratios = [(ratio, result) for result in results if (ratio := result.number('loader_ratio')) is not None and result.is_rated]
    if not ratios:
        return None
    worst, result = min(ratios, key=lambda pair: pair[0])
    enough = sum(ratio >= CLAIMED_LOADER_RATIO for ratio, _ in ratios)
    text = (
        f'With nothing else to do the loader gives between {worst:,.1f} ({label_of(result)}) and {max(ratio for ratio, _ in ratios):,.1f} times what '
        f'the model takes. The MosaicML post claims at least {CLAIMED_LOADER_RATIO} for its own: {enough} of {len(ratios)} points reach that. '
        'Below 1 training would wait for data.'
    )
    return Section('Loader', [text])


def _sweep_bars(results: Sequence[Result]) -> list[tuple[str, list[Bar]]]:
    """A panel per sweep, network, resolution and number of GPUs, of settings that differ in something else."""
    panels: dict[str, list[Result]] = {}
    for result in results:
        if result.is_rated:
            unit = 'GPUs' if result.on_gpus else 'processes'
            title = f'{result.text("sweep")}: {result.text("unet")}, {result.text("resolution")} px, {counted(result.point.num_gpus, unit)}'
            panels.setdefault(title, []).append(result)
    bars = []
    for title, rows in panels.items():
        named = title if len(rows) <= MOST_BARS else f'{title}: the first {MOST_BARS} of {len(rows)}'
        if len(rows) > 1:
            bars.append((named, [Bar(_differing(row, rows), row.point.images_per_sec) for row in rows[:MOST_BARS]]))
    return bars


def _differing(row: Result, rows: Sequence[Result]) -> str:
    """Label of a row without the settings that are equal for all."""
    axes = {key: value for key, value in settings_of(row).items() if len({str(settings_of(other).get(key, 'not there')) for other in rows}) > 1}
    return label(axes) if axes else label_of(row)


def _step_bars(results: Sequence[Result]) -> list[tuple[str, list[Bar]]]:
    """A panel per setting of benchmarks/step.py."""
    panels: dict[str, list[Bar]] = {}
    for result in results:
        rate = result.images_per_sec
        if result.is_rated and rate:
            setting = f'{result.text("unet")}, {result.text("resolution")} px, {result.text("kind")}, micro-batch {result.text("micro_batch")}'
            title = f'{setting}\n{result.text("gpu") or result.text("cpu")}, {result.text("commit")}'
            panels.setdefault(title, []).append(Bar(label_of(result), rate))
    return list(panels.items())


def _number(result: Result, key: str, pattern: str, factor: float = 1.0) -> str:
    value = result.number(key)
    return '' if value is None else pattern.format(value * factor)


def _yes(result: Result, key: str) -> str:
    value = result.row.get(key)
    return '' if value is None else 'yes' if value else 'no'
