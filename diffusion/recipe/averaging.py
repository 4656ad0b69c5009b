"""The arithmetic of the averages of the weights (EMA): what each update keeps, and how much of a run an average covers. No torch."""

import math
from dataclasses import dataclass
from typing import Self

from diffusion.recipe.schema import Ema

RAMP = 0.05  # EDM's ema_rampup_ratio
BULK = 0.9  # of the average, to say what it covers
BISECTIONS = 100  # more than the bits of a float


@dataclass(frozen=True)
class Profile:
    """How an average forgets: as the power function of EDM2 while it grows with the run, exponentially once its half-life has its full length.

    EDM2's (arXiv 2312.02696, section 3.1) never stops growing: the weights of batch t have a part of the average that is proportional to t ** gamma,
    so that its width is sigma_rel times the length of the run, however long that is. A half-life grows as min(half_life, RAMP x batches so far), as
    in EDM (arXiv 2206.00364; `ema_rampup_ratio` of its training loop): until it has grown that is the power function of gamma = ln 2 / RAMP - 1.

    Args:
        exponent: gamma + 1.
        half_life: in batches, once it has grown.
    """

    exponent: float
    half_life: float = math.inf

    @classmethod
    def of_half_life(cls, half_life: float) -> Self:
        return cls(math.log(2) / RAMP, half_life)

    @classmethod
    def of_sigma_rel(cls, sigma_rel: float) -> Self:
        """Find gamma by bisection: its width falls from 0.289 at 0 towards 0."""
        low, high = 0.0, 1 / sigma_rel  # the width is below 1 / (gamma + 2)
        for _ in range(BISECTIONS):
            gamma = (low + high) / 2
            low, high = (gamma, high) if sigma_rel_of(gamma) > sigma_rel else (low, gamma)
        return cls(low + 1)

    @property
    def gamma(self) -> float:
        return self.exponent - 1

    def kept(self, since: float, until: float) -> float:
        """Return the share (0..1) of the average after batch `since` that is still in it after batch `until`.

        It is integrated over the batches between, so that the interval between updates changes nothing. From one batch to the next, while the average
        grows, it is EDM2's beta, (1 - 1 / t) ** (gamma + 1).

        Args:
            since, until: numbers of batches trained, since <= until.
        """
        if since <= 0:
            return 0.0
        grown = self.half_life * self.exponent / math.log(2)  # batches after which the half-life has its full length
        growing = (min(since, grown) / min(until, grown)) ** self.exponent
        return growing * 0.5 ** ((max(0.0, until - grown) - max(0.0, since - grown)) / self.half_life)


def sigma_rel_of(gamma: float) -> float:
    """Return the width of a power function: the standard deviation of its batches, as a share of the run (arXiv 2312.02696, section 3.1)."""
    return math.sqrt((gamma + 1) / (gamma + 3)) / (gamma + 2)


def profiles(ema: Ema) -> list[Profile]:
    """Return the profiles of all averages that a run keeps, the one that is evaluated first; empty if it keeps none."""
    if ema.half_life is not None:
        return [Profile.of_half_life(ema.half_life.batches)]
    return [Profile.of_sigma_rel(sigma_rel) for sigma_rel in ema.sigma_rel]


@dataclass(frozen=True)
class Coverage:
    """The batches that an average is made of."""

    batches: int
    """Number of the newest batches that make up 90 % of it, or of all averaged ones if they are fewer."""
    share_of_run: float
    """`batches` as a share (0..1) of all batches so far."""
    start_weight: float
    """Share (0..1) of the weights that averaging began with."""

    def __str__(self) -> str:
        return (
            f'the last {self.batches:,} batch{"es" * (self.batches != 1)} ({self.share_of_run:.1%} of the run so far); the network at ema.start has '
            f'{self.start_weight:.1%} of the average'
        )


def coverage(ema: Ema, batches: int) -> Coverage | None:
    """Return what the first average after `batches` batches of a run covers; None if there is no average."""
    kept_averages = profiles(ema)
    if not kept_averages:
        return None
    profile, start, interval = kept_averages[0], ema.start.batches, ema.interval.batches
    first = start or interval  # batches after which the average is a copy of the weights
    if batches < first:
        return None
    older, newer = first, batches  # between them is the batch before which 1 - BULK of the average is from
    while newer - older > 1:
        middle = (older + newer) // 2
        older, newer = (middle, newer) if profile.kept(middle, batches) <= 1 - BULK else (older, middle)
    covered = max(1, batches - older)
    return Coverage(covered, covered / batches, profile.kept(first, batches))
