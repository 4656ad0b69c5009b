"""A DataLoader that says what became of its processes, and ends them.

torch waits for a batch with a time limit, and then without one for the process that made it: that hands over the memory in which the batch
lies. One that was stopped in between, by SIGSTOP, a debugger or a cgroup, would be waited for until `faults.stall_sec`.
"""

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from types import FrameType
from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data._utils import signal_handling

from diffusion.common.processes import signals_held_back
from diffusion.contracts.errors import DataError, DataUnavailable

TIMED_OUT = 'DataLoader timed out'  # torch's words
BEHIND_TORCH_SEC = 2.0  # after torch's own limit, whose message names it; also between two looks


class WatchedLoader(DataLoader):
    """A DataLoader that raises DataUnavailable when one of its processes hangs or dies; what that raised itself arrives with its own message alone.

    After an error no loader process is left, not even a stopped one, for which the interpreter would wait for ever.
    """

    through: Callable[[Iterator[Any]], Iterator[Any]] | None = None  # what the batches go through on their way out, from an iterator to an iterator

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return self._loaded() if self.through is None else self.through(self._loaded())

    def _loaded(self) -> Iterator[Any]:
        batches: Any = self._iterator
        starts = batches is None  # else the processes of an earlier epoch are asked for the next one below, which may take as long as a batch
        if starts:
            with signals_held_back():
                batches = super().__iter__()
        if self.num_workers:
            _translate_deaths()
        limit = _Limit(self.timeout, partial(self._kill, batches)) if self.num_workers and self.timeout else None
        wait = limit.wait if limit is not None else lambda for_what: for_what()
        try:
            if not starts:
                wait(super().__iter__)
            while True:
                try:
                    batch = wait(batches.__next__)
                except StopIteration:
                    return
                yield batch
        except (DataError, DataUnavailable) as error:
            self._kill(batches)
            message = str(error).rpartition(f'{type(error).__name__}: ')[2]  # torch puts the worker's traceback before it, which `from` keeps
            raise type(error)(message.strip()) from error
        except (RuntimeError, OSError, EOFError) as error:  # the last two from a connection to a process that was killed in the middle of it
            if str(error).startswith(TIMED_OUT) or (limit is not None and limit.exceeded):
                unavailable: DataUnavailable | None = self._hung()
            else:
                unavailable = _died(error)
            if unavailable is None:
                raise
            self._kill(batches)
            raise unavailable from error
        finally:
            if limit is not None:
                limit.over.set()

    def _hung(self) -> DataUnavailable:
        return DataUnavailable(
            f'{TIMED_OUT} after {self.timeout:g} seconds (data.timeout_sec): a loader process, or what it reads from, hangs or was stopped; '
            'run the same command again'
        )

    def _kill(self, batches: Any) -> None:
        if not self.num_workers:
            return
        if batches._worker_pids_set:  # or torch would raise once more when they die
            signal_handling._remove_worker_pids(id(batches))
            batches._worker_pids_set = False
        for process in batches._workers:
            process.kill()
        batches._worker_result_queue._writer.close()  # or a reader of half a message would wait for the rest


class _Limit:
    """Ends a wait for a batch from outside: calls `end` in a thread when one has lasted longer than `limit_sec` and torch has not noticed."""

    def __init__(self, limit_sec: float, end: Callable[[], None]):
        self.limit_sec, self.end = limit_sec + BEHIND_TORCH_SEC, end
        self.deadline, self.exceeded, self.over = math.inf, False, threading.Event()
        threading.Thread(target=self._watch, name='loader-limit', daemon=True).start()

    def wait(self, for_what: Callable[[], Any]) -> Any:
        self.deadline = time.monotonic() + self.limit_sec
        try:
            return for_what()
        finally:
            self.deadline = math.inf

    def _watch(self) -> None:
        looked_at = time.monotonic()
        while not self.over.wait(BEHIND_TORCH_SEC):
            now = time.monotonic()
            if now - looked_at > BEHIND_TORCH_SEC + 10:  # this process was stopped as a whole, and resumes only now
                self.deadline += now - looked_at
            elif now > self.deadline:
                self.exceeded = True
                self.end()
                return
            looked_at = now


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


def _died(error: Exception) -> DataUnavailable | None:
    """Return torch's message when one of its processes died, with what to do about it."""
    if not str(error).startswith('DataLoader worker (pid'):
        return None
    return DataUnavailable(f'{error}. Often memory is full: lower data.workers or data.predownload; run the same command again')
