"""Numbers that nobody knows exactly: a point, `[low, high]` (uniform) or `[low, likely, high]` (triangular), drawn once and reckoned with as arrays.

The formulas accept arrays, so one piece of code gives a bill of points and a bill of p10, p50 and p90. Draws are a Latin hypercube: each range is
cut into as many equally likely pieces as there are draws, and hit once in each (M. D. McKay et al., Technometrics 21(2), 1979).
"""

from __future__ import annotations

import zlib
from typing import Any, TypeAlias

import numpy as np

from diffusion.cost.formulas import Number

Uncertain: TypeAlias = Any  # a number, [low, high] or [low, likely, high]

NUM_DRAWS = 4000
QUANTILES = (0.1, 0.5, 0.9)


def check(value: Uncertain) -> str:
    """What is wrong with it, or nothing."""
    values = value if isinstance(value, list) else [value]
    numbers = all(isinstance(item, (int, float)) and not isinstance(item, bool) and np.isfinite(item) for item in values)
    if not numbers or not 1 <= len(values) <= 3:
        return f'{value!r} is neither a number nor a range; write 5, [low, high] or [low, likely, high]'
    if isinstance(value, list) and (len(values) == 1 or sorted(values) != values):
        return f'{value} is not a range: two or three numbers in ascending order'
    return ''


def low(value: Uncertain) -> float:
    return float(value[0] if isinstance(value, list) else value)


def high(value: Uncertain) -> float:
    return float(value[-1] if isinstance(value, list) else value)


def draw(value: Uncertain, name: str, num_draws: int = NUM_DRAWS, seed: int = 0) -> Number:
    """A point as it is; a range as `num_draws` values in random order.

    Args:
        name: of the number; each has draws of its own, the same ones whatever else is uncertain.
    """
    if not isinstance(value, list) or value[0] == value[-1]:
        return low(value)
    shares = equal_shares(name, num_draws, seed)
    lowest, highest = low(value), high(value)
    if len(value) == 2:
        return lowest + shares * (highest - lowest)
    return _triangular(shares, lowest, float(value[1]), highest)


def equal_shares(name: str, num_draws: int = NUM_DRAWS, seed: int = 0) -> np.ndarray:
    """(num_draws,) probabilities in the middle of as many equal pieces, in an order that the name decides."""
    return (np.random.default_rng([seed, zlib.crc32(name.encode())]).permutation(num_draws) + 0.5) / num_draws


def _triangular(shares: np.ndarray, lowest: float, likely: float, highest: float) -> np.ndarray:
    """The inverse of the triangular distribution's cumulative function."""
    width, rising = highest - lowest, (likely - lowest) / (highest - lowest)
    return np.where(
        shares < rising,
        lowest + np.sqrt(shares * width * (likely - lowest)),
        highest - np.sqrt((1 - shares) * width * (highest - likely)),
    )


def is_uncertain(number: Number) -> bool:
    """Whether it is an array of draws that differ."""
    return isinstance(number, np.ndarray) and number.ndim > 0 and bool(np.ptp(number) > 0)


def quantiles(number: Number) -> tuple[float, float, float]:
    """(p10, p50, p90); three times the same of a point."""
    p10, p50, p90 = np.quantile(np.asarray(number, dtype=float), QUANTILES)
    return float(p10), float(p50), float(p90)


def median(number: Number) -> float:
    return quantiles(number)[1]


def spread_text(number: Number, digits: int | None = None) -> str:
    """`1,234`, or `1,234 (1,100 to 1,400)` with p10 and p90; three digits that count unless `digits` after the point are asked for."""
    p10, p50, p90 = (_text(value, digits) for value in quantiles(number))
    return f'{p50} ({p10} to {p90})' if is_uncertain(number) else p50


def _text(value: float, digits: int | None) -> str:
    if digits is None:
        digits = 0 if abs(value) >= 100 or value == int(value) else 1 if abs(value) >= 10 else 2 if abs(value) >= 1 else 4
    return f'{value:,.{digits}f}'
