"""How an error ends a command: one table of exit codes, for train.py and for all other commands."""

import errno
import os
import re
from collections.abc import Callable
from pathlib import Path

from diffusion.common.ray_cluster import ClusterError, ClusterRefusal
from diffusion.common.storage import DISK_REMEDY, StorageError, StorageRefusal
from diffusion.common.tables import print_message
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


def run_command(
    work: Callable[[], int | None], also: tuple[type[Exception], ...] = (), out: Path | None = None, remedy: str = 'name another OUT'
) -> int:
    """Run a command other than train.py and return its exit code: what `work` returns, 0 for None.

    An error of the table is printed without a traceback, because its message says what to do; all other errors are raised.

    Args:
        also: further errors that mean wrong input here.
        out: the file or folder that `work` writes; whether it may be is asked before the work too, which can take minutes. Of a command that
            names it other files that are closed to this user are wrong input, too.
        remedy: against one that cannot be written.
    """
    try:
        if out is not None:
            _refuse_unwritable(out, remedy)
        try:
            return work() or 0
        except Exception as raised:
            error = _as_os_error(raised)
            if error is None:
                raise
            if out is not None and _is_about(error, out):
                raise InputError(f'{out}: cannot be written: {error.strerror}; {remedy}') from error
            if out is not None and isinstance(error, PermissionError) and error.filename is not None:
                raise InputError(f'{os.fsdecode(error.filename)}: cannot be read: {error.strerror}; {DISK_REMEDY}') from error
            raise
    except (*CODES, *also) as error:
        print_message(error)
        return _codes(error, BAD_INPUT)[1]


def _as_os_error(error: Exception) -> OSError | None:
    """The error of the operating system that an error is or, as those of safetensors do, names at its end; None for others."""
    if isinstance(error, OSError):
        return error
    number = re.search(r'\(os error (\d+)\)$', str(error))
    return None if number is None else OSError(int(number[1]), os.strerror(int(number[1])))


def _refuse_unwritable(out: Path, remedy: str) -> None:
    """Raises InputError: the folder in which `out` would take its name cannot be written."""
    folder = Path(os.path.abspath(out)).parent
    while not os.path.lexists(folder) and folder != folder.parent:  # those that are missing would be made
        folder = folder.parent
    reason = '' if os.path.isdir(folder) else 'is not a folder'
    if not reason and not os.access(folder, os.W_OK | os.X_OK):
        reason = 'is on a disk that is mounted read-only' if os.statvfs(folder).f_flag & os.ST_RDONLY else 'is closed to this user'
    if reason:
        raise InputError(f'{out}: cannot be written: {folder} {reason}; {remedy}')


def _is_about(error: OSError, out: Path) -> bool:
    """Whether the disk of `out` is full, or the error names `out`, a folder above or below it, or a temporary name next to it."""
    if error.filename is None:
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    path, out = Path(os.path.abspath(os.fsdecode(error.filename))), Path(os.path.abspath(out))
    if path in (out, *out.parents) or out in path.parents:
        return True
    return out.parent in path.parents and path.relative_to(out.parent).parts[0].startswith('.')


def _codes(error: BaseException, other: int) -> tuple[int, int]:
    """Return the codes of the first class of the table that fits; `other` for both where none does."""
    return next((codes for kind, codes in CODES.items() if isinstance(error, kind)), (other, other))
