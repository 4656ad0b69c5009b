"""How the commands of data_prep end when they do not succeed; `command.py` turns each into a message and an exit code."""


class DataError(ValueError):
    """The source, DEST or an option is wrong; the message says which file or field, and what to do."""


class IncompleteError(RuntimeError):
    """The work stopped, or belongs to others, before all of it was done; the same command goes on."""
