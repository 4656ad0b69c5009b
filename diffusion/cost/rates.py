"""Sources of images per second: measurements, a number, a published table, or an assumed MFU.

Asked for a number of GPUs that was measured, a series answers with the measurement, and else with the scaling law's prediction and its uncertainty
(scaling.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from diffusion.common.text import counted
from diffusion.cost.facts import Facts
from diffusion.cost.formulas import Number
from diffusion.cost.hardware import PEAK_FLOPS, images_per_sec_of, peak_flops
from diffusion.cost.results import Result
from diffusion.cost.scaling import ScalingFit, ScalingLaws
from diffusion.cost.uncertain import equal_shares, is_uncertain, median, spread_text


class RateError(ValueError):
    """The throughput that was named cannot be used for a recipe."""


@dataclass(frozen=True)
class Rate:
    """Images per second of all GPUs together, and their origin."""

    images_per_sec: float
    how: str  # measured, published, predicted, scaled, given or assumed
    note: str = ''  # range and uncertainty
    draws: np.ndarray | None = None  # of a prediction or an assumption, for the ranges of the bill


@dataclass(frozen=True)
class AssumedRates:
    """images/s = MFU x peak FLOP/s x GPUs / FLOP of a sample: by the definition of MFU, which counts the network alone."""

    mfu: Number  # 0..1, or draws of it
    flop: int
    gpu: str
    peak: float
    why: str
    warnings: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        share = spread_text(100 * self.mfu, 1)
        return f'assumed: an MFU of {share} % of {self.peak / 1e12:,.0f} TFLOP/s of {self.gpu} on any number of GPUs{self.why}'

    def rate(self, num_gpus: int) -> Rate:
        images_per_sec = images_per_sec_of(self.mfu, self.flop, self.peak) * num_gpus
        return Rate(median(images_per_sec), 'assumed', draws=images_per_sec if is_uncertain(images_per_sec) else None)


@dataclass(frozen=True)
class GivenRate:
    """A number from the command line, scaled linearly."""

    images_per_sec: float
    num_gpus: int
    warnings: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return f'given: {self.images_per_sec:,.6g} images/s on {counted(self.num_gpus, "GPU")}; on other numbers of GPUs scaled linearly'

    def rate(self, num_gpus: int) -> Rate:
        if num_gpus == self.num_gpus:
            return Rate(self.images_per_sec, 'given')
        return Rate(self.images_per_sec * num_gpus / self.num_gpus, 'scaled', f'linearly from {counted(self.num_gpus, "GPU")}')


@dataclass(frozen=True, kw_only=True)
class RateSeries(ScalingLaws):
    """Points of one table or file, and the scaling laws through them."""

    how: str  # measured or published
    name: str
    global_size: int  # of the recipe
    rows: dict[tuple[int, int], Result] = field(default_factory=dict)  # of a file, by number of GPUs and global batch
    warnings: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        law = self.fit_without_outliers
        counts = ', '.join(str(num_gpus) for num_gpus in dict.fromkeys(point.num_gpus for point in self.points))
        sizes = sorted({point.global_size for point in self.points})
        batches = f' with global batches of {", ".join(f"{size:,}" for size in sizes)}' if len(sizes) > 1 else ''
        text = f'{self.how}: {self.name}, on {counts} GPUs{batches}; else predicted: {law}'
        for point in law.left_out:
            text += f'; {counted(point.num_gpus, "GPU")} ({point.images_per_sec:,.6g} images/s) is an outlier that this law leaves out'
        return f'{text}; {law.doubt}' if law.doubt else text

    def rate(self, num_gpus: int) -> Rate:
        """Return the measurement, or else the slower law's prediction with that of the other as a note."""
        point = self.measured_at(num_gpus, self.global_size)
        if point is not None:
            return Rate(point.images_per_sec, self.how)
        slower, *_ = laws = self.slowest_first(num_gpus, self.global_size)
        predicted, *others = (law.predict(num_gpus, self.global_size) for law in laws)
        if len(self.points) == 1:
            only = self.points[0]
            batch = '' if only.global_size == self.global_size else f' and a global batch of {only.global_size:,}'
            return Rate(predicted.images_per_sec, 'scaled', f'linearly from {counted(only.num_gpus, "GPU")}{batch}')
        other = [f'the lower of two laws, with and without outliers; the other says {one.images_per_sec:,.1f}' for one in others]
        return Rate(predicted.images_per_sec, 'predicted', '; '.join([str(predicted), *other]), draws=self._draws(slower, num_gpus))

    def _draws(self, law: ScalingFit, num_gpus: int) -> np.ndarray | None:
        """Images per second within the 95 % interval of a prediction, as one of few points has tails that no machine has; None if it has none."""
        if not law.degrees_of_freedom:
            return None
        shares = np.clip(equal_shares(f'images_per_sec {self.name}'), 0.025, 0.975)
        return law.quantiles(num_gpus, self.global_size, shares)


RateSource: TypeAlias = AssumedRates | GivenRate | RateSeries


@dataclass(frozen=True)
class RateRequest:
    """A recipe and the hardware that a source of images per second is chosen for."""

    facts: Facts
    gpu: str
    gpus_per_node: int
    gpus: Sequence[int]

    @property
    def resolution(self) -> int:
        return self.facts.resolution

    @property
    def what(self) -> str:
        kind = 'images' if self.facts.encodes_images else 'latents'
        return f'{self.facts.name} (network {self.facts.recipe.model.network}, {self.resolution} px, {kind}, {self.gpu})'

    @property
    def peak(self) -> float:
        """FLOP/s of the GPU.

        Raises:
            RateError: it is not known.
        """
        peak = peak_flops(self.gpu)
        if peak is None:
            known = ', '.join(PEAK_FLOPS)
            raise RateError(f'--mfu: the peak FLOP/s of {self.gpu} are not known, only those of {known}; give --throughput, or another --gpu')
        return peak
