"""Files of one JSON object a line, which a process that is killed may leave with half a line at the end."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from diffusion.common.files import parse_json
from diffusion.common.locks import lock


def open_to_append(path: Path, shared: bool = False) -> BinaryIO:
    """The file, unbuffered, at the beginning of a line: one that a kill cut short must not swallow the next.

    Args:
        shared: other processes append to it too. It is locked until it is closed, and before its end is looked at: whoever had the lock
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
    """Raises ValueError for a number that is not finite: JSON has none."""
    return json.dumps(record, allow_nan=False).encode() + b'\n'


def read_lines(path: Path, fits: Callable[[dict[str, Any]], bool] | None = None, error: type[Exception] = ValueError) -> Iterator[dict[str, Any]]:
    """The objects in order, without what a kill cut short; none where there is no file.

    Args:
        fits: whether an object is what is written to this file.
        error: to raise where one is not.
    """
    if not path.exists():
        return
    with path.open('rb') as file:
        for number, line in enumerate(file, start=1):
            try:
                record = parse_json(line)
            except ValueError:
                continue
            if fits is not None and not (isinstance(record, dict) and fits(record)):
                raise error(f'{path}: line {number} is not what a run writes there; restore the file, or delete the line')
            if isinstance(record, dict):
                yield record
