"""Requests to save and stop: SIGTERM and SIGUSR1 from clouds that take a machine back, `scancel`, Kubernetes, Slurm's `--signal`; SIGINT from
Ctrl-C; SIGHUP when the terminal closes or ssh is lost.

The handler notes the request. After each step the trainer asks all ranks whether any has one; then a checkpoint is saved, evaluation and
sample grids are left out, and Preempted is raised. While Python imports, the process just ends, once it has read the recipe. While the trainer is
being built there is nothing to save either: Preempted is raised at once, and kept, because a library that is interrupted by it may replace or
swallow it.

A second Ctrl-C ends the process at once, wherever its main thread is: a thread reads what the C level of Python writes for each signal.
"""

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType, SimpleNamespace
from typing import NoReturn

from diffusion.common import stopwatch
from diffusion.common.processes import STOP_SIGNALS, command, kill_children
from diffusion.contracts.errors import INTERRUPTED, PREEMPTED

OF_TERMINALS = (signal.SIGINT, signal.SIGHUP)  # those that nohup and shells tell a process to ignore
ONE_PRESS_SEC = 0.3  # a wrapper may forward the Ctrl-C that the terminal has sent already
ANNOUNCING_SEC = 1.0  # for other ranks to be told; their store may be gone

READING, IMPORTING, STARTING, TRAINING, ENDING = 'reading', 'importing', 'starting', 'training', 'ending'

_state = SimpleNamespace(received=False, agreed=False, phase=STARTING, stopped=None)
_signals: list[socket.socket] = []  # where Python's C level writes the numbers of signals, and where a thread reads them


class Preempted(BaseException):
    """Someone asked the run to stop; everything is saved. No Exception: handlers of those expect another kind of failure."""


def listen(phase: str = STARTING) -> None:
    """Install the handlers, for the life of the process, but not for signals of terminals that it was started to ignore.

    Args:
        phase: READING, of the recipe, lets a request wait for the next phase: a launcher ends all ranks once one of them has found the recipe wrong,
            and returns the code of any of them; IMPORTING ends the process at a request; STARTING raises Preempted.
    """
    _state.phase = phase
    for number in STOP_SIGNALS:
        if number not in OF_TERMINALS or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _note)
    if not _signals:
        _signals.extend(socket.socketpair())
        _signals[0].setblocking(False)
        signal.set_wakeup_fd(_signals[0].fileno(), warn_on_full_buffer=False)
        threading.Thread(target=_count_interrupts, args=(_signals[1],), name='ctrl-c', daemon=True).start()
        os.register_at_fork(after_in_child=_hear_nothing)
    if _state.received and phase == IMPORTING:
        _end(PREEMPTED, str(_before_the_first_step()))


def _hear_nothing() -> None:
    """Detach a forked process, which has no such thread, from its parent's signals."""
    signal.set_wakeup_fd(-1)
    _signals.clear()


@contextmanager
def kept() -> Iterator[None]:
    """Keep the handlers within the context: `import composer` tries to install its own, which print tracebacks."""
    install = signal.signal
    signal.signal = lambda number, handler: None if number in STOP_SIGNALS else install(number, handler)  # type: ignore[assignment]
    try:
        yield
    finally:
        signal.signal = install


def received() -> bool:
    """Whether this process was asked to stop."""
    return _state.received


def agree(any_rank: bool) -> None:
    """Record whether any rank was asked to stop: from here on all ranks act on it, in the same step."""
    _state.agreed = any_rank
    _state.received |= any_rank  # a request that comes later is the same one


def stopped() -> Preempted | None:
    """Return the Preempted that was raised before training, also if a library replaced it (safetensors) or swallowed it (a `__del__`)."""
    return _state.stopped


def agreed() -> bool:
    """Whether the run stops after this step, on all ranks alike."""
    return _state.agreed


@contextmanager
def at_step_boundaries() -> Iterator[None]:
    """Let requests wait for the end of a step within the context. Before it a request ends the process; after it a request is only noted.

    Raises:
        Preempted: a request has come before.
    """
    if _state.stopped is not None:
        raise _state.stopped
    _state.phase = TRAINING
    try:
        yield
    finally:
        _state.phase = ENDING  # the launcher tells all ranks to stop when one has ended: that must not replace this rank's own reason


def ignore_requests(but_ctrl_c: bool = False) -> None:
    """Ignore requests from now on, also during Python's own end, which would restore the signals' defaults: the process is ending by itself.

    Args:
        but_ctrl_c: a second one still ends the process at once.
    """
    _state.phase = ENDING
    for number in STOP_SIGNALS:
        if number != signal.SIGINT or not (but_ctrl_c and _signals):
            signal.signal(number, signal.SIG_IGN)


def saved_after(batch: int) -> Preempted:
    """Return the error to raise once the checkpoint of `batch` is written."""
    return Preempted(f'stopped on request and saved after batch {batch:,}; resume with: {command()}')


def _note(number: int, _: FrameType | None) -> None:
    first, _state.received = not _state.received, True
    if not first or _state.phase in (READING, TRAINING, ENDING):  # a second one is the launcher's, which tells all ranks when one has ended
        return
    _state.stopped = _before_the_first_step()
    if _state.phase == IMPORTING:
        _end(PREEMPTED, str(_state.stopped))
    raise _state.stopped


def _before_the_first_step() -> Preempted:
    return Preempted(f'stopped on request before the first step: nothing is lost; resume with: {command()}')


def _count_interrupts(numbers: socket.socket) -> None:
    pressed_at = None
    while received := numbers.recv(1):
        if received[0] != signal.SIGINT:
            continue
        if pressed_at is None:
            pressed_at = time.monotonic()
            if _state.phase == TRAINING and os.environ.get('LOCAL_RANK', '0') == '0':
                _log(f'Ctrl-C: the run saves after this step and ends; press Ctrl-C again to end at once and lose {stopwatch.unsaved()}')
        elif time.monotonic() - pressed_at > ONE_PRESS_SEC:
            telling = threading.Thread(target=_tell_the_others, daemon=True)
            telling.start()
            telling.join(ANNOUNCING_SEC)
            _end(INTERRUPTED, f'ended at once by a second Ctrl-C: lost {stopwatch.unsaved()}; resume with: {command()}')


def _tell_the_others() -> None:
    from diffusion.faults import peers

    if int(os.environ.get('WORLD_SIZE', '1')) > 1:
        peers.announce(INTERRUPTED)


def _end(code: int, message: str) -> NoReturn:
    """End at once, without Python's own end, which would wait for the main thread."""
    from diffusion.faults import terminal

    kill_children()
    terminal.give_back()
    _log(f'{message}\n(exit code {code}, docs/reliability.md)')
    os._exit(code)


def _log(line: str) -> None:
    """Print to the terminal, past Python's buffers, whose lock the main thread may hold."""
    with suppress(OSError):
        os.write(2, f'\n{line}\n'.encode())
