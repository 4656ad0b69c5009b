"""How an error ends a command: one table of exit codes, for train.py and for all other commands."""

from __future__ import annotations

import sys
from collections.abc import Callable

from diffusion.common.ray_cluster import ClusterError, ClusterRefusal
from diffusion.common.storage import StorageError, StorageRefusal
from diffusion.contracts.errors import (
    CheckpointError,
    DataError,
    DataUnavailable,
    EncoderError,
    IncompleteError,
    InputError,
    NonFinite,
    RunError,
    RunHeld,
    StorageOutage,
    Superseded,
)
from diffusion.contracts.exit_codes import (
    BAD_DATA,
    BAD_INPUT,
    BAD_RECIPE,
    CRASH,
    INCOMPLETE,
    NON_FINITE,
    PREEMPTED,
    STALLED,
    SUPERSEDED,
)
from diffusion.contracts.manifest import ManifestError

# Class of the error: exit code of train.py, exit code of every other command. The first class that fits counts; anything else is a crash.
CODES: dict[type[Exception], tuple[int, int]] = {
    RunHeld: (PREEMPTED, BAD_INPUT),
    Superseded: (SUPERSEDED, BAD_INPUT),
    InputError: (BAD_RECIPE, BAD_INPUT),
    StorageRefusal: (BAD_RECIPE, BAD_INPUT),
    ClusterRefusal: (BAD_RECIPE, BAD_INPUT),
    ManifestError: (BAD_DATA, BAD_INPUT),
    EncoderError: (BAD_DATA, BAD_INPUT),
    CheckpointError: (BAD_DATA, BAD_INPUT),
    DataError: (BAD_DATA, BAD_INPUT),
    RunError: (BAD_DATA, BAD_INPUT),
    DataUnavailable: (STALLED, INCOMPLETE),
    StorageOutage: (STALLED, INCOMPLETE),
    StorageError: (STALLED, INCOMPLETE),
    ClusterError: (STALLED, INCOMPLETE),
    IncompleteError: (STALLED, INCOMPLETE),
    NonFinite: (NON_FINITE, BAD_INPUT),
}


def train_code(error: BaseException) -> int:
    """Return the exit code with which train.py ends on `error`; CRASH for errors that are not in the table."""
    return _codes(error, CRASH)[0]


def run_command(work: Callable[[], int | None], also: tuple[type[Exception], ...] = ()) -> int:
    """Run a command other than train.py and return its exit code: what `work` returns, 0 for None.

    An error of the table is printed without a traceback, because its message says what to do; all other errors are raised.

    Args:
        also: further errors that mean wrong input here.
    """
    try:
        return work() or 0
    except (*CODES, *also) as error:
        print(error, file=sys.stderr)
        return _codes(error, BAD_INPUT)[1]


def _codes(error: BaseException, other: int) -> tuple[int, int]:
    """Return the codes of the first class of the table that fits; `other` for both where none does."""
    return next((codes for kind, codes in CODES.items() if isinstance(error, kind)), (other, other))
