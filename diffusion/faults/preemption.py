"""SIGTERM and SIGUSR1 as a request to save and stop: from clouds that take a machine back, `scancel`, Kubernetes, Slurm's `--signal`.

The handler notes the request. After each step the trainer asks all ranks whether any has one; then a checkpoint is saved, evaluation and
pictures are left out, and Preempted is raised. While the trainer is being built there is nothing to save: Preempted is raised at once, and
kept, as a library that is interrupted by it may make another error of it, or none.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, SimpleNamespace

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)

_state = SimpleNamespace(received=False, agreed=False, training=False, stopped=None)


class Preempted(BaseException):
    """Someone asked the run to stop; everything is saved. No Exception: whoever catches those means another kind of failure."""


def listen() -> None:
    """Install the handlers, over those that `import composer` has installed. They stay for the life of the process."""
    for number in SIGNALS:
        signal.signal(number, _note)


def received() -> bool:
    """Whether this process was asked to stop."""
    return _state.received


def agree(any_rank: bool) -> None:
    """Tell this process whether any rank was asked to stop: from here on all act on it, in the same step."""
    _state.agreed = any_rank
    _state.received |= any_rank  # a request that comes later is the same one


def stopped() -> Preempted | None:
    """What was raised before training, whatever came of it: safetensors, for one, raises an error of its own, and a `__del__` goes on."""
    return _state.stopped


def agreed() -> bool:
    """Whether the run stops after this step, on all ranks alike."""
    return _state.agreed


@contextmanager
def at_step_boundaries() -> Iterator[None]:
    """Within the context a request waits until someone asks for it; outside it ends the process.

    Raises:
        Preempted: a request has come before.
    """
    if _state.stopped is not None:
        raise _state.stopped
    _state.training = True
    try:
        yield
    finally:
        _state.training = False


def _note(number: int, _: FrameType | None) -> None:
    first, _state.received = not _state.received, True
    if first and not _state.training:  # a second one is the launcher's, which tells all ranks when one has ended
        _state.stopped = Preempted('stopped from outside before the first step: nothing was lost, run the same command again')
        raise _state.stopped


@contextmanager
def held_back() -> Iterator[None]:
    """Within the context no request reaches this thread, nor any of a process that is forked in it; what came meanwhile comes at its end.

    For the start of a DataLoader's processes: before `spare_worker` runs in them, PyTorch gives them a handler of SIGTERM that ends them,
    and perhaps threads, whose signals `spare_worker` could not block any more.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def spare_worker(worker_id: int) -> None:
    """`worker_init_fn` of a DataLoader: its processes are often signalled together with their parent, which still needs their batches.

    They end when the parent itself asks, as DataLoader and multiprocessing do in the end. They have to be forked while requests are `held_back`.
    """
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=_end_when_the_parent_asks, daemon=True).start()


def _end_when_the_parent_asks() -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        pass
    os._exit(0)
