"""Errors whose message says what to change: commands print them without a traceback, and `endings.py` has their exit codes.

They are here and not next to the code that raises them, so that commands can name them without importing torch.
"""


class InputError(ValueError):
    """What the user wrote is wrong: an option, a recipe, a list of prices. Other rooms derive their own from it."""


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


class NonFinite(RuntimeError):
    """Loss or gradients were NaN or infinite and the recipe's policy is exhausted."""


class RunHeld(RuntimeError):
    """Another process trains into this run folder."""


class Superseded(RuntimeError):
    """Another process has taken the checkpoint folder and continues the run."""
