"""Commands of `python -m fleet`: a class each, whose fields are its options and whose docstring is its help.

`owner.py` are those of who submits, `operator.py` those of who runs the fleet, `machine.py` those of machines and of the service.
"""

from diffusion.common.command_line import Arguments
from diffusion.contracts.errors import run_command


class Command(Arguments):
    """A command with its arguments, read and checked."""

    @classmethod
    def name_of_command(cls) -> str:
        """Return the word that calls it: `ban` of BanCommand."""
        return cls.__name__.removesuffix('Command').lower()

    def run(self) -> int | None:
        """Do it; return an exit code, None for 0. Libraries that take time are imported here."""
        raise NotImplementedError

    def end(self) -> int:
        """Return the exit code of `run`, and print a line for errors that are the user's to mend."""
        return run_command(self.run)
