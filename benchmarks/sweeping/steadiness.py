"""Where the warm-up ends: compilation, autotuning, clocks and caches settle at their own time, so it is judged by the rates themselves."""

from __future__ import annotations

import statistics
from collections.abc import Sequence


def steady_from(rates: Sequence[float], least: int, within: float) -> int | None:
    """The first of the longest run of windows up to the last one that are steady, `least` or more of them; None if there is no such run.

    Windows are steady if none is further from their median than `within` times it, be it by a drift, a jump or an outlier.

    Args:
        rates: of consecutive windows, in any unit.
        least: at least 1.
        within: a share (0..1).
    """
    for first in range(len(rates) - least + 1):
        median = statistics.median(rates[first:])
        if all(abs(rate - median) <= within * median for rate in rates[first:]):
            return first
    return None
