"""Mistakes that the user can mend: commands print them without a traceback and exit with code 2, train.py with those of exit_codes.py.

Here rather than beside the code that raises them, so that commands can name them without importing torch.
"""

from __future__ import annotations


class EncoderError(ValueError):
    """The encoders cannot be loaded, or are not the ones the recipe means."""


class CheckpointError(ValueError):
    """There is no such checkpoint, or it is not one of ours, or it lacks what was asked for."""


class RunError(ValueError):
    """A file of a run folder is not what training, export or the demo writes there."""


class DataError(RuntimeError):
    """Data are wrong, and reading them again changes nothing: a source, a shard, a sample, DEST or an option of data_prep. train.py: BAD_DATA."""


class IncompleteError(RuntimeError):
    """A command of data_prep stopped, or left the rest to other hosts, before all of its work was done; run it again to continue."""


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
