"""Composer's time strings, parsed without importing Composer."""

from __future__ import annotations

import re

UNITS = {'ba': 'batches', 'ep': 'epochs', 'sp': 'samples', 'sec': 'seconds'}


class Duration(str):
    """A length of training: text that Composer takes as it is, such as `10000ba`, with its number and unit.

    Raises:
        ValueError: not a whole number followed by a unit of UNITS. Composer itself refuses `60s`, `24h` and `1d`.
    """

    value: int
    unit: str  # a key of UNITS

    def __new__(cls, text: str) -> Duration:
        match = re.fullmatch(rf'(\d+)({"|".join(UNITS)})', text)
        if match is None:
            units = ', '.join(f'{unit} ({name})' for unit, name in UNITS.items())
            raise ValueError(f"'{text}' is not a duration; write a whole number and one of {units}, such as 10000ba")
        duration = super().__new__(cls, text)
        duration.value, duration.unit = int(match[1]), match[2]
        return duration

    @property
    def batches(self) -> int:
        """The number, where only batches are allowed."""
        assert self.unit == 'ba', f'{self} is not in batches'
        return self.value
