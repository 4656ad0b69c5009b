"""Numbers of Streaming's datasets on a host: free, taken by one process alone, and given back however it ends.

A StreamingDataset has up to ten segments in /dev/shm and two lock files, all beginning with its number. Streaming takes the first number that
looks free for some of the names and attaches to what it finds under the others: an orphan of another size, or of a job that starts at the same
moment. After `kill -9` they stay; Streaming's `clean_stale_shared_memory()` removes those of living runs too, from number 0 up to the first
that is free. So here a number is drawn from those that Streaming itself never comes to, its segments belong to the run (common/belongings.py),
and the lock files lie with them, where no TMPDIR matters.
"""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from streaming.base import dataset
from streaming.base.constant import LOCALS, SHM_TO_CLEAN
from streaming.base.shared import SharedMemory, prefix

from diffusion.common import belongings
from diffusion.common.belongings import SHARED_MEMORY
from diffusion.common.collective import on_first_rank_of_node

DOUBTED = 'doubted'  # of diffusion/datasets/strict.py
NAMES = (*SHM_TO_CLEAN, DOUBTED)
NUMBERS = range(100_000, 1_000_000)  # of six digits; Streaming counts from 0

_random = random.SystemRandom()  # no draw of the run's own generators


@contextmanager
def own_number() -> Iterator[None]:
    """Within the context a StreamingDataset gets a number of its own. All processes of a job enter together."""
    found, temporary = dataset.get_shm_prefix, dataset.gettempdir
    dataset.get_shm_prefix = _number_and_segment  # type: ignore[assignment]
    try:
        yield
    finally:
        dataset.get_shm_prefix, dataset.gettempdir = found, temporary


def _number_and_segment(streams_local: Sequence[str], streams_remote: Any, world: Any, retry: int = 0) -> tuple[int, SharedMemory]:
    """Instead of Streaming's `get_shm_prefix`: the number, and its first segment."""
    made: list[SharedMemory] = []
    number = on_first_rank_of_node(partial(_take, list(streams_local), made))
    entry = _entry(number)
    if entry is not None:
        dataset.gettempdir = lambda: str(entry)  # where it puts the lock files
        if not made:
            belongings.join(entry)
    return number, made[0] if made else SharedMemory(_path(number, LOCALS), False)


def _take(streams_local: list[str], made: list[SharedMemory]) -> int:
    """Take a free number, with its first segment, which goes to `made`."""
    belongings.remove_dead()
    while True:
        number = _random.choice(NUMBERS)
        entry = _entry(number)
        try:
            if entry is not None:
                belongings.make(entry.name, (SHARED_MEMORY / _path(number, name) for name in NAMES))
        except FileExistsError:
            continue
        content = prefix._pack_locals(streams_local, number)
        try:
            if any(_exists(_path(number, name)) for name in NAMES):
                raise FileExistsError
            segment = SharedMemory(_path(number, LOCALS), True, len(content))
        except FileExistsError:  # another program's, or another user's
            if entry is not None:
                belongings.forget(entry)
            continue
        segment.buf[: len(content)] = content
        made.append(segment)
        return number


def _entry(number: int) -> Path | None:
    return belongings.entries() / str(number) if SHARED_MEMORY.exists() else None


def _path(number: int, name: str) -> str:
    return prefix._get_path(number, name)


def _exists(name: str) -> bool:
    try:
        SharedMemory(name, False, auto_cleanup=False).shm.close()
    except FileNotFoundError:
        return False
    except (PermissionError, ValueError):  # another user's, or an empty one
        return True
    return True
