"""Small phrases that many messages need."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def counted(number: int, noun: str) -> str:
    """`1 GPU`, `2,048 GPUs`."""
    return f'{number:,} {noun}{"" if number == 1 else "s"}'


def did_you_mean(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """`; did you mean 'x'?` for the end of a sentence about a name that is not known; a full stop if nothing is like it.

    Args:
        cutoff: least likeness (0..1), as difflib has it.
    """
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return f"; did you mean '{close[0]}'?" if close else '.'
