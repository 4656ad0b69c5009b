"""Mistakes that the user can mend: commands print them without a traceback and exit with code 2, train.py with those of exit_codes.py.

Here rather than beside the code that raises them, so that commands can name them without importing torch.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class EncoderError(ValueError):
    """The encoders cannot be loaded, or are not the ones the recipe means."""


class CheckpointError(ValueError):
    """There is no such checkpoint, or it is not one of ours, or it lacks what was asked for."""


class RunError(ValueError):
    """A file of a run folder is not what training, export or the demo writes there."""


class DataError(RuntimeError):
    """A shard or sample of the training data is wrong, and fetching it again does not mend it: exit code BAD_DATA."""


class DataUnavailable(RuntimeError):
    """Data cannot be had at the moment: storage does not answer, the disk is full, a loader process hangs: exit code STALLED."""


class StorageOutage(RuntimeError):
    """More checkpoints in a row could not be written or uploaded than `checkpoint.allowed_misses`: exit code STALLED."""


class NonFinite(RuntimeError):
    """Loss or gradients were NaN or infinite and the recipe's policy is at its end: exit code NON_FINITE."""


class RunHeld(RuntimeError):
    """Another process trains into this run folder: exit code PREEMPTED."""


class Superseded(RuntimeError):
    """The run is being continued by another process, which has taken the checkpoint folder: exit code SUPERSEDED."""


def counted(number: int, noun: str) -> str:
    """`1 GPU`, `2,048 GPUs`."""
    return f'{number:,} {noun}{"" if number == 1 else "s"}'


def did_you_mean(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """`; did you mean 'x'?` for the end of a sentence about a name that is not known; a full stop if nothing is like it.

    Args:
        cutoff: least likeness (0..1), as difflib has it.
    """
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return f"; did you mean '{close[0]}'?" if close else '.'
