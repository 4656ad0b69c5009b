"""The owner of a checkpoint folder: the one process that may write to it, named by `owner.json` in the folder.

The run lock keeps two processes out of one run folder on one disk. It does not help where two runs name the same `checkpoint.folder`, nor
against a machine that was given up for dead and still lives: its run has been resumed elsewhere. So each start of a run takes the folder,
with an epoch that is one higher than the last, in an exclusive write; the process that had it finds that out before it writes or deletes.
"""

import datetime
import json
import os
import platform
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diffusion.checkpoints.uploading import log
from diffusion.common.files import parse_json_object
from diffusion.common.storage import Folder, StorageError, StorageRefusal, open_folder
from diffusion.contracts.errors import StorageOutage, Superseded
from diffusion.recipe import RecipeError

OWNER = 'owner.json'


@dataclass(frozen=True)
class Owner:
    """A process that has taken a checkpoint folder."""

    folder: str
    content: bytes  # of its owner.json

    def confirm(self) -> None:
        """Check that this process still owns the folder; call before anything in it is written or deleted.

        Raises:
            Superseded: another process has taken the folder since.
            StorageError: the folder cannot be read.
        """
        folder = open_folder(self.folder)
        there = _read(folder)
        if there is None and folder.swap(OWNER, None, self.content):  # somebody has deleted it
            return
        if there != self.content:
            now = _parsed(there)
            raise Superseded(
                f'{self.folder}: taken over by {now.get("process", "another process")} at {now.get("time", "an unknown time")}, epoch '
                f'{now.get("epoch", "unknown")}, this process has {_parsed(self.content)["epoch"]}: the run is resumed there, and this process '
                'writes nothing more; do not start it again while that one runs'
            )


def take_over(checkpoint_folder: str, run_folder: str) -> Owner:
    """Become the owner of the folder; a process of the same run that has it is superseded.

    Args:
        run_folder: tells runs apart: a run keeps it when it is started again, or moves it together with its checkpoints.

    Raises:
        RecipeError: the folder belongs to another run.
        StorageRefusal: the storage refuses.
        StorageOutage: the storage does not answer.
    """
    run = _run(checkpoint_folder, run_folder)
    with folder_errors():
        folder = open_folder(checkpoint_folder)
        while True:
            before = _read(folder)
            known = _parsed(before)
            if known.get('run', run) != run:
                raise RecipeError(checkpoint_folder, [_of_another_run(known, run_folder)])
            content = {
                'run': run,
                'epoch': known.get('epoch', 0) + 1,
                'process': f'process {os.getpid()} on {platform.node()}',
                'time': datetime.datetime.now(datetime.UTC).isoformat(timespec='seconds'),
                'token': secrets.token_hex(8),
            }
            owner = Owner(checkpoint_folder, json.dumps(content, indent=1).encode() + b'\n')
            if folder.swap(OWNER, before, owner.content):
                return owner


def _of_another_run(known: dict[str, Any], run_folder: str) -> str:
    return (
        f'checkpoint.folder: holds the checkpoints of another run (its run_folder, as seen from there: {known["run"]}; last started at '
        f"{known['time']} by {known['process']}), and the two would delete each other's; this run has run_folder={run_folder}. Set another "
        f'checkpoint.folder (load_path starts from the weights of another run). If it is the same run under a new path, delete {OWNER} there'
    )


def _run(checkpoint_folder: str, run_folder: str) -> str:
    """Return the path of the run folder; for local checkpoints relative to them, so that it stays the same if both are moved."""
    if '://' in checkpoint_folder:
        return os.path.normpath(run_folder)
    return os.path.relpath(Path(run_folder).absolute(), Path(checkpoint_folder).absolute())


def _read(folder: Folder) -> bytes | None:
    try:
        return folder.read(OWNER)
    except FileNotFoundError:
        return None


def _parsed(content: bytes | None) -> dict[str, Any]:
    """Return the content of the file; empty if there is none or it is damaged."""
    if content is None:
        return {}
    try:
        found = parse_json_object(content)
        return {'run': str(found['run']), 'epoch': int(found['epoch']), 'process': str(found['process']), 'time': str(found['time'])}
    except (ValueError, TypeError, KeyError) as error:
        log(f'{OWNER} is damaged and is replaced: {type(error).__name__}: {error}')
        return {}


@contextmanager
def folder_errors() -> Iterator[None]:
    """Name `checkpoint.folder` in what its storage raises."""
    try:
        yield
    except StorageRefusal as error:
        raise StorageRefusal(f'checkpoint.folder: {error}') from error
    except StorageError as error:
        raise StorageOutage(f'checkpoint.folder: {error}') from error
