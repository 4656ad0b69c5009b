"""Processes that end together, and the command that started this one."""

import ctypes
import multiprocessing
import os
import shlex
import signal
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path

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


LAUNCHED = 'LOCAL_RANK' in os.environ  # Composer sets it later for a process without a launcher too


def command() -> str:
    """Return the command line that starts this run again: the launcher's, if there was one at the first call, and not that of another parent."""
    return _command(os.getpid())


@cache
def _command(_: int) -> str:
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
