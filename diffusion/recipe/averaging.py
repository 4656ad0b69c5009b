"""The arithmetic of the EMA: the decay of each update, and how much of a run the average covers. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from diffusion.recipe.schema import Ema

RAMP = 0.05  # EDM's ema_rampup_ratio
BULK = 0.9  # of the average, to say what it covers


def kept(half_life: float, since: float, until: float) -> float:
    """Return the share (0..1) of the average after batch `since` that is still in it after batch `until`.

    The half-life grows with the run, min(half_life, RAMP x batches so far), as in EDM (arXiv 2206.00364; `ema_rampup_ratio` of its training loop), so
    that the average of a run of any length is of its last part. While it grows the share is (since / until) ** (ln 2 / RAMP): the power function of
    EDM2 (arXiv 2312.02696, section 3.1). It is integrated over the batches between, so that the interval between updates changes nothing.

    Args:
        half_life: in batches, once it has grown.
        since, until: numbers of batches trained, since <= until.
    """
    if since <= 0:
        return 0.0
    grown = half_life / RAMP
    growing = (min(since, grown) / min(until, grown)) ** (math.log(2) / RAMP)
    return growing * 0.5 ** ((max(until, grown) - max(since, grown)) / half_life)


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
    """Return what the average after `batches` batches of a run covers; None if there is no average."""
    if ema.half_life is None:
        return None
    half_life, start, interval = (duration.batches for duration in (ema.half_life, ema.start, ema.interval))
    first = start or interval  # batches after which the average is a copy of the weights
    if batches < first:
        return None
    older, newer = first, batches  # between them is the batch before which 1 - BULK of the average is from
    while newer - older > 1:
        middle = (older + newer) // 2
        older, newer = (middle, newer) if kept(half_life, middle, batches) <= 1 - BULK else (older, middle)
    covered = max(1, batches - older)
    return Coverage(covered, covered / batches, kept(half_life, first, batches))
