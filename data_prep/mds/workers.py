"""The parts of a job shared among processes of one host."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from itertools import islice
from typing import Any, TypeVar

from tqdm import tqdm

from diffusion.common.processes import end_with_parent
from diffusion.contracts.errors import IncompleteError

Result = TypeVar('Result')
Item = TypeVar('Item')

# What the workers need is imported once, by the process that they are forked from: they share that memory, and the process
# that hands out the work stays small.
PRELOAD = ['streaming', 'data_prep.converting.conversion']
CONTEXT = multiprocessing.get_context('forkserver')

_counter: Any = None
"""This process's number of rows done: a slot of shared memory, without a lock that a killed process would keep for ever."""


def count_rows(number: int = 1) -> None:
    """Tell the progress bar that rows are done; any worker may call it."""
    if _counter is not None:
        _counter.value += number


def map_parts(work: Callable[[Item], Result], items: Sequence[Item], num_processes: int, desc: str) -> Iterator[Result]:
    """Results of `work` on each item as they come, from processes, or from right here if one is enough.

    Args:
        work: picklable.
        desc: label of the progress bar, which counts rows.

    Raises:
        IncompleteError: a process was killed, such as by a lack of memory. What `work` raises is raised here, too.
    """
    workers = min(num_processes, len(items)) if num_processes > 1 and len(items) > 1 else 0
    counters = [CONTEXT.RawValue('q', 0) for _ in range(workers or 1)]
    with _progress(counters, desc, show=bool(items)) as progress:
        results = _in_processes(work, items, workers, counters) if workers else _here(work, items, counters[0])
        for done, result in enumerate(results, start=1):
            progress.total = round(_sum(counters) * len(items) / done)  # nobody knows how many rows the others have: as many as these
            yield result


def _here(work: Callable[[Item], Result], items: Sequence[Item], counter: Any) -> Iterator[Result]:
    _count_with(counter)
    try:
        yield from map(work, items)
    finally:
        _count_with(None)


def _in_processes(work: Callable[[Item], Result], items: Sequence[Item], workers: int, counters: list[Any]) -> Iterator[Result]:
    CONTEXT.set_forkserver_preload(PRELOAD)
    with ProcessPoolExecutor(workers, CONTEXT, initializer=_begin, initargs=(counters, CONTEXT.Value('i', 0))) as pool:
        rest = iter(items)
        running: set[Future[Result]] = set()
        try:
            while True:
                running |= {
                    pool.submit(work, item) for item in islice(rest, 2 * workers - len(running))
                }  # a million parts need not wait in its queue
                if not running:
                    return
                finished, running = wait(running, return_when=FIRST_COMPLETED)
                for future in finished:
                    yield future.result()
        except (BrokenProcessPool, EOFError, ConnectionError) as error:  # the latter two if their server was killed
            raise IncompleteError(
                'a worker process was killed, perhaps for lack of memory; nothing is lost: run the same command again, with fewer --processes'
            ) from error
        except KeyboardInterrupt:
            for process in multiprocessing.active_children():
                process.kill()  # or the end would wait for the parts they are at
            raise
        finally:
            for future in running:
                future.cancel()


def _begin(counters: list[Any], num_begun: Any) -> None:
    end_with_parent()
    threading.Thread(target=_end_with_main_process, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that hands out the work
    with num_begun.get_lock():
        _count_with(counters[num_begun.value])
        num_begun.value += 1


def _end_with_main_process() -> None:
    """The server that forked this process lives as long as this process does, so it is the main process that has to be watched."""
    main_process = multiprocessing.parent_process()
    if main_process is not None:
        main_process.join()
        os._exit(1)


def _count_with(counter: Any) -> None:
    global _counter  # noqa: PLW0603  # one for the process, like the progress bar it feeds
    _counter = counter


def _sum(counters: list[Any]) -> int:
    return sum(counter.value for counter in counters)


def progress_bar(**options: Any) -> tqdm:
    """A bar on a terminal; in a log file a line every half minute."""
    return tqdm(unit_scale=True, mininterval=0.1 if sys.stderr.isatty() else 30, **options)


@contextmanager
def _progress(counters: list[Any], desc: str, show: bool) -> Iterator[tqdm]:
    """A progress bar that follows the count, whatever this thread is busy with."""
    done = threading.Event()
    with progress_bar(unit='rows', desc=desc, disable=not show) as progress:

        def follow() -> None:
            while not done.wait(0.2):
                progress.update(_sum(counters) - progress.n)

        thread = threading.Thread(target=follow, daemon=True)
        thread.start()
        try:
            yield progress
        finally:
            done.set()
            thread.join()
            progress.total = _sum(counters)
            progress.update(_sum(counters) - progress.n)
