"""A report on result files: measurements with their hardware and settings; scaling and cost; settings compared."""

from collections.abc import Callable, Iterable, Mapping, Sequence

from benchmarks.reporting.figures import counted, plain
from benchmarks.reporting.page import Block, Report, Section, Table
from benchmarks.reporting.scaling_section import ahead, few, scaling_section, single_section
from benchmarks.reporting.series import LOWER_LAW, MEASURED, PREDICTED, WITH_OUTLIER, ScalingSeries, group, label_of, settings_of
from benchmarks.sweeping.sweep import label
from diffusion.cost.formulas import HOURS_PER_DAY, SD2_BASE, Phase, run_hours
from diffusion.cost.hardware import gpu_name
from diffusion.cost.prices import Price, Prices, price_of_gpu
from diffusion.cost.results import Result, Results

IN_THE_STEP = {'latents': 'network, text', 'images': 'network, text, VAE', 'synthetic': 'network, text; random latents'}
Columns = Mapping[str, Callable[[Result], str]]
"""The cell of a row by the title of its column."""


def _text(key: str, none: str = '') -> Callable[[Result], str]:
    return lambda result: result.text(key) or none


def _number(key: str, pattern: str = '{:,.0f}', factor: float = 1.0) -> Callable[[Result], str]:
    return lambda result: '' if (value := result.number(key)) is None else pattern.format(value * factor)


def _yes(key: str) -> Callable[[Result], str]:
    return lambda result: {None: '', False: 'no'}.get(result.row.get(key), 'yes')


SPEED: Columns = {
    'GPUs': _number('num_gpus'), 'images/s': _number('images_per_sec', '{:,.1f}'), 'per GPU': _number('images_per_sec_per_gpu', '{:,.2f}'),
    'spread': _number('images_per_sec_spread', '{:.1%}'), 'MFU': _number('mfu', '{:.1%}'), 'ms a step': _number('step_sec', '{:,.1f}', 1e3),
    'peak GB': _number('peak_allocated_bytes', '{:,.2f}', 1e-9), 'reserved GB': _number('peak_reserved_bytes', '{:,.2f}', 1e-9),
    'waits for data': _number('data_wait_share', '{:.1%}'),
    'warm-up': _number('warmup_steps'), 'steps': _number('measured_steps'),
}  # fmt: skip
SETTINGS: Columns = {
    'nodes x GPUs': lambda result: f'{result.text("num_nodes") or "?"} x {result.text("gpus_per_node") or "?"}', 'network:': _text('network'),
    'px': _text('resolution'), 'in the step:': lambda result: IN_THE_STEP.get(result.text('kind'), result.text('kind')),
    'precision:': _text('precision'), 'global': _text('global_size'), 'micro': _text('micro_size'), 'accumulation': _text('accumulation'),
    'sharding:': _text('sharding'), 'compiled:': _text('compile', 'no'), 'attention:': _text('attention'),
    'recomputed:': _yes('checkpoint_activations'), 'EMA:': _yes('ema'), 'GFLOP an image': _number('flop_per_image', '{:,.4g}', 1e-9),
}  # fmt: skip
# By day: rows of one sweep differ by minutes.
MACHINE: Columns = {
    'device:': lambda result: result.text('gpu') or result.text('device') or 'unknown', 'memory GB': _number('gpu_memory_bytes', factor=1e-9),
    'interconnect:': _text('interconnect'), 'CPU:': _text('cpu'), 'cores': _text('num_cores'), 'torch': _text('torch'), 'CUDA': _text('cuda'),
    'driver': _text('driver'), 'commit': _text('commit'), 'date:': lambda result: result.text('date')[:10],
}  # fmt: skip
ALL_PHASES = ('', 'GPUs', 'days', 'GPU-hours', 'dollars', 'measured with:')

WORDS = (
    'images/s: measured images over measured seconds, in whole windows of steps after the warm-up, loader and logging included, evaluation and '
    'checkpoints not; spread: interquartile range of the windows over their median. MFU = images/s per GPU x FLOP of the network per image, forward '
    'and backward (2 FLOP a multiply-add, no encoders, nothing computed twice) / dense 16-bit peak of the GPU; empty where the peak is unknown.'
)


def measured_report(
    results: Results, source: str, prices: Prices, gpus: Sequence[int], gpu: str | None, phases: Sequence[Phase] | None = None
) -> Report:
    """Report on the rows of result files.

    Args:
        source: the files, in words.
        gpus: numbers of GPUs to predict; none: twice and four times those measured.
        gpu: whose price, by its name in the list of prices; None: by the name of the device.
        phases: what is to be trained, one a resolution; None: Stable Diffusion 2 base where its U-Net was measured, else a million samples.
    """
    groups = group(results.throughput, phases)
    sections = [_speed(results.throughput), _settings(results.throughput)] if results.throughput else []
    priced = [(one, price_of(one, prices, gpu)) for one in groups]
    single = [pair for pair in priced if len(pair[0].points) == 1 and not gpus]
    if several := [pair for pair in priced if pair not in single]:
        sections.append(scaling_section(several, gpus))
    if single:
        sections.append(single_section(single))
    title = 'Stable Diffusion 2 base, both phases' if phases is None else 'All phases'
    if whole := [(run, price_of(run.first, prices, gpu)) for run in _runs(groups, len(phases or SD2_BASE), gpus)]:
        sections.append(_all_phases(title, whole))
    if compared := _compared(results):
        sections.append(Section('Settings compared', compared))
    rows = [*results.throughput, *results.steps]
    lead = f'{source}: {counted(len(rows), "points")}, {sum(result.is_rated for result in rows)} with numbers.'
    if results.num_superseded:
        lead += f' Of points that were measured again only the last row counts ({results.num_superseded} left out).'
    if results.num_unread:
        lead += f' Lines that could not be read, as a kill leaves them: {results.num_unread}.'
    return Report('Throughput, scaling and cost', lead + unpriced(groups, prices, gpu), sections)


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


def _cells(result: Result, columns: Columns) -> list[str]:
    return [cell(result) for cell in columns.values()]


def _speed(results: Sequence[Result]) -> Section:
    machines = [list(cells) for cells in dict.fromkeys(tuple(_cells(result, MACHINE)) for result in results)]
    rows = [
        [str(i), _differing(result, results), result.status, *_cells(result, SPEED), str(1 + machines.index(_cells(result, MACHINE)))]
        for i, result in enumerate(results, 1)
    ]
    reasons = [[str(i), result.status, result.text('reason')] for i, result in enumerate(results, 1) if result.text('reason')]
    blocks: list[Block] = [WORDS, Table(['', 'point:', 'status:', *SPEED, 'where'], rows)]
    blocks += [Table(['', 'status:', 'why:'], reasons)] if reasons else []
    head = ['where', *MACHINE]
    shown = [i for i, name in enumerate(head) if name != 'interconnect:' or any(machine[i - 1] for machine in machines)]
    where = [[str(number), *machine] for number, machine in enumerate(machines, 1)]
    return Section('Measured', [*blocks, 'Where and when:', Table([head[i] for i in shown], [[row[i] for i in shown] for row in where])])


def _settings(results: Sequence[Result]) -> Section:
    rows = [_cells(result, SETTINGS) for result in results]
    same = {title: cells[0] for title, *cells in zip(SETTINGS, *rows, strict=True) if len(set(cells)) == 1}
    kept = [title for title in SETTINGS if title not in same]
    equal = '; '.join(f'{title.removesuffix(":")}: {cell or "not known"}' for title, cell in same.items())
    blocks: list[Block] = [f'The same for all points: {equal}.'] if same else []
    table = [[str(i), *(SETTINGS[title](result) for title in kept)] for i, result in enumerate(results, 1)]
    return Section('Settings', [*blocks, Table(['', *kept], table)])


def _runs(groups: Sequence[ScalingSeries], num_phases: int, gpus: Sequence[int]) -> list['_Run']:
    """Return the ways to train all phases, of several, that were measured in all of them."""
    families: dict[str, dict[int, ScalingSeries]] = {}  # of several groups of a family at one resolution the one with most points
    for one in groups:
        parts = families.setdefault(one.family, {})
        if one.phase is not None and (one.resolution not in parts or len(one.results) > len(parts[one.resolution].results)):
            parts[one.resolution] = one
    runs = [_Run(dict(sorted(parts.items())), gpus) for parts in families.values() if len(parts) == num_phases > 1]
    return [run for run in runs if run.rates]


class _Run:
    """One way to train all phases, on several numbers of GPUs."""

    def __init__(self, parts: Mapping[int, ScalingSeries], gpus: Sequence[int]):
        series = list(parts.values())
        self.first = series[0]
        self.phases = [one.work for one in series]
        same = ' and '.join(f'{one.resolution} px' for one in series[1:])
        self.name = self.first.name + (f', and the same at {same}' if same else '')
        measured = set.intersection(*({point.num_gpus for point in one.points} for one in series))
        # Of single points, which say nothing about scaling, only what is asked for.
        foretold = {n for one in series for n in ahead(one, gpus)[0]} if gpus or len(measured) > 1 else set[int]()
        self.rates = {n: {px: one.images_per_sec(n, one.global_size(n)) for px, one in parts.items()} for n in sorted(measured | foretold)}
        self.origins = {n: max((one.origin(n) for one in series), key=(MEASURED, PREDICTED, WITH_OUTLIER).index) for n in self.rates}
        self.has_outliers = any(one.outliers for one in series)


def _all_phases(title: str, runs: Sequence[tuple[_Run, Price | None]]) -> Section:
    rows = []
    for run, price in runs:
        for num_gpus, images_per_sec in run.rates.items():
            wall = run_hours(run.phases, images_per_sec)
            paid = '' if price is None else f'${few(wall * num_gpus * price.dollars)}'
            rows.append([run.origins[num_gpus], str(num_gpus), few(wall / HOURS_PER_DAY), few(wall * num_gpus), paid, run.name])
    named = [f'Dollars at {price}.' for price in dict.fromkeys(price for _, price in runs) if price is not None]
    words = (
        'Training alone. diffusion.plan adds encoding, storage, restarts and evaluation, and lists the ways to pay (--throughput with these files).'
    )
    lower = f' {LOWER_LAW}' if any(run.has_outliers for run, _ in runs) else ''
    return Section(title, [Table(ALL_PHASES, rows), *named, words + lower])


def _compared(results: Results) -> list[Block]:
    """Compare what differs in one sweep, network, resolution and number of GPUs, and the rows of one setting of benchmarks/step.py."""
    alike: dict[str, list[Result]] = {}
    for result in (one for one in (*results.throughput, *results.steps) if one.is_rated):
        setting = f'{result.text("network")}, {result.text("resolution")} px'
        if result.text('benchmark') == 'step':
            machine = f'{result.text("gpu") or result.text("cpu")}, {result.text("commit")}'
            title = f'{setting}, {result.text("kind")}, micro-batch {result.text("micro_batch")}; {machine}:'
        else:
            title = f'{result.text("sweep")}: {setting}, {counted(result.point.num_gpus, "GPUs" if result.on_gpus else "processes")}:'
        alike.setdefault(title, []).append(result)
    blocks: list[Block] = []
    for title, rows in alike.items():
        if len(rows) > 1:
            rates = [row.images_per_sec or 0.0 for row in rows]
            cells = [[_differing(row, rows), plain(rate), f'{rate / rates[0]:.2f}x'] for row, rate in zip(rows, rates, strict=True)]
            blocks += [title, Table(['', 'images/s', 'of the first'], cells)]
    return blocks


def _differing(row: Result, rows: Sequence[Result]) -> str:
    """Label of a row without the settings that are equal for all."""
    axes = {key: value for key, value in settings_of(row).items() if len({str(settings_of(other).get(key, 'not there')) for other in rows}) > 1}
    return label(axes) if axes else label_of(row)
