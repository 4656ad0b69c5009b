"""How train.py ends: what is said to a person, what number is said to a launcher, and that it really ends."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import traceback
from contextlib import suppress
from typing import Any, NoReturn

from diffusion import stopwatch
from diffusion.datasets.manifest import ManifestError
from diffusion.errors import CheckpointError, DataError, DataUnavailable, EncoderError, NonFinite, RunHeld, StorageOutage
from diffusion.faults import exit_codes
from diffusion.faults.preemption import SIGNALS, Preempted
from diffusion.recipe import RecipeError
from diffusion.storage import StorageError, StorageRefusal

PATIENCE_SEC = 20  # for loggers to write the last lines; a launcher kills after 30

KEY = 'diffusion/ending'

# The first that fits. What is not here is a crash.
CODES: tuple[tuple[type[BaseException], int], ...] = (
    (Preempted, exit_codes.PREEMPTED),
    (RunHeld, exit_codes.PREEMPTED),
    (RecipeError, exit_codes.BAD_RECIPE),
    (StorageRefusal, exit_codes.BAD_RECIPE),
    (ManifestError, exit_codes.BAD_DATA),
    (EncoderError, exit_codes.BAD_DATA),
    (CheckpointError, exit_codes.BAD_DATA),
    (DataError, exit_codes.BAD_DATA),
    (DataUnavailable, exit_codes.STALLED),
    (StorageOutage, exit_codes.STALLED),
    (StorageError, exit_codes.STALLED),
    (NonFinite, exit_codes.NON_FINITE),
)


def explain(error: BaseException) -> int:
    """Print what went wrong, with a traceback if it is a crash; returns the exit code.

    If another rank has announced its end, a crash here only follows from it, and takes its code: a launcher reports the first rank's.
    """
    code = next((code for kind, code in CODES if isinstance(error, kind)), exit_codes.CRASH)
    theirs = announced()
    if code == exit_codes.CRASH and theirs is not None:
        print(f'this rank ends because another one did ({type(error).__name__}; exit code {theirs})', file=sys.stderr)
        return theirs
    announce(code)
    stopwatch.end(type(error).__name__)
    if code == exit_codes.CRASH:
        traceback.print_exception(error)
    else:
        print(f'{error}\n(exit code {code}, docs/reliability.md)', file=sys.stderr)
    return code


def announce(code: int) -> None:
    """Tell the other ranks, which may be waiting for this one in a collective, that it ends."""
    with suppress(Exception):  # the store goes with rank 0
        _store().set(KEY, str(code))


def announced() -> int | None:
    """The exit code with which another rank ends, if one does. Does not wait; may be called by any thread."""
    try:
        return int(_store().get(KEY)) if _store().check([KEY]) else None
    except Exception:  # there is none: one process, or rank 0 has gone
        return None


def _store() -> Any:
    """Where the ranks found each other: they can still talk there while a collective hangs."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()


def end(code: int, trainer: object = None) -> int:
    """Returns `code` for the process to end with, and sees to it that it does: a clean end may wait for other ranks or for threads that hang."""
    engine = getattr(trainer, 'engine', None)
    if engine is not None:
        closing = threading.Thread(target=engine.close, daemon=True)
        closing.start()
        closing.join(PATIENCE_SEC)
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # the launcher's, to all ranks when one has ended: it would replace the code
    at_the_latest = threading.Timer(PATIENCE_SEC, end_now, (code,))
    at_the_latest.daemon = True
    at_the_latest.start()
    return code


def end_now(code: int) -> NoReturn:
    """End at once, with the loader's processes: one that hangs does not notice that its parent has gone."""
    for child in multiprocessing.active_children():
        child.kill()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
