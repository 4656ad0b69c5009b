"""How train.py ends: what is said to a person, what number is said to a launcher, and that it really ends."""

from __future__ import annotations

import os
import re
import sys
import threading
import traceback
from typing import NoReturn

from diffusion.common import stopwatch
from diffusion.common.processes import command, leave_no_children
from diffusion.common.storage import StorageError, StorageRefusal
from diffusion.contracts import exit_codes
from diffusion.contracts.errors import (
    CheckpointError,
    DataError,
    DataUnavailable,
    EncoderError,
    NonFinite,
    RunError,
    RunHeld,
    StorageOutage,
    Superseded,
)
from diffusion.contracts.manifest import ManifestError
from diffusion.faults import terminal
from diffusion.faults.peers import announce, announced, leave, lost
from diffusion.faults.preemption import Preempted, ignore_requests, stopped
from diffusion.recipe import RecipeError

PATIENCE_SEC = 12  # for loggers to write the last lines, and again for Python to end; a launcher kills after 30

LOST_PEER = re.compile(r'Connection (closed|reset) by (remote )?peer|remote process exited|NCCL.*(unhandled system error|remote)', re.DOTALL)

# The first that fits. What is not here is a crash.
CODES: tuple[tuple[type[BaseException], int], ...] = (
    (Preempted, exit_codes.PREEMPTED),
    (RunHeld, exit_codes.PREEMPTED),
    (Superseded, exit_codes.SUPERSEDED),
    (RecipeError, exit_codes.BAD_RECIPE),
    (StorageRefusal, exit_codes.BAD_RECIPE),
    (ManifestError, exit_codes.BAD_DATA),
    (EncoderError, exit_codes.BAD_DATA),
    (CheckpointError, exit_codes.BAD_DATA),
    (DataError, exit_codes.BAD_DATA),
    (RunError, exit_codes.BAD_DATA),
    (DataUnavailable, exit_codes.STALLED),
    (StorageOutage, exit_codes.STALLED),
    (StorageError, exit_codes.STALLED),
    (NonFinite, exit_codes.NON_FINITE),
)


def explain(error: BaseException) -> int:
    """Print what went wrong, with a traceback if it is a crash; returns the exit code.

    If another rank has announced its end, a crash here only follows from it, and takes its code: a launcher reports the first rank's.
    """
    ignore_requests(but_ctrl_c=True)
    error = stopped() or error
    code = next((code for kind, code in CODES if isinstance(error, kind)), exit_codes.CRASH)
    theirs = announced() if code == exit_codes.CRASH else None
    if theirs is not None:
        leave()
        stopwatch.end('PeerLost')
        print(f'this rank ends because another one did (exit code {theirs}): {_first_line(error)}', file=sys.stderr)
        return theirs
    if code == exit_codes.CRASH and _of_a_lost_peer(error):  # who was killed, or whose machine went away, has announced nothing
        leave()
        stopwatch.end('PeerLost')
        print(
            f'{_first_line(error)}\nthis rank ends because {lost()} is gone without a message: killed (out of memory?), or its machine was lost; '
            f'resume with: {command()}\n(exit code {exit_codes.STALLED}, docs/reliability.md)',
            file=sys.stderr,
        )
        return exit_codes.STALLED
    announce(code)
    stopwatch.end(type(error).__name__)
    if code == exit_codes.CRASH:
        traceback.print_exception(error)
    elif code != exit_codes.PREEMPTED or os.environ.get('LOCAL_RANK', '0') == '0':  # all ranks agree on that, and one says so
        print(f'{error}\n(exit code {code}, docs/reliability.md)', file=sys.stderr)
    return code


def _first_line(error: BaseException) -> str:
    """Without the C++ frames that may follow."""
    return (str(error) or repr(error)).splitlines()[0][:300]


def _of_a_lost_peer(error: BaseException) -> bool:
    """Whether a collective broke because a rank is not there any more."""
    torch = sys.modules.get('torch')
    return torch is not None and isinstance(error, torch.distributed.DistError | RuntimeError) and bool(LOST_PEER.search(str(error)))


def end(code: int, trainer: object = None) -> int:
    """Returns `code` for the process to end with, and sees to it that it does: a clean end may wait for other ranks or for threads that hang."""
    ignore_requests()
    engine = getattr(trainer, 'engine', None)
    if engine is not None:
        closing = threading.Thread(target=engine.close, daemon=True)
        closing.start()
        closing.join(PATIENCE_SEC)
    at_the_latest = threading.Timer(PATIENCE_SEC, end_now, (code,))
    at_the_latest.daemon = True
    at_the_latest.start()
    return code


def end_now(code: int) -> NoReturn:
    """End at once, with the loader's processes."""
    leave_no_children()
    terminal.give_back()
    os._exit(code)
