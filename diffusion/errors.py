"""Mistakes that the user can mend: commands print them without a traceback and exit with code 2.

Here rather than beside the code that raises them, so that commands can name them without importing torch.
"""


class EncoderError(ValueError):
    """The encoders cannot be loaded, or are not the ones the recipe means."""


class CheckpointError(ValueError):
    """There is no such checkpoint, or it is not one of ours, or it lacks what was asked for."""
