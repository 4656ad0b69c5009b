"""Pauses between attempts at what fails for reasons outside."""

from collections.abc import Iterator

from diffusion.common.object_storage import JITTER

FIRST_PAUSE_SEC, LONGEST_PAUSE_SEC = 1.0, 60.0


def growing_pauses() -> Iterator[float]:
    """Seconds, without end, growing to LONGEST_PAUSE_SEC, never the same on two machines."""
    seconds = FIRST_PAUSE_SEC
    while True:
        yield seconds * JITTER.uniform(0.5, 1.5)
        seconds = min(2 * seconds, LONGEST_PAUSE_SEC)
