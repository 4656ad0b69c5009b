"""Errors whose message says what to change, the exit codes, and one table of which error ends a command with which code.

The errors are here and not next to the code that raises them, so that commands can name them without importing torch.
"""

import errno
import os
import re
from collections.abc import Callable
from pathlib import Path

from diffusion.common.ray_cluster import ClusterError, ClusterRefusal
from diffusion.common.storage import DISK_REMEDY, StorageError, StorageRefusal
from diffusion.common.text import print_message


class InputError(ValueError):
    """Wrong input by the user: an option, a recipe, a list of prices. Other rooms derive their own from it."""


class EncoderError(ValueError):
    """The encoders cannot be loaded, or are not the ones that the recipe names."""


class CheckpointError(ValueError):
    """There is no such checkpoint, it was not written by this project, or a part of it is missing."""


class RunError(ValueError):
    """A file of a run folder is missing, or holds something else than training, export or the demo writes there."""


class DataError(RuntimeError):
    """Wrong data, which reading again would not change: a source, a shard, a sample, DEST or an option of data_prep."""


class IncompleteError(RuntimeError):
    """A command of data_prep or diffusion.serve stopped, or left the rest to other hosts, before its work was done; run it again to continue."""


class DataUnavailable(RuntimeError):
    """Data cannot be read at the moment: storage does not answer, the disk is full, a loader process hangs."""


class StorageOutage(RuntimeError):
    """More checkpoints in a row could not be written or uploaded than `checkpoint.allowed_misses`."""


class ManifestError(ValueError):
    """A dataset has no readable manifest, or one that contradicts the recipe."""


class NonFinite(RuntimeError):
    """Loss or gradients were NaN or infinite and the recipe's policy is exhausted."""


class RunHeld(RuntimeError):
    """Another process trains into this run folder."""


class Superseded(RuntimeError):
    """Another process has taken the checkpoint folder and continues the run."""


# Exit codes: numbers that a launcher or scheduler can act on. train.py runs unattended for weeks, so its codes say who has to act; they are those of
# sysexits.h where that has a fitting one. docs/reliability.md says for each what to do; tests/faults/ provokes each.
FINISHED = 0  # also if the run already was

# Of all commands but train.py.
BAD_INPUT = 2  # the message says what to change
INCOMPLETE = 3  # stopped by something outside (storage, network, a killed worker): run the same command again

# Of train.py.
BAD_RECIPE = 64  # wrong, or does not fit this machine or the run that it would resume: do not retry
BAD_DATA = 65  # a dataset, encoders or checkpoints are wrong, missing or damaged: do not retry
CRASH = 70  # a bug of this project or of a library: the traceback says where
SUPERSEDED = 73  # another process has taken the checkpoint folder and continues the run: do not retry
PREEMPTED = 75  # SIGTERM, SIGUSR1, SIGHUP or Ctrl-C came and everything is saved, or another process still holds the run: run the same command again
STALLED = 76  # nothing moved for too long, disk or storage failed for too long, or a rank is gone: run again, on another machine if it repeats
NON_FINITE = 77  # loss or gradients stayed NaN or infinite: look at the run before resuming it

INTERRUPTED = 130  # Ctrl-C (of train.py the second one): ended at once; 128 + SIGINT, as shells have it


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
            if out is None or error is None:
                raise
            if _is_about(error, out):
                raise InputError(f'{out}: cannot be written: {error.strerror}; {remedy}') from error
            if isinstance(error, PermissionError) and error.filename is not None:
                raise InputError(f'{os.fsdecode(error.filename)}: cannot be read: {error.strerror}; {DISK_REMEDY}') from error
            raise
    except (*CODES, *also) as error:
        print_message(error)
        return _codes(error, BAD_INPUT)[1]


def _as_os_error(error: Exception) -> OSError | None:
    """Return the error of the operating system that an error is or, as those of safetensors do, names at its end; None for others."""
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


LORA_FOLDER = 'lora'  # of an exported adapter


def refuse_no_model(folder: Path) -> None:
    """Raises InputError: this is neither a model in the diffusers layout nor an exported adapter."""
    is_adapter = (folder / LORA_FOLDER).is_dir() and (folder / 'export.json').is_file()
    if not (is_adapter or (folder / 'model_index.json').is_file()):
        raise InputError(f'{folder}: no model_index.json; python -m diffusion.export CHECKPOINT OUT writes a model')
