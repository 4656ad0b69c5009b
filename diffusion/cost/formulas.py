"""Units and formulas of time and money. A bill is hours x GPUs x price, written as that product where it is needed; F1 is here because it has a unit.

All numbers may be NumPy arrays with one entry per draw of something uncertain; nothing is rounded before it is printed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

Number: TypeAlias = Any  # a float, or a NumPy array of draws

SEC_PER_HOUR, HOURS_PER_DAY = 3600, 24
HOURS_PER_YEAR = 365 * HOURS_PER_DAY
BYTES_PER_TB, BYTES_PER_GB, BYTES_PER_MB = 1e12, 1e9, 1e6

# Encoding in every step instead of once: "1.4x time and cost" over both phases (README of mosaicml/diffusion).
ONLINE_FACTOR = 1.4

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
    """Wall hours of phases one after another.

    Args:
        images_per_sec: of all GPUs together, by resolution.

    Raises:
        KeyError: there is none for the resolution of a phase.
    """
    return sum(hours(phase.num_samples, images_per_sec[phase.resolution]) for phase in phases)
