"""How train.py ends: what is said to a person, what number is said to a launcher, and that it really ends."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
import traceback
from typing import NoReturn

from diffusion import exit_codes
from diffusion.datasets.manifest import ManifestError
from diffusion.errors import CheckpointError, DataError, DataUnavailable, EncoderError, NonFinite, RunHeld, StorageOutage
from diffusion.preemption import Preempted
from diffusion.recipe import RecipeError
from diffusion.storage import StorageError, StorageRefusal

PATIENCE_SEC = 20  # for loggers to write the last lines; a launcher kills after 30

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
    """Print what went wrong, with a traceback if it is a crash; returns the exit code."""
    code = next((code for kind, code in CODES if isinstance(error, kind)), exit_codes.CRASH)
    if code == exit_codes.CRASH:
        traceback.print_exception(error)
    else:
        print(f'{error}\n(exit code {code}, docs/reliability.md)', file=sys.stderr)
    return code


def end(code: int, trainer: object = None) -> int:
    """Returns `code` for the process to end with, and sees to it that it does: a clean end may wait for other ranks or for threads that hang."""
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
    """End at once, with the loader's processes: one that hangs does not notice that its parent has gone."""
    for child in multiprocessing.active_children():
        child.kill()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
