"""Processes that end together."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def end_with_parent() -> None:
    """Ask Linux to kill this process when its parent dies, even by `kill -9`.

    Otherwise a killed launcher leaves its training process behind, and the same command run again would train beside it
    into the same checkpoints. The parent is the *thread* that started this process: do not call it where a short-lived thread
    did. Elsewhere than on Linux it does nothing.
    """
    if sys.platform == 'linux':
        parent = os.getppid()
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died in between
            os.kill(os.getpid(), signal.SIGKILL)


def leave_no_children() -> None:
    """Kill the loader's processes and flush: for a process about to end, or to become another, without Python's own end, which would wait for them.

    One that hangs does not notice that its parent has gone.
    """
    for child in multiprocessing.active_children():
        child.kill()
    sys.stdout.flush()
    sys.stderr.flush()
