"""Numbers that nobody knows exactly: a point, `[low, high]` (uniform) or `[low, likely, high]` (triangular), drawn once as arrays.

The formulas accept arrays, so one piece of code gives a bill of points and a bill of p10, p50 and p90. Draws are a Latin hypercube: each range is
cut into as many equally likely pieces as there are draws, and hit once in each (M. D. McKay et al., Technometrics 21(2), 1979). It is one line of
NumPy; scipy.stats has both distributions, but takes two seconds to import, twice as long as a whole plan.
"""

import math
import zlib
from typing import Any, TypeAlias

import numpy as np

from diffusion.cost.formulas import Number

Uncertain: TypeAlias = Any  # a number, [low, high] or [low, likely, high]

NUM_DRAWS = 4000
QUANTILES = (0.1, 0.5, 0.9)


def check(value: Uncertain) -> str:
    """Return what is wrong with a value of an assumption, or nothing."""
    values = value if isinstance(value, list) else [value]
    numbers = all(isinstance(item, (int, float)) and not isinstance(item, bool) and np.isfinite(item) for item in values)
    if not numbers or not 1 <= len(values) <= 3:
        return f'{value!r} is neither a number nor a range; write 5, [low, high] or [low, likely, high]'
    if isinstance(value, list) and (len(values) == 1 or sorted(values) != values):
        return f'{value} is not a range: two or three numbers in ascending order'
    return ''


def draw(value: Uncertain, name: str, num_draws: int = NUM_DRAWS, seed: int = 0) -> Number:
    """Return a point unchanged, a range as `num_draws` values in random order.

    Args:
        name: of the number; each has draws of its own, the same ones whatever else is uncertain.
    """
    if not isinstance(value, list) or value[0] == value[-1]:
        return float(value[0] if isinstance(value, list) else value)
    shares, low, high = equal_shares(name, num_draws, seed), float(value[0]), float(value[-1])
    if len(value) == 2:
        return low + shares * (high - low)
    likely, width = float(value[1]), high - low  # the inverse of the triangular distribution's cumulative function
    rising, falling = low + np.sqrt(shares * width * (likely - low)), high - np.sqrt((1 - shares) * width * (high - likely))
    return np.where(shares < (likely - low) / width, rising, falling)


def equal_shares(name: str, num_draws: int = NUM_DRAWS, seed: int = 0) -> np.ndarray:
    """Return (num_draws,) probabilities in the middle of as many equal pieces, in an order that the name decides."""
    return (np.random.default_rng([seed, zlib.crc32(name.encode())]).permutation(num_draws) + 0.5) / num_draws


def is_uncertain(number: Number) -> bool:
    """Whether it is an array of draws that differ."""
    return isinstance(number, np.ndarray) and number.ndim > 0 and bool(np.ptp(number) > 0)


def quantiles(number: Number) -> tuple[float, float, float]:
    """Return (p10, p50, p90); three times the same of a point."""
    p10, p50, p90 = np.quantile(np.asarray(number, dtype=float), QUANTILES)
    return float(p10), float(p50), float(p90)


def median(number: Number) -> float:
    return quantiles(number)[1]


def spread_text(number: Number, decimals: int | None = None) -> str:
    """Write a point as `1,234`, with three significant digits or `decimals`; draws as `1,200 (1,100 to 1,400)`, p10 and p90 with two digits each."""
    if is_uncertain(number):
        p10, p50, p90 = map(two_digits, quantiles(number))
        return f'{p50} ({p10} to {p90})'
    value = median(number)
    if decimals is None:
        decimals = 0 if abs(value) >= 100 or value == int(value) else 1 if abs(value) >= 10 else 2 if abs(value) >= 1 else 4
    return f'{value:,.{decimals}f}'


def two_digits(value: float) -> str:
    """Write a number with two significant digits, as many as an assumption deserves: `1,200`, `0.012`."""
    rounded = float(f'{value:.2g}')
    return f'{rounded:,.{max(0, 1 - math.floor(math.log10(abs(rounded)))) if rounded else 0}f}'
