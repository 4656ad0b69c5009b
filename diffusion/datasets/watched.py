"""A DataLoader that says what became of its processes, and ends them."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from functools import cache
from types import FrameType
from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data._utils import signal_handling

from diffusion.errors import DataError, DataUnavailable
from diffusion.faults.preemption import held_back


class WatchedLoader(DataLoader):
    """Where a loader process hangs or dies, DataUnavailable is raised; what it raised itself arrives with its own message alone.

    After an error no loader process is left, not even a stopped one, for which the interpreter would wait for ever.
    """

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        with held_back():  # its processes start here
            batches = super().__iter__()
        if self.num_workers:
            _translate_deaths()
        try:
            yield from batches
        except (DataError, DataUnavailable) as error:
            self._kill(batches)
            message = str(error).rpartition(f'{type(error).__name__}: ')[2]  # torch puts the worker's traceback before it, which `from` keeps
            raise type(error)(message.strip()) from error
        except RuntimeError as error:
            unavailable = self._hung(error) if str(error).startswith('DataLoader timed out') else _died(error)
            if unavailable is None:
                raise
            self._kill(batches)
            raise unavailable from error

    def _hung(self, error: RuntimeError) -> DataUnavailable:
        return DataUnavailable(f'{error} (data.timeout_sec): a loader process or what it reads from hangs; run the same command again')

    def _kill(self, batches: Any) -> None:
        if not self.num_workers:
            return
        if batches._worker_pids_set:  # or torch would raise once more when they die
            signal_handling._remove_worker_pids(id(batches))
            batches._worker_pids_set = False
        for process in batches._workers:
            process.kill()


@cache
def _translate_deaths() -> None:
    """torch looks at its processes whenever one of this process's children ends, and raises wherever the main thread is just then."""
    looks = signal.getsignal(signal.SIGCHLD)
    if not callable(looks) or threading.current_thread() is not threading.main_thread():
        return

    def handler(number: int, frame: FrameType | None) -> None:
        try:
            looks(number, frame)
        except RuntimeError as error:
            raise (_died(error) or error) from error

    signal.signal(signal.SIGCHLD, handler)


def _died(error: RuntimeError) -> DataUnavailable | None:
    """What torch says when one of its processes died, with what to do about it."""
    if not str(error).startswith('DataLoader worker (pid'):
        return None
    return DataUnavailable(f'{error}. Often memory is full: lower data.workers or data.predownload; run the same command again')
