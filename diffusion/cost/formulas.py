"""From images per second to hours, GPU-hours and dollars: the one place where these are worked out.

F1 to F4 are those of the published cost posts, the others follow from them or stand in one of the posts. All numbers may be NumPy arrays, one entry
a draw of something uncertain; nothing is rounded before it is printed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

Number: TypeAlias = Any  # a float, or a NumPy array of draws

SEC_PER_HOUR, HOURS_PER_DAY = 3600, 24

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
    """Wall time of so many samples (F1)."""
    return num_samples / images_per_sec / SEC_PER_HOUR


def days(wall_hours: Number) -> Number:
    """F2."""
    return wall_hours / HOURS_PER_DAY


def gpu_hours(wall_hours: Number, num_gpus: Number) -> Number:
    """F3; with machines or encoders in place of GPUs, theirs."""
    return wall_hours * num_gpus


def dollars(quantity: Number, price: Number) -> Number:
    """F4: so many GPU-hours (TB-months, requests ...) at so much each."""
    return quantity * price


def online_gpu_hours(training_gpu_hours: Number, factor: Number = ONLINE_FACTOR) -> Number:
    """F6: what training would take if VAE and text encoder ran in every step; to be held against training plus encoding once."""
    return training_gpu_hours * factor


def fleet_dollars(wall_hours: Number, dollars_per_hour: Sequence[Number], one_off_dollars: Number = 0.0) -> Number:
    """F5: machines of several kinds for the same hours.

    Args:
        dollars_per_hour: of each kind, all its machines together.
    """
    return dollars(wall_hours, sum(dollars_per_hour)) + one_off_dollars


@dataclass(frozen=True)
class Phase:
    """One part of a training run: so many samples at one resolution (pixels along a side)."""

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
    """Wall time of phases one after another.

    Args:
        images_per_sec: of all GPUs together, by resolution.

    Raises:
        KeyError: there is none for the resolution of a phase.
    """
    return sum(hours(phase.num_samples, images_per_sec[phase.resolution]) for phase in phases)


def heartbeat_hours(num_heartbeats: Number, every_sec: Number = 30) -> Number:
    """F7: what is billed where a machine reports that it works every so many seconds; its price times this is the job's cost (SaladCloud post)."""
    return num_heartbeats * every_sec / SEC_PER_HOUR


def per_step(total: Number, num_steps: Number) -> Number:
    """F8: dollars or seconds of one step."""
    return total / num_steps


def accumulation(global_size: Number, num_gpus: Number, micro_size: Number) -> Number:
    """F9: micro-batches that each GPU computes in a step (footnote of the MosaicML post)."""
    return global_size / (num_gpus * micro_size)


def discounted(price: Number, saving: Number) -> Number:
    """F10: a price less a share (0..1) of it."""
    return price * (1 - saving)


def baseline_of_ratio(value: Number, ratio: Number) -> Number:
    """F11: what `value` is `ratio` times of."""
    return value / ratio


def baseline_of_change(value: Number, change: Number) -> Number:
    """F11: what `value` differs from by the share `change` (-0.309 is 30.9 % less)."""
    return value / (1 + change)


def images_per_sec_of(num_samples: Number, wall_hours: Number) -> Number:
    """F1 the other way round: the rate that so many samples in so many hours mean."""
    return num_samples / wall_hours / SEC_PER_HOUR
