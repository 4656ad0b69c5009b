"""A published table as cells: what the source prints, what the formulas of diffusion/cost say, and whether these agree as closely as they should."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from benchmarks.reporting.series import Bar, Series
from diffusion.cost.published import PublishedThroughput


class Rounding(NamedTuple):
    """How the source rounded a number before it printed it."""

    name: str
    apply: Callable[[float], float]


def _unit(digits: int) -> str:
    return f'{10.0**-digits:,.{max(0, digits)}f}'


def nearest(digits: int) -> Rounding:
    """To so many digits after the point (before it, if negative)."""
    return Rounding(f'rounded to {_unit(digits)}', lambda value: round(value, digits))


def down(digits: int = 0) -> Rounding:
    return Rounding(f'rounded down to {_unit(digits)}', lambda value: math.floor(value * 10**digits + 1e-9) / 10**digits)


def up(digits: int = 0) -> Rounding:
    return Rounding(f'rounded up to {_unit(digits)}', lambda value: math.ceil(value * 10**digits - 1e-9) / 10**digits)


EXACT = Rounding('exact', lambda value: value)
FLOAT_ERROR = 1e-9  # relative: two orders of the same operations


@dataclass(frozen=True)
class Cell:
    """One number of a published table, worked out again.

    Attributes:
        published: as printed; None where the source prints nothing, and ours is derived.
        formula: names of diffusion/cost/formulas.py's FORMULAS, `scaling`, or in words.
        pattern: how both numbers are shown.
        tolerance: relative difference up to which the cell reproduces; 0: exactly, after the source's own rounding.
        differs: why the cell is known not to reproduce; it is then a mistake of ours if it does.
        note: what else a reader should know.
    """

    row: str
    column: str
    published: float | None
    ours: float
    formula: str
    pattern: str = '{:,.2f}'
    tolerance: float = 0.0
    rounding: Rounding = EXACT
    differs: str = ''
    note: str = ''

    @property
    def difference(self) -> float | None:
        """Ours / published, less 1."""
        return None if self.published is None else self.ours / self.published - 1

    @property
    def within(self) -> bool:
        if self.published is None:
            return True
        return abs(self.rounding.apply(self.ours) - self.published) <= max(self.tolerance, FLOAT_ERROR) * abs(self.published)

    @property
    def holds(self) -> bool:
        """Whether it is as this repository says it is."""
        return not self.within if self.differs else self.within

    @property
    def verdict(self) -> str:
        if self.published is None:
            return 'derived'
        if not self.holds:
            return 'REPRODUCES, but should not' if self.differs else 'DOES NOT REPRODUCE'
        return self.differs or 'reproduces'

    @property
    def allowed(self) -> str:
        """The tolerance, in words."""
        if self.published is None:
            return ''
        return f'{100 * self.tolerance:g} %' if self.tolerance else self.rounding.name

    def texts(self) -> list[str]:
        """As a row of a table with the head COLUMNS."""
        published = '' if self.published is None else self.pattern.format(self.published)
        difference = '' if self.difference is None else f'{100 * self.difference:+.3f} %'
        return [self.row, self.column, published, self.pattern.format(self.ours), difference, self.allowed, self.formula, self.verdict, self.note]


COLUMNS = ('row', 'column', 'published', 'ours', 'difference', 'allowed', 'formula', 'verdict', 'note')

# Why a cell does not reproduce.
CONTRADICTION = 'the source contradicts itself'
OTHER_SOURCES = 'other sources differ'
OUTLIER = 'outlier: no smooth law explains it'


@dataclass(frozen=True)
class PublishedTable:
    """A table with its cells, and what it says about scaling and levers."""

    name: str  # on the command line
    title: str
    source: str
    conditions: str
    cells: tuple[Cell, ...]
    remarks: tuple[str, ...] = ()
    series: tuple[Series, ...] = ()
    ablation: tuple[tuple[str, tuple[Bar, ...]], ...] = ()  # panels of bars
    run: tuple[PublishedThroughput, ...] = ()  # rows of one GPU that all phases of Stable Diffusion 2 base can be planned with

    @property
    def broken(self) -> list[Cell]:
        """Cells that are not as this repository says."""
        return [cell for cell in self.cells if not cell.holds]
