"""JSON-lines files: one JSON object per line. A killed process may leave half a line at the end."""

import errno
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from diffusion.common.files import open_regular, parse_json
from diffusion.common.locks import lock


def open_to_append(path: Path, shared: bool = False) -> BinaryIO:
    """Open a file unbuffered at the beginning of a line, so that a line that a kill cut short does not swallow the next.

    Args:
        shared: other processes append to it too. It is locked until it is closed, and before its end is looked at: its last holder
            may have been killed in the middle of a line.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open('ab+', buffering=0)
    if shared:
        lock(file)
    if file.seek(0, os.SEEK_END) and (file.seek(-1, os.SEEK_END), file.read(1))[1] != b'\n':
        file.write(b'\n')
    return file


def append(file: BinaryIO, record: dict[str, Any]) -> None:
    """Write a line.

    Raises:
        OSError: the disk is full, also if it took a part of the line.
        ValueError: as `to_line`.
    """
    line = to_line(record)
    if file.write(line) < len(line):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), file.name)


def to_line(record: dict[str, Any]) -> bytes:
    """Return the line of a record; raise ValueError for a number that is not finite, which JSON does not have."""
    return json.dumps(record, allow_nan=False).encode() + b'\n'


def read_lines(path: Path, fits: Callable[[dict[str, Any]], bool] | None = None, error: type[Exception] = ValueError) -> Iterator[dict[str, Any]]:
    """Yield the objects in order, without lines that a kill cut short; nothing if there is no file.

    Args:
        fits: whether an object is what is written to this file.
        error: to raise where one is not, and where the path is a folder, a device or a FIFO.
    """
    if not path.exists():
        return
    try:
        lines = open_regular(path)
    except ValueError as problem:
        raise error(f'{path}: {problem}; restore the file, or remove it') from None
    with lines as file:
        for number, line in enumerate(file, start=1):
            try:
                record = parse_json(line)
            except ValueError:
                continue
            if fits is not None and not (isinstance(record, dict) and fits(record)):
                raise error(f'{path}: line {number} is not what a run writes there; restore the file, or delete the line')
            if isinstance(record, dict):
                yield record


def is_number(value: Any) -> bool:
    """Return whether a field holds a finite number, as `to_line` demands; Python reads NaN, 1e999 and integers of any length too."""
    return isinstance(value, int | float) and abs(value) < 1e300
