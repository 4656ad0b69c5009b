"""Tell the other ranks that this one ends, and end when one of them does.

A rank that fails leaves the others in a collective, for minutes on its own machine and for an hour on others, and the launcher then reports the
code of one that waited. So who ends with an error says so in the store in which the ranks found each other, and all look there.
"""

import datetime
import os
import platform
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from diffusion.contracts.errors import INTERRUPTED

KEY = 'diffusion/ending'
INTERVAL_SEC = 2.0
PATIENCE_SEC = 3  # of a request to the store, which is gone if the first rank is

_state = SimpleNamespace(announced=False, watching=False, places=[])
_connection = threading.local()  # one a thread: a request blocks all that share it


def announce(code: int) -> None:
    """Tell the other ranks, which may be waiting for this one in a collective, that it ends with `code`."""
    _state.announced = True
    with suppress(Exception):
        _own_store().set(KEY, str(code))


def leave() -> None:
    """Stop looking at what other ranks announce: a thread that is in C++ when Python ends would abort the process."""
    _state.announced = True


def announced() -> int | None:
    """Return the exit code with which another rank ends, if one does."""
    if _state.announced:
        return None
    try:
        store = _own_store()
        return int(store.get(KEY)) if store.check([KEY]) else None
    except Exception:  # there is none: one process, or the first rank has gone
        _connection.store = None
        return None


def watch(end_now: Callable[[int], object]) -> None:
    """Start a thread that ends this process, wherever it hangs, when another rank has ended with an error; with that rank's code.

    All ranks must call it, once they have met.
    """
    if int(os.environ.get('WORLD_SIZE', '1')) > 1 and not _state.watching:
        from composer.utils import dist

        _state.watching = True
        _state.places = dist.all_gather_object((platform.node(), os.getpid()))
        _own_store()  # while the first rank is there: who asks one that is just dying gets C++ frames
        threading.Thread(target=_watch, args=(end_now,), name='peers', daemon=True).start()


def _watch(end_now: Callable[[int], object]) -> None:
    pause = threading.Event()
    while not pause.wait(INTERVAL_SEC):
        code = announced()
        if code is None:
            continue
        # It has time to notice by itself, but for a second Ctrl-C.
        if (code == INTERRUPTED or not pause.wait(INTERVAL_SEC)) and not _state.announced:
            print(f'this rank ends because another one did (exit code {code})', file=sys.stderr, flush=True)
            end_now(code)


def lost() -> str:
    """Name the ranks of this machine whose processes are gone; 'a rank' if that is on another one. For a rank whose connections broke."""
    deadline = time.monotonic() + PATIENCE_SEC
    while time.monotonic() < deadline:
        gone = [
            f'rank {rank} (process {process} on {node})'
            for rank, (node, process) in enumerate(_state.places)
            if node == platform.node() and not _runs(process)
        ]
        if gone:
            return ' and '.join(gone)
        time.sleep(0.1)  # its connections close a little before it is gone
    return 'a rank'


def _runs(process: int) -> bool:
    """Whether a process runs; a zombie, whose parent has not noted its end, does not."""
    try:
        return Path(f'/proc/{process}/stat').read_text().rpartition(')')[2].split()[0] not in 'ZX'
    except OSError:
        return not Path('/proc/self').exists()  # elsewhere than on Linux nothing is known


def _own_store() -> Any:
    """Return this thread's connection to the store: the process group's may be waiting for an answer, as long as a collective may."""
    if getattr(_connection, 'store', None) is None:
        from torch.distributed import TCPStore

        where = os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT'])
        socket.create_connection(where, PATIENCE_SEC).close()  # if it is gone, TCPStore would print its C++ frames before it raises
        _connection.store = TCPStore(*where, is_master=False, wait_for_workers=False, timeout=datetime.timedelta(seconds=PATIENCE_SEC))
    return _connection.store
