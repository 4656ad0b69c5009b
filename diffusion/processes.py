"""Processes that end together."""

from __future__ import annotations

import ctypes
import signal
import sys

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def end_with_parent() -> None:
    """Ask Linux to kill this process when its parent dies, even by `kill -9`.

    Otherwise a killed launcher leaves its training process behind, and the same command run again would train beside it
    into the same checkpoints. Elsewhere than on Linux this does nothing.
    """
    if sys.platform == 'linux':
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
