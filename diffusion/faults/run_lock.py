"""The run lock: one process, or one job of many, per run folder. Two would write into each other's checkpoints and logs."""

import os
import platform
import time
from functools import partial
from pathlib import Path
from typing import TextIO

from composer.core import Callback

from diffusion.common.collective import of_first_rank
from diffusion.common.locks import try_lock
from diffusion.common.tables import print_message
from diffusion.contracts.errors import RunHeld
from diffusion.recipe import RecipeError

PATIENCE_SEC = 60.0  # a preempted process may still be saving while the next one starts


class RunLock(Callback):
    """Hold the run folder from construction until the trainer is closed, at most as long as this process lives; children do not inherit it.

    Args:
        run_folder: of the run.
        patience_sec: how long to wait for another process to let go.

    Raises:
        RunHeld: on all ranks: another process, on this machine or one that shares the disk, has it.
        RecipeError: on all ranks: the folder cannot be written or locked, or a file that the run writes is a folder or a device there.
    """

    def __init__(self, run_folder: Path, patience_sec: float = PATIENCE_SEC):
        self.file: TextIO | None = None
        of_first_rank(partial(self._lock, run_folder, patience_sec))

    def _lock(self, run_folder: Path, patience_sec: float) -> None:
        try:
            self.file = _locked(run_folder, patience_sec)
        except OSError as error:
            raise RecipeError(str(run_folder), [f'run_folder: cannot be written and locked: {error}; name one on another disk']) from error
        written = [path for path in run_folder.iterdir() if path.suffix in ('.jsonl', '.json', '.yaml')]
        if odd := [f'{path} is not a file; move it away' for path in written if path.exists() and not path.is_file()]:  # or the run would fail later
            raise RecipeError(str(run_folder), odd)

    def post_close(self) -> None:  # after the last upload
        if self.file is not None:
            self.file.close()
            self.file = None


def _locked(run_folder: Path, patience_sec: float) -> TextIO:
    run_folder.mkdir(parents=True, exist_ok=True)
    file = (run_folder / '.lock').open('a+')
    deadline, waits = time.monotonic() + patience_sec, False
    while not try_lock(file, inherited=False):  # a loader process that outlives this one must not keep the folder
        file.seek(0)
        holder = file.read().strip() or 'another process'
        if time.monotonic() >= deadline:
            file.close()
            raise RunHeld(f'{run_folder}: {holder} trains into this folder; let it end, or give this run another name=... or run_folder=...')
        if not waits:
            waits = True
            print_message(f'{run_folder}: {holder} trains into this folder; waiting up to {patience_sec:g} s for it to end')
        time.sleep(0.2)
    file.truncate(0)
    file.write(f'process {os.getpid()} on {platform.node()}\n')
    file.flush()
    return file
