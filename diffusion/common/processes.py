"""This process: the command that started it, processes that end together, signals that ask it to stop, imports of large libraries, failpoints."""

import ctypes
import errno
import gc
import multiprocessing
import os
import shlex
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from types import FrameType

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def end_with_parent(number: int = signal.SIGKILL) -> None:
    """Ask Linux to send signal `number` to this process when its parent dies, even by `kill -9`.

    Otherwise a killed launcher leaves its training process behind, and the same command run again would train next to it
    into the same checkpoints. The parent is the *thread* that started this process: do not call it where a short-lived thread
    did. Elsewhere than on Linux it does nothing.
    """
    if sys.platform == 'linux':
        parent = os.getppid()
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
        if os.getppid() != parent:  # it died in between
            os.kill(os.getpid(), number)


def kill_children() -> None:
    """Kill the loader's processes, which multiprocessing started: one that hangs does not notice that its parent is gone."""
    for child in multiprocessing.active_children():
        child.kill()


def leave_no_children() -> None:
    """Kill the loader's processes and flush: for a process that ends, or becomes another, without Python's own end, which would wait for them."""
    kill_children()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()


RESUMED_BY = 'DIFFUSION_RESUMED_BY'  # variable with the command of a launcher on another machine
LAUNCHED = 'LOCAL_RANK' in os.environ  # Composer sets it later for a process without a launcher too


def command() -> str:
    """Return the command line that starts this run again: the launcher's, if there was one at the first call, and not that of another parent."""
    return _command(os.getpid())


@cache
def _command(_: int) -> str:
    if stated := os.environ.get(RESUMED_BY):
        return stated
    words = sys.orig_argv
    if LAUNCHED:  # without a launcher, a parent that names the script too is a wrapper: `timeout`, a script's shell, a profiler
        with suppress(OSError):
            launcher = Path(f'/proc/{os.getppid()}/cmdline').read_text(errors='replace').split('\0')[:-1]
            words = launcher if sys.argv[0] in launcher and launcher[1:2] != ['-c'] else words  # that is the guard of a fleet's worker
    if len(words) > 1 and Path(words[0]).name.startswith('python') and not words[1].startswith('-') and not words[1].endswith('.py'):
        words = words[1:]  # a script of an environment, such as `composer`
    return shlex.join([Path(words[0]).name, *words[1:]]) if words else ''


def shared_memory_is_full(path: str = '/dev/shm', least_bytes: int = 1 << 20) -> bool:  # noqa: S108
    """Return whether processes can hand one another no arrays any more; the error says `No space left on device` and names no file."""
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize < least_bytes


SHARED_MEMORY_FULL = (
    'Shared memory (/dev/shm), in which processes of this host hand over arrays, is full: free it (df /dev/shm), give the container more '
    '(docker run --shm-size 8g; in Kubernetes an emptyDir of medium Memory), or take fewer --processes. Nothing is lost: run the same command again'
)


STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)


@contextmanager
def signals_held_back() -> Iterator[None]:
    """Block the signals in this thread and in processes that are forked in the context; pending ones are delivered at its end.

    For the start of a DataLoader's processes: before `shield_worker` runs in them, PyTorch gives them a handler of SIGTERM that ends them,
    and perhaps threads, whose signals `shield_worker` could not block any more.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def signals_as_exceptions() -> Iterator[None]:
    """SIGTERM and SIGHUP raise SystemExit in the context: what is open is closed, and temporary files go. For the main thread."""

    def end(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


def shield_worker(worker_id: int) -> None:
    """`worker_init_fn` of a DataLoader: its processes are often signalled together with their parent, which still needs their batches.

    They end when the parent itself asks, as DataLoader and multiprocessing do in the end.
    They have to be forked while `signals_held_back`.
    """
    for number in STOP_SIGNALS:
        if number != signal.SIGTERM:
            signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=_end_when_the_parent_asks, daemon=True).start()


def _end_when_the_parent_asks() -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        pass
    os._exit(0)


@contextmanager
def quick_imports(cpu_threads: int | None = None) -> Iterator[None]:
    """Say so, import within the context with the garbage collector off, and leave what was imported out of every later collection.

    PyTorch, diffusers and Composer make a million objects that live as long as the process. Collections that look through them take a fifth of
    the import, a quarter of a second each in training, and seconds when the process ends; processes that are forked later
    (a loader's) would copy the memory.

    Where PyTorch is there already it does nothing: by then the process may hold garbage, which must not be kept.

    Args:
        cpu_threads: of PyTorch's arithmetic, where the user has not set OMP_NUM_THREADS; None leaves the number to PyTorch.
    """
    if 'torch' in sys.modules:
        yield
        return
    speaks = os.environ.get('LOCAL_RANK', '0') == '0' and multiprocessing.parent_process() is None
    given = os.environ.get('OMP_NUM_THREADS')
    if cpu_threads is not None and not given:
        os.environ['OMP_NUM_THREADS'] = str(cpu_threads)
    elif cpu_threads is not None and given != str(cpu_threads) and speaks:
        print(f'OMP_NUM_THREADS={given} counts, not train.cpu_threads={cpu_threads}; unset it for that', file=sys.stderr)
    if speaks:
        print('loading PyTorch and what needs it: seconds, on a cold or busy machine half a minute', file=sys.stderr, flush=True)
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


_passed: Counter[str] = Counter()


def failpoint(name: str) -> None:
    """Perform the action that the environment names for this place, if any."""
    wanted = os.environ.get('DIFFUSION_FAILPOINT')
    if not wanted or os.environ.get('DIFFUSION_FAILPOINT_RANK', os.environ.get('RANK', '0')) != os.environ.get('RANK', '0'):
        return
    _passed[name] += 1
    for entry in wanted.split(','):
        place, _, action = entry.partition(':')
        place, _, count = place.partition('@')
        if place == name and _passed[name] == int(count or 1):
            _act(action, name)


def _act(action: str, name: str) -> None:
    if action == 'enospc':
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), name)
    if action == 'crash':
        raise RuntimeError(f'failpoint {name}')
    if action == 'sleep':
        time.sleep(3600)
    else:
        os.kill(os.getpid(), {'kill': signal.SIGKILL, 'stop': signal.SIGSTOP, 'term': signal.SIGTERM}[action])
