"""Guards of a run: the lock of its folder, and the watchdog that ends it when it no longer moves."""

import faulthandler
import os
import platform
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from composer.core import Callback
from composer.utils import dist

from diffusion.common import stopwatch
from diffusion.common.collective import on_first_rank
from diffusion.common.files import try_lock
from diffusion.common.text import print_message
from diffusion.contracts.errors import STALLED, RunHeld
from diffusion.faults import preemption
from diffusion.faults.process import end_now
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
        on_first_rank(partial(self._lock, run_folder, patience_sec))

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


LINES_SEC = 60  # between two lines about a step that is slow
FIRST_STEP_SEC = 1800  # compilation, the loader's first fill, thousands of ranks that find each other
GRACE_SEC = 60  # a thread of Python's needs the interpreter; after that one of C's, which needs nothing, takes over


class StallWatchdog(Callback):
    """If no step, evaluation batch or checkpoint comes to its end for `limit_sec`: writes the stacks of all threads to
    `folder`/rank0.txt and to stderr, on every rank (they stall together), and ends the process with exit code STALLED. Before that the first rank
    says every LINES_SEC how long it has been.

    Args:
        limit_sec: longest time without a sign of life.
        folder: of the stacks.
        last_upload_sec: as long as the upload of the last checkpoint may take at the end.
    """

    def __init__(self, limit_sec: float, folder: Path, last_upload_sec: float):
        self.limit_sec, self.folder, self.last_upload_sec = limit_sec, folder, last_upload_sec
        self.deadline = float('inf')
        self.begun = self.said_at = 0.0
        self.armed_at = 0.0
        self.over = threading.Event()
        self.stacks: TextIO | None = None

    def fit_start(self, state: Any, logger: Any) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.stacks = (self.folder / f'rank{dist.get_global_rank()}.txt').open('a')
        self._beat(max(self.limit_sec, FIRST_STEP_SEC))
        threading.Thread(target=self._watch, name='stall-watchdog', daemon=True).start()

    def alive(self, state: Any = None, logger: Any = None) -> None:
        """Note a sign of life: what takes long and is no step gives one after each part of it."""
        self._beat(self.limit_sec)

    batch_end = eval_batch_end = alive

    def batch_checkpoint(self, state: Any, logger: Any) -> None:
        last = state.timestamp >= state.max_duration or preemption.agreed()  # the last upload may take as long as it has
        self._beat(self.limit_sec + (self.last_upload_sec if last else 0))

    def close(self, state: Any, logger: Any) -> None:
        self.over.set()
        faulthandler.cancel_dump_traceback_later()
        if self.stacks is not None:
            self.stacks.close()
            self.stacks = None

    def _beat(self, limit_sec: float) -> None:
        now = self.begun = self.said_at = time.monotonic()
        self.deadline = now + limit_sec
        due = now - self.armed_at > self.limit_sec / 10 or limit_sec > self.limit_sec
        if self.stacks is not None and due:  # not in every step: it starts a thread
            self.armed_at = now
            faulthandler.dump_traceback_later(1.1 * limit_sec + GRACE_SEC, exit=True, file=self.stacks)

    def _watch(self) -> None:
        interval_sec = min(2.0, self.limit_sec / 10)
        looked_at = time.monotonic()
        while not self.over.wait(interval_sec):
            now = time.monotonic()
            if now - looked_at > interval_sec + 10:  # this process was stopped as a whole, and continues only now
                self._beat(self.limit_sec)
            elif now > self.deadline:
                self._end()
            elif now - self.said_at >= LINES_SEC and dist.get_global_rank() == 0:
                self.said_at = now
                limit = f'{self.deadline - self.begun:.0f} s end the run (faults.stall_sec)'
                print(f'{stopwatch.whereabouts()}: nothing has ended for {now - self.begun:.0f} s; {limit}', file=sys.stderr, flush=True)
            looked_at = now

    def _end(self) -> None:
        rank = dist.get_global_rank()
        what = f'rank {rank}: nothing has moved for {self.limit_sec:g} s (faults.stall_sec); exit code {STALLED}. Stacks of all threads:'
        for file in (self.stacks, sys.stderr):
            if file is not None:
                print(what, file=file, flush=True)
                faulthandler.dump_traceback(file, all_threads=True)
        stopwatch.end('stalled')
        end_now(STALLED)
