"""Units and formulas of time and money, and numbers that nobody knows exactly.

A bill is hours x GPUs x price, written as that product where it is needed; F1 is here because it has a unit. All numbers may be NumPy arrays with
one entry per draw of something uncertain: one piece of code gives a bill of points and a bill of p10, p50 and p90. Nothing is rounded before it is
printed. Draws are a Latin hypercube: each range is cut into as many equally likely pieces as there are draws, and hit once in each (M. D. McKay et
al., Technometrics 21(2), 1979). It is one line of NumPy; scipy.stats has both distributions, but takes two seconds to import, twice as long as a
whole plan.
"""

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

Number: TypeAlias = Any  # a float, or a NumPy array of draws
Uncertain: TypeAlias = Any  # as assumed: a number, [low, high] (uniform) or [low, likely, high] (triangular)

SEC_PER_HOUR, HOURS_PER_DAY = 3600, 24
HOURS_PER_YEAR = 365 * HOURS_PER_DAY
BYTES_PER_TB, BYTES_PER_GB, BYTES_PER_MB = 1e12, 1e9, 1e6
NUM_DRAWS = 4000
QUANTILES = (0.1, 0.5, 0.9)

# Encoding in every step instead of once: "1.4x time and cost" over both phases (README of mosaicml/diffusion).
ONLINE_FACTOR = 1.4


def hours(num_samples: Number, images_per_sec: Number) -> Number:
    """Wall hours of a number of samples (F1)."""
    return num_samples / images_per_sec / SEC_PER_HOUR


@dataclass(frozen=True)
class Phase:
    """One part of a training run: a number of samples at one resolution (pixels along a side)."""

    resolution: int
    num_samples: int

    @property
    def amount(self) -> str:
        count = self.num_samples
        size = f'{count / 1e9:.2f} billion' if count >= 1e9 else f'{count / 1e6:,.4g} million' if count >= 1e6 else f'{count:,}'
        return f'{size} samples at {self.resolution} px'


# Stable Diffusion 2 base: 550,000 and 850,000 batches of 2048 (model card; mosaicml/diffusion).
SD2_BASE = (Phase(256, 550_000 * 2048), Phase(512, 850_000 * 2048))


def run_hours(phases: Sequence[Phase], images_per_sec: Mapping[int, Number]) -> Number:
    """Wall hours of phases one after another, by the images/s of all GPUs together at each resolution; KeyError where one is missing."""
    return sum(hours(phase.num_samples, images_per_sec[phase.resolution]) for phase in phases)


def best_interval_sec(save_sec: float, between_failures_sec: float, restart_sec: float) -> float:
    """Interval from save to save of the highest availability, C + sqrt(2 (M + R) C + C^2). arXiv 2410.18124.

    C: save_sec, for which training stands still; M: of the whole job; R: from the start of a process to its first step.
    """
    return save_sec + math.sqrt(2 * (between_failures_sec + restart_sec) * save_sec + save_sec**2)


def overhead(interval_sec: float, save_sec: float, between_failures_sec: float, restart_sec: float, notice_sec: float = 0.0) -> float:
    """Share of the time that saving and failing cost, to first order: C / tau + (tau / 2 + D + R) / M, with D until someone has started again."""
    return save_sec / interval_sec + (interval_sec / 2 + notice_sec + restart_sec) / between_failures_sec


def range_problem(value: Uncertain) -> str:
    """Return what is wrong with a value of an assumption, or nothing."""
    values = value if isinstance(value, list) else [value]
    numbers = all(isinstance(item, (int, float)) and not isinstance(item, bool) and np.isfinite(item) for item in values)
    if not numbers or not 1 <= len(values) <= 3:
        return f'{value!r} is neither a number nor a range; write 5, [low, high] or [low, likely, high]'
    if isinstance(value, list) and (len(values) == 1 or sorted(values) != values):
        return f'{value} is not a range: two or three numbers in ascending order'
    return ''


def draw(value: Uncertain, name: str, num_draws: int = NUM_DRAWS, seed: int = 0) -> Number:
    """Return a point unchanged, a range as `num_draws` values in an order that the name decides, whatever else is uncertain."""
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


def in_words(template: str, *numbers: Number) -> str:
    """Put numbers into a sentence, each as `spread_text` writes it."""
    return template.format(*map(spread_text, numbers))


def two_digits(value: float) -> str:
    """Write a number with two significant digits, as many as an assumption deserves: `1,200`, `0.012`."""
    rounded = float(f'{value:.2g}')
    return f'{rounded:,.{max(0, 1 - math.floor(math.log10(abs(rounded)))) if rounded else 0}f}'
