"""The folder of an attempt: below WORK, its own, and gone when the attempt has ended, also if that was by a kill."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from diffusion.common.files import keep_private, try_lock
from diffusion.fleet.attempts.warm import WarmFolder


@contextmanager
def attempt_folder(work: Path, name: str) -> Iterator[Path]:
    """A new folder for an attempt; what killed processes left next to it is deleted.

    Args:
        work: of the machine.
        name: of the attempt, different for each.

    Raises:
        OSError: the disk is full, or closed to this user.
    """
    parent = work / 'attempts'
    parent.mkdir(parents=True, exist_ok=True)
    for path in parent.glob('*.lock'):
        with path.open('a') as file:
            if try_lock(file):
                shutil.rmtree(path.with_suffix(''), ignore_errors=True)
                path.unlink(missing_ok=True)
    folder, held = parent / f'{name}.d', parent / f'{name}.d.lock'
    with held.open('a') as file:
        if not try_lock(file):
            raise FileExistsError(f'{folder}: another process uses it')
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            held.unlink(missing_ok=True)


def open_work(work: Path, keep_gb: float) -> WarmFolder:
    """Make the folder of a machine, closed to other users, and what stays in it between jobs.

    Raises:
        OSError: the disk is full, or closed to this user.
    """
    keep_private()
    work.mkdir(parents=True, exist_ok=True)
    return WarmFolder(work / 'warm', keep_gb)
