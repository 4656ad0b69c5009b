"""Rollback (`faults.non_finite: rollback`): return to the last checkpoint and leave out the data since.

Which batches to leave out is written next to the checkpoints, so that it holds after any restart, on any machine. Left out means: the samples
are read and counted, the schedule moves on, nothing is trained. Numbers of batches are of finished ones, so 0 is before the first.
"""

import dataclasses
import json
import os
import sys
from dataclasses import dataclass
from functools import partial

from diffusion.common import belongings
from diffusion.common.collective import on_first_rank
from diffusion.common.files import parse_json
from diffusion.common.processes import leave_no_children
from diffusion.common.storage import Folder, open_folder, write
from diffusion.contracts.errors import CheckpointError, NonFinite

FILE_NAME = 'left-out.json'


class RollBack(Exception):
    """Signal, not an error: train.py starts again from the checkpoint of batch `safe_batch`, without the batches up to `batch`."""

    def __init__(self, safe_batch: int, batch: int, cause: str):
        super().__init__(cause)
        self.left_out = LeftOut(safe_batch, batch, cause)


@dataclass(frozen=True)
class LeftOut:
    """The batches after the first `after_batch` up to and with number `last_batch`."""

    after_batch: int
    last_batch: int
    cause: str

    def __contains__(self, finished_batches: int) -> bool:
        """Whether the batch after `finished_batches` is left out."""
        return self.after_batch <= finished_batches < self.last_batch


def read(checkpoint_folder: str) -> list[LeftOut]:
    """Read what earlier processes of the run have left out, on the first rank for all; every rank must call it.

    Raises:
        CheckpointError: the list is damaged.
    """
    return on_first_rank(partial(_read, open_folder(checkpoint_folder)))


def _read(folder: Folder) -> list[LeftOut]:
    try:
        content = folder.read(FILE_NAME)
    except FileNotFoundError:
        return []
    try:
        return [LeftOut(int(entry['after_batch']), int(entry['last_batch']), str(entry['cause'])) for entry in parse_json(content)]
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        raise CheckpointError(
            f'{folder.url}/{FILE_NAME}: damaged: {error!r}. It names the batches that this run leaves out after a fault: restore it, or delete it to '
            'train on them again'
        ) from None


def add(checkpoint_folder: str, left_out: LeftOut) -> None:
    """Write down what the next process must leave out; every rank must call it.

    Raises:
        NonFinite: on all ranks: the run was at that checkpoint before, left out what followed, and came to the next fault without saving in between.
    """
    known = read(checkpoint_folder)
    if any(earlier.after_batch == left_out.after_batch for earlier in known):
        raise NonFinite(
            f'{left_out.cause}. The run has gone back to batch {left_out.after_batch:,} once already, so it is not the data: start a new run from an '
            'earlier checkpoint with a lower optimizer.lr (load_path=FILE.pt), or look for a faulty machine'
        )
    content = json.dumps([dataclasses.asdict(entry) for entry in (*known, left_out)], indent=1).encode()
    on_first_rank(partial(write, open_folder(checkpoint_folder), FILE_NAME, content))  # no rank may start over before it is there


def start_over() -> None:
    """Replace this process by a new one of the same command: nothing of its memory, graphs or streams is left, and a launcher sees no end."""
    leave_no_children()
    belongings.remove_own()
    os.execv(sys.executable, sys.orig_argv)  # noqa: S606
