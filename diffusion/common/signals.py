"""Signals that ask a run to stop, and how loader processes survive them; faults/preemption.py acts on them."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)


@contextmanager
def held_back() -> Iterator[None]:
    """Block the signals in this thread and in processes that are forked in the context; pending ones are delivered at its end.

    For the start of a DataLoader's processes: before `spare_worker` runs in them, PyTorch gives them a handler of SIGTERM that ends them,
    and perhaps threads, whose signals `spare_worker` could not block any more.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def ended_as_exception() -> Iterator[None]:
    """SIGTERM and SIGHUP raise SystemExit in the context: what is open is closed, and temporary files go. For the main thread."""

    def end(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


def spare_worker(worker_id: int) -> None:
    """`worker_init_fn` of a DataLoader: its processes are often signalled together with their parent, which still needs their batches.

    They end when the parent itself asks, as DataLoader and multiprocessing do in the end. They have to be forked while requests are `held_back`.
    """
    for number in SIGNALS:
        if number != signal.SIGTERM:
            signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=_end_when_the_parent_asks, daemon=True).start()


def _end_when_the_parent_asks() -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        pass
    os._exit(0)
