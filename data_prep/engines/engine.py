"""Work on the parts of a job, and who does it: the local engine here, processes of this host; or the machines of a Ray cluster (cluster.py).

The same part gives the same files whenever, wherever and however often it is made. So an engine may try a part again, make it twice at the same
time, or leave the rest to another engine.
"""

import multiprocessing
import os
import signal
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from tqdm import tqdm

from diffusion.common.processes import end_with_parent
from diffusion.common.storage import Folder
from diffusion.contracts.errors import IncompleteError

PRELOAD = ('streaming', 'data_prep.converting.conversion')
CONTEXT = multiprocessing.get_context('forkserver')
WORKER_KILLED = 'a worker process was killed, perhaps for lack of memory'

_count_row: Callable[[], object] | None = None
"""Receiver of `count_row`: the progress bar; in a worker, a slot of shared memory, without a lock that a killed process would keep for ever."""


class WorkItem(Protocol):
    """Piece of the input that becomes a part: the part's name, and the path of a file that it is read from."""

    @property
    def name(self) -> str: ...

    @property
    def path(self) -> str: ...


Input = TypeVar('Input')
Item = TypeVar('Item', bound=WorkItem)
Result = TypeVar('Result')
Message = TypeVar('Message')


class PartWork(ABC, Generic[Item, Result]):
    """Work on each part of a job; picklable, because it goes to the processes that do it."""

    label: ClassVar[str]  # of the progress bar
    unit: ClassVar[str] = 'rows'  # of what the progress bar counts
    uses_gpu: ClassVar[bool] = False  # whether it is faster on a GPU

    @property
    @abstractmethod
    def reads(self) -> Folder:
        """Folder of the items' files."""

    @property
    @abstractmethod
    def writes(self) -> Folder:
        """Folder of the dataset."""

    @abstractmethod
    def count(self, item: Item, result: Result) -> int:
        """Return how far an item moves the progress bar."""

    @abstractmethod
    def here(self, items: Sequence[Item], processes: int) -> Iterator[Result]:
        """Yield the results of all items as they come, from processes of this host; 0: from this one."""

    @abstractmethod
    def start(self, cpus: int, gpus: float) -> Callable[[Item], Result]:
        """Load what all items need, once in a process of another machine that has these resources; returns the function of an item."""


class StreamedWork(PartWork[Item, Result], Generic[Item, Message, Result]):
    """Work of two stages, which may run on different machines: reading gives a stream of messages, from which the part is made."""

    @abstractmethod
    def messages(self, item: Item) -> Generator[Message]:
        """Read an item, in a fixed order; an expected error is the last message."""

    @abstractmethod
    def start_fed(self, cpus: int, gpus: float) -> Callable[[Iterator[Message]], Result]:
        """Load as `start` does; the function makes a part of the messages of one item, and several threads may call it at the same time."""

    def start(self, cpus: int, gpus: float) -> Callable[[Item], Result]:
        make = self.start_fed(cpus, gpus)
        return lambda item: make(self.messages(item))

    def pack(self, message: Message) -> Any:
        """Return the message as it travels between machines."""
        return message

    def unpack(self, packed: Any) -> Message:
        return packed


class Engine(ABC):
    """Makes the parts of a job."""

    @abstractmethod
    def map(self, work: PartWork[Item, Result], items: Sequence[Item]) -> Iterator[Result]:
        """Yield the results of the work on each item, as they come.

        Raises:
            IncompleteError: a part was not made because processes were killed; the same call resumes. What the work raises is raised here, too.
        """

    def close(self) -> None:  # noqa: B027  # the local one holds nothing
        """Release what the engine holds."""


class LocalEngine(Engine):
    """Processes of this host; with 0 of them this one does everything by itself."""

    def __init__(self, processes: int = 0):
        self.processes = processes

    def map(self, work: PartWork[Item, Result], items: Sequence[Item]) -> Iterator[Result]:
        return work.here(items, self.processes)


IN_THIS_PROCESS = LocalEngine()


class WorkerKilled(IncompleteError):
    """A process was killed before its part was done."""

    def __init__(self) -> None:
        super().__init__(f'{WORKER_KILLED}; nothing is lost: run the same command again, with fewer --processes')


def count_row() -> None:
    """Tell the progress bar that a row is done; any worker may call it."""
    if _count_row is not None:
        _count_row()


def map_parts(work: Callable[[Input], Result], items: Sequence[Input], num_processes: int, desc: str) -> Iterator[Result]:
    """Results of `work` on each item as they come, from processes, or from right here if one is enough.

    Args:
        work: picklable.
        desc: label of the progress bar, which counts rows.

    Raises:
        WorkerKilled: by a lack of memory, for example. What `work` raises is raised here, too.
    """
    workers = min(num_processes, len(items)) if num_processes > 1 and len(items) > 1 else 0
    with progress_bar(unit='rows', desc=desc, disable=not items) as progress:
        if workers:
            results: Iterator[Result] = in_processes(work, items, workers, progress=progress)
        else:
            _count_with(progress.update)
            results = map(work, items)
        try:
            for done, result in enumerate(results, start=1):
                expect(progress, done / len(items))
                yield result
        finally:
            _count_with(None)
            progress.total = progress.n


def in_processes(
    work: Callable[[Input], Result],
    items: Iterable[Input],
    num_processes: int,
    preload: Sequence[str] = PRELOAD,
    progress: tqdm | None = None,
) -> Generator[Result]:
    """Results of `work` on each item as they come, from processes; it takes a few items at a time.

    Args:
        preload: modules that `work` needs. The process that all workers are forked from imports them once: they share that memory, and the
            process that hands out the work stays small.
        progress: a bar that follows `count_row`.

    Raises:
        WorkerKilled: by a lack of memory, for example. What `work` raises is raised here, too.
    """
    CONTEXT.set_forkserver_preload(list(preload))
    counters = [CONTEXT.RawValue('q', 0) for _ in range(num_processes)]
    with ProcessPoolExecutor(num_processes, CONTEXT, initializer=_begin, initargs=(counters, CONTEXT.Value('i', 0))) as pool:
        rest = iter(items)
        running: set[Future[Result]] = set()
        try:
            while True:
                running |= {pool.submit(work, item) for item in islice(rest, 2 * num_processes - len(running))}
                if not running:
                    return
                finished, running = wait(running, timeout=0.2, return_when=FIRST_COMPLETED)
                if progress is not None:
                    progress.update(sum(counter.value for counter in counters) - progress.n)
                for future in finished:
                    yield future.result()
        except (BrokenProcessPool, EOFError, ConnectionError) as error:  # the latter two if their server was killed
            raise WorkerKilled from error
        except (KeyboardInterrupt, GeneratorExit):  # or the caller wants no more results
            for process in multiprocessing.active_children():
                process.kill()  # or the end would wait for the parts they are at
            raise
        finally:
            for future in running:
                future.cancel()


def _begin(counters: Sequence[Any], num_begun: Any) -> None:
    end_with_parent()
    threading.Thread(target=_end_with_main_process, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that hands out the work
    with num_begun.get_lock():
        counter = counters[num_begun.value]
        num_begun.value += 1

    def increment() -> None:
        counter.value += 1

    _count_with(increment)


def _end_with_main_process() -> None:
    """The server that forked this process lives as long as this process does, so it is the main process that has to be watched."""
    main_process = multiprocessing.parent_process()
    if main_process is not None:
        main_process.join()
        os._exit(1)


def _count_with(count_row: Callable[[], object] | None) -> None:
    global _count_row  # noqa: PLW0603  # one for the process, like the progress bar it feeds
    _count_row = count_row


def expect(progress: tqdm, done: float) -> None:
    """Set the bar's total when that share of the parts is done: nobody knows how many rows the others have, so as many as these."""
    progress.total = round(progress.n / done)


def progress_bar(**options: Any) -> tqdm:
    """A bar on a terminal; in a log file a line every half minute."""
    return tqdm(unit_scale=True, mininterval=0.1 if sys.stderr.isatty() else 30, **options)
