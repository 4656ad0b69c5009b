"""Composer's time strings, read without importing Composer."""

from __future__ import annotations

import re
from typing import NamedTuple

UNITS = {'ba': 'batches', 'ep': 'epochs', 'sp': 'samples', 'sec': 'seconds'}


class Duration(NamedTuple):
    value: int
    unit: str  # a key of UNITS


def parse_duration(text: str) -> Duration:
    """`'10000ba'` -> `Duration(10000, 'ba')`.

    Raises:
        ValueError: not a whole number followed by a unit of UNITS. Composer itself refuses `60s`, `24h` and `1d`.
    """
    match = re.fullmatch(r'(\d+)(ba|ep|sp|sec)', text)
    if match is None:
        units = ', '.join(f'{unit} ({name})' for unit, name in UNITS.items())
        raise ValueError(f"'{text}' is not a duration; write a whole number and one of {units}, such as 10000ba")
    return Duration(int(match[1]), match[2])
