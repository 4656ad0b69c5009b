"""Published tables of throughput and cost, worked out again: the cells of published.yaml, evaluated.

Only what the sources print is written down there; the rest is computed by named functions from rates (diffusion/cost/throughput.py) and numbers.
"""

import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from benchmarks.reporting.series import Bar, ScalingSeries, TrainingWork
from diffusion.cost.encoders import first_cheaper_epoch, num_that_keep_up, rate_with
from diffusion.cost.formulas import HOURS_PER_DAY, ONLINE_FACTOR, SD2_BASE, SEC_PER_HOUR, hours
from diffusion.cost.hardware import PEAK_FLOPS
from diffusion.cost.scaling import PredictedRate, ScalingPoint, fit
from diffusion.cost.throughput import ANYSCALE_ENCODING, PUBLISHED, PublishedThroughput

FILE = Path(__file__).with_name('published.yaml')
FLOAT_ERROR = 1e-9  # relative: two orders of the same operations
HEARTBEAT_SEC = 30  # SaladCloud

# In words, for reports; docs/cost.md has the same.
FORMULAS = {
    'F1': 'hours of a phase = samples / (images/s of all GPUs) / 3600',
    'F2': 'days = the sum of hours / 24',
    'F3': 'GPU-hours = hours x GPUs',
    'F4': 'dollars = GPU-hours x price of a GPU-hour',
    'F5': 'dollars of machines of several kinds = hours x (count x price of each kind, added up) + what is paid once',
    'F6': f'latents: training + encoding once + storing them; encoding in every step instead: training x {ONLINE_FACTOR:g}',
    'F7': 'hours billed by heartbeats = heartbeats x seconds between two / 3600',
    'F8': 'dollars or seconds of a step = those of the job / steps',
    'F9': 'gradient accumulation = global batch / (GPUs x micro-batch)',
    'F10': 'discounted price = price x (1 - share saved)',
    'F11': 'what a comparison is made with = value / (times of it), or value / (1 + change as a share)',
}

# Why a cell does not reproduce, by `differs`.
REASONS = {
    'contradiction': 'the source contradicts itself',
    'other sources': 'other sources differ',
    'outlier': 'outlier: no smooth law explains it',
}


def _rows(table: str, *selected: Any) -> list[PublishedThroughput]:
    """Rows of a table of throughputs with these values: GPU, number of GPUs or configuration."""
    return [row for row in PUBLISHED if row.table == table and {*selected} <= {row.gpu, row.num_gpus, row.configuration}]


def _rate(*selected: Any) -> float:
    """Images/s of one row at a resolution, the last argument."""
    (row,) = _rows(*selected[:-1])
    return row.images_per_sec[selected[-1]]


def _points(rows: list[PublishedThroughput], resolution: int, extrapolated: bool = False) -> tuple[ScalingPoint, ...]:
    return tuple(ScalingPoint(row.num_gpus, row.global_size, row.images_per_sec[resolution]) for row in rows if row.extrapolated == extrapolated)


def _predicted(table: str, resolution: int, most: int, num_gpus: int) -> PredictedRate:
    """Predict more GPUs by the law through the rows of up to `most`, at a global batch of 2048."""
    return fit([point for point in _points(_rows(table), resolution) if point.num_gpus <= most]).predict(num_gpus, 2048)


# By name in published.yaml. Formulas as FORMULAS numbers them; gradient accumulation (F9) and others are divisions.
FUNCTIONS: dict[str, Callable[..., Any]] = {
    'times': lambda *factors: math.prod(factors),
    'over': lambda value, *divisors: value / math.prod(divisors),
    'plus': lambda *terms: sum(terms),
    'minus': lambda value, less: value - less,
    'mean': lambda *values: statistics.fmean(values),
    'rate': _rate,
    'predicted': _predicted,
    'hours': hours,  # F1
    'run_hours': lambda *selected: _rows(*selected)[0].hours(SD2_BASE),  # F1, of both phases of Stable Diffusion 2 base
    'images_per_sec': lambda num_samples, wall_hours: num_samples / wall_hours / SEC_PER_HOUR,  # F1 solved for the rate
    'days': lambda wall_hours: wall_hours / HOURS_PER_DAY,  # F2
    'online': lambda gpu_hours: gpu_hours * ONLINE_FACTOR,  # F6
    'keep_up': num_that_keep_up,  # encoders
    'fed_rate': rate_with,  # of training by some encoders: figure 6
    'cheaper_from_epoch': first_cheaper_epoch,
    'peak_share': lambda images_per_sec: images_per_sec * ANYSCALE_ENCODING.flop_per_image / PEAK_FLOPS['A10G'],
    'heartbeat_hours': lambda heartbeats: heartbeats * HEARTBEAT_SEC / SEC_PER_HOUR,  # F7
    'discounted': lambda price, saving: price * (1 - saving),  # F10
    'before_change': lambda value, change: value / (1 + change),  # F11
}


def evaluate(expression: Any, values: Mapping[str, Any]) -> Any:
    """Compute a number, the name of a value, or {function: arguments}, whose texts select rows where the function looks up rates.

    Raises:
        KeyError: there is no such function or value.
    """
    if isinstance(expression, str):
        return values[expression]
    if not isinstance(expression, dict):
        return expression
    ((name, arguments),) = expression.items()
    arguments = arguments if isinstance(arguments, list) else [arguments]
    return FUNCTIONS[name](*(arguments if name in ('rate', 'run_hours', 'predicted') else (evaluate(one, values) for one in arguments)))


class Rounding(NamedTuple):
    """The source's rounding of a number before printing: `nearest`, `down` or `up`, and the digits after the point."""

    how: str
    digits: int

    @property
    def text(self) -> str:
        unit = f'{10.0**-self.digits:,.{max(0, self.digits)}f}'
        return f'rounded {"to" if self.how == "nearest" else f"{self.how} to"} {unit}'

    def apply(self, value: float) -> float:
        if self.how == 'nearest':
            return round(value, self.digits)
        scaled = value * 10**self.digits
        return (math.floor(scaled + 1e-9) if self.how == 'down' else math.ceil(scaled - 1e-9)) / 10**self.digits


@dataclass(frozen=True)
class Cell:
    """One number of a published table, worked out again.

    Attributes:
        published: as printed; None where the source prints nothing, and ours is derived.
        formula: names of FORMULAS, `scaling`, or in words.
        shown: the format of both numbers.
        tolerance: relative difference up to which the cell reproduces; 0: exactly, after the source's own rounding.
        differs: why the cell is known not to reproduce; it is then our mistake if it does.
        note: what else a reader should know.
    """

    row: str
    column: str
    published: float | None
    ours: float
    formula: str
    shown: str = '{:,.2f}'
    tolerance: float = 0.0
    rounding: Rounding | None = None
    differs: str = ''
    note: str = ''

    @property
    def rounded(self) -> float:
        """Our value as the source would print it."""
        return self.ours if self.rounding is None else self.rounding.apply(self.ours)

    @property
    def within(self) -> bool:
        return self.published is None or abs(self.rounded - self.published) <= max(self.tolerance, FLOAT_ERROR) * abs(self.published)

    @property
    def holds(self) -> bool:
        """Whether it is as published.yaml claims."""
        return self.within != bool(self.differs)

    @property
    def verdict(self) -> str:
        if self.published is None:
            return 'derived'
        if not self.holds:
            return 'REPRODUCES, but should not' if self.differs else 'DOES NOT REPRODUCE'
        return self.differs or 'reproduces'

    def texts(self) -> list[str]:
        """Return a row of a table with the head COLUMNS."""
        published = difference = allowed = ''
        if self.published is not None:
            published, difference = self.shown.format(self.published), f'{100 * (self.ours / self.published - 1):+.3f} %'
            allowed = f'{100 * self.tolerance:g} %' if self.tolerance else self.rounding.text if self.rounding else 'exact'
        return [self.row, self.column, published, self.shown.format(self.ours), difference, allowed, self.formula, self.verdict, self.note]


COLUMNS = ('row', 'column', 'published', 'ours', 'difference', 'allowed', 'formula', 'verdict', 'note')


@dataclass(frozen=True)
class PublishedTable:
    """A table with its cells, and its data about scaling and settings."""

    name: str  # on the command line
    title: str
    source: str
    conditions: str
    cells: tuple[Cell, ...]
    remarks: tuple[str, ...] = ()
    series: tuple[ScalingSeries, ...] = ()
    ablation: tuple[tuple[str, tuple[Bar, ...]], ...] = ()  # panels of bars
    run: tuple[PublishedThroughput, ...] = ()  # rows of one GPU that all phases of Stable Diffusion 2 base can be planned with

    @property
    def broken(self) -> list[Cell]:
        """Cells that are not as published.yaml claims."""
        return [cell for cell in self.cells if not cell.holds]


@cache
def published_tables() -> dict[str, PublishedTable]:
    """Read published.yaml and work out every cell.

    Raises:
        KeyError, TypeError: the file names a function, value or field that does not exist.
    """
    content = yaml.safe_load(FILE.read_text())
    values: dict[str, Any] = {}
    for name, expression in content['values'].items():
        values[name] = evaluate(expression, values)
    return {name: _table(name, table, values) for name, table in content['tables'].items()}


def _table(name: str, table: Mapping[str, Any], values: Mapping[str, Any]) -> PublishedTable:
    series = [
        ScalingSeries(
            points=_points(rows := _rows(one['table']), one['resolution']),
            claimed=_points(rows, one['resolution'], extrapolated=True),
            name=one['name'],
            work=TrainingWork(one['work'], one['num_samples']),
        )
        for one in table.get('series', [])
    ]
    ablation = []
    for one in table.get('ablation', []):
        bars = [Bar(row.configuration, row.images_per_sec[one['resolution']]) for row in _rows(*one['rows'])]
        ablation.append((one['title'], (Bar('DDP over TCP', values[one['baseline']], derived=True), *bars)))
    worked_out = {
        'cells': tuple(_cell(values=values, **cell) for cell in table['cells']),
        'remarks': tuple(table.get('remarks', ())),
        'series': tuple(series),
        'ablation': tuple(ablation),
        'run': tuple(_rows(*table['run'])) if 'run' in table else (),
    }
    return PublishedTable(name, **{**table, **worked_out})


def _cell(values: Mapping[str, Any], ours: Any, published: float | None = None, rounded: Any = None, differs: str = '', **cell: Any) -> Cell:
    found = evaluate(ours, values)
    if isinstance(found, PredictedRate):
        cell['note'], found = str(found), found.images_per_sec
    rounding = None if rounded is None else Rounding(*rounded)
    return Cell(published=published, ours=found, rounding=rounding, differs=REASONS[differs] if differs else '', **cell)
