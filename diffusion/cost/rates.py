"""Sources of images per second: an assumed MFU, a number, or measured points of a file or a published table.

Asked for a number of GPUs that was measured, points answer with the measurement, and else with the scaling law's prediction and its uncertainty
(scaling.py).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from diffusion.common.text import counted
from diffusion.contracts.errors import InputError
from diffusion.cost.facts import Facts
from diffusion.cost.formulas import Number
from diffusion.cost.hardware import PEAK_FLOPS, peak_flops
from diffusion.cost.results import Result
from diffusion.cost.scaling import ScalingLaws
from diffusion.cost.uncertain import equal_shares, is_uncertain, median, spread_text


class RateError(InputError):
    """The throughput that was named cannot be used for a recipe."""


@dataclass(frozen=True)
class Rate:
    """Images per second of all GPUs together, and their origin."""

    images_per_sec: float
    how: str  # measured, published, predicted, scaled, given or assumed
    note: str = ''  # range and uncertainty
    draws: np.ndarray | None = None  # of a prediction or an assumption, for the ranges of the bill


@dataclass(frozen=True)
class RateSource:
    """Where the images per second of a recipe come from."""

    text: str  # of the page
    rate: Callable[[int], Rate]  # by number of GPUs
    warnings: Sequence[str] = ()
    rows: Mapping[tuple[int, int], Result] = field(default_factory=dict)  # of a file, by number of GPUs and global batch


def wanted(facts: Facts, gpu: str) -> str:
    """Describe what images per second are looked for."""
    kind = 'images' if facts.encodes_images else 'latents'
    return f'{facts.name} (network {facts.recipe.trained_network}, {facts.resolution} px, {kind}, {gpu})'


def assumed_mfu(mfu: Number, flop: int, gpu: str, why: str = '') -> RateSource:
    """images/s = MFU x peak FLOP/s x GPUs / FLOP of a sample: by the definition of MFU, which counts the network alone.

    Args:
        mfu: 0..1, or draws of it.
        why: ends the text.

    Raises:
        RateError: the peak of the GPU is not known.
    """
    peak = peak_flops(gpu)
    if peak is None:
        known = ', '.join(PEAK_FLOPS)
        raise RateError(f'--mfu: the peak FLOP/s of {gpu} are not known, only those of {known}; give --throughput, or another --gpu')
    per_gpu = mfu * peak / flop
    share = spread_text(100 * mfu, 1)
    return RateSource(
        f'assumed: an MFU of {share} % of {peak / 1e12:,.0f} TFLOP/s of {gpu} on any number of GPUs{why}',
        lambda num_gpus: Rate(median(per_gpu * num_gpus), 'assumed', draws=per_gpu * num_gpus if is_uncertain(per_gpu) else None),
    )


def given_number(images_per_sec: float, on_gpus: int) -> RateSource:
    """A number from the command line, scaled linearly."""

    def rate(num_gpus: int) -> Rate:
        if num_gpus == on_gpus:
            return Rate(images_per_sec, 'given')
        return Rate(images_per_sec * num_gpus / on_gpus, 'scaled', f'linearly from {counted(on_gpus, "GPU")}')

    return RateSource(f'given: {images_per_sec:,.6g} images/s on {counted(on_gpus, "GPU")}; on other numbers of GPUs scaled linearly', rate)


def points_and_laws(
    laws: ScalingLaws, how: str, name: str, global_size: int, warnings: Sequence[str] = (), rows: Mapping[tuple[int, int], Result] | None = None
) -> RateSource:
    """Points of one table or file, and the scaling laws through them.

    Args:
        how: measured or published.
        global_size: of the recipe.
    """

    def rate(num_gpus: int) -> Rate:
        """Return the measurement, or else the slower law's prediction with that of the other as a note."""
        point = laws.measured_at(num_gpus, global_size)
        if point is not None:
            return Rate(point.images_per_sec, how)
        slower, *_ = both = laws.slowest_first(num_gpus, global_size)
        predicted, *others = (law.predict(num_gpus, global_size) for law in both)
        if len(laws.points) == 1:
            only = laws.points[0]
            batch = '' if only.global_size == global_size else f' and a global batch of {only.global_size:,}'
            return Rate(predicted.images_per_sec, 'scaled', f'linearly from {counted(only.num_gpus, "GPU")}{batch}')
        draws = None
        if slower.degrees_of_freedom:  # within the 95 % interval, as a prediction of few points has tails that no machine has
            draws = slower.quantiles(num_gpus, global_size, np.clip(equal_shares(f'images_per_sec {name}'), 0.025, 0.975))
        other = [f'the lower of two laws, with and without outliers; the other says {one.images_per_sec:,.1f}' for one in others]
        return Rate(predicted.images_per_sec, 'predicted', '; '.join([str(predicted), *other]), draws)

    law = laws.fit_without_outliers
    counts = ', '.join(str(num_gpus) for num_gpus in dict.fromkeys(point.num_gpus for point in laws.points))
    sizes = sorted({point.global_size for point in laws.points})
    batches = f' with global batches of {", ".join(f"{size:,}" for size in sizes)}' if len(sizes) > 1 else ''
    text = f'{how}: {name}, on {counts} GPUs{batches}; else predicted: {law}'
    for point in law.left_out:
        text += f'; {counted(point.num_gpus, "GPU")} ({point.images_per_sec:,.6g} images/s) is an outlier that this law leaves out'
    return RateSource(f'{text}; {law.doubt}' if law.doubt else text, rate, warnings, rows or {})
