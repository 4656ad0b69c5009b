"""The learning rate of each batch: warm-up, then constant, cosine or cool-down. Plain arithmetic, no torch."""

import math

COOLDOWN_SHARE = 0.2  # of the run; arXiv 2405.18392, section 4: from 10 to 20 % on as good as a cosine


def lr_factor(batch: int, warmup: int, total: int, decay: str) -> float:
    """Share of `optimizer.lr` that a batch is trained with.

    Args:
        batch: its number, from 0.
        warmup: batches of linear warm-up: the first gets 1 / warmup, the last gets 1.
        total: batches of the run; `constant` does not depend on it.
        decay: after the warm-up: `constant`; `cosine`: half a cosine, which would be 0 in batch `total`; `cooldown`: constant, and in the last
            fifth of the run 1 - sqrt(share of it that is over) (arXiv 2405.18392, equation 1).
    """
    if batch < warmup:
        return (batch + 1) / warmup
    if decay == 'cosine':
        return 0.5 * (1 + math.cos(math.pi * _share_over(batch, warmup, total)))
    if decay == 'cooldown':
        return 1 - math.sqrt(_share_over(batch, max(warmup, total - round(COOLDOWN_SHARE * total)), total))
    return 1.0


def _share_over(batch: int, begin: int, end: int) -> float:
    """How much of [begin, end) lies before `batch`, 0..1."""
    return min(max(batch - begin, 0) / max(end - begin, 1), 1.0)
