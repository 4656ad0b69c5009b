"""Account of the time of this process: lines of `events.jsonl`, which diffusion/monitoring/time_accounts.py adds up over all processes of a run.

A stopwatch is always in just one phase, so what it has counted is the time since the process began, whatever happens in between. Time is
the host's: it runs ahead of the GPU by a step or so, which what comes next waits for (an evaluation, a save).
"""

import os
import time
import uuid
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from diffusion.common.files import append_json_line, open_to_append
from diffusion.common.text import counted

EVENTS = 'events.jsonl'
WAITING = 'data wait'
TRAINING = ('compute', WAITING, 'other')  # phases of pure training; evaluation, sampling, saving and the start are left out


class Stopwatch:
    """Seconds by phase; begins in `start`. For the main thread alone.

    Each line holds the `event`, the `process`, the `time` (Unix, of the process's first moment plus a clock that nobody sets), the `batch`
    that was reached, the batch that was `saved` last, and since the process's line before: the `steps` taken and the `sec` by phase.

    Args:
        path: lines are appended here; None writes none (all ranks but the first).
        num_gpus: of all processes.
        age_sec: how long the process had run before.
    """

    def __init__(self, path: Path | None, num_gpus: int, age_sec: float = 0.0):
        self.path = path
        self.process = uuid.uuid4().hex[:8]
        self.file: BinaryIO | None = None
        self.sec: defaultdict[str, float] = defaultdict(float)  # since the last line
        self.total_sec: defaultdict[str, float] = defaultdict(float)  # since the process began
        self.now_in, self.since = 'start', time.monotonic() - age_sec
        self.began, self.clock_offset_sec = self.since, time.time() - time.monotonic()
        self.batch: int | None = None  # not known before a checkpoint is loaded
        self.saved: int | None = None
        self.steps = 0
        self.ended = False
        self.write('start', gpus=num_gpus)

    def switch(self, phase: str) -> None:
        now = time.monotonic()
        for sec in (self.sec, self.total_sec):
            sec[self.now_in] += now - self.since
        self.now_in, self.since = phase, now

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count time in the block as `name`, and write a line if it succeeded."""
        before = self.now_in
        self.switch(name)
        try:
            yield
        finally:
            self.switch(before)
        self.write(name)

    def step(self, batch: int) -> None:
        """Count a step; the run is now at `batch`."""
        self.batch, self.steps = batch, self.steps + 1

    def write(self, event: str, **facts: Any) -> None:
        self.switch(self.now_in)
        if self.path is None:
            return
        record = {'event': event, 'process': self.process, 'time': round(self.since + self.clock_offset_sec, 6), **facts}
        if self.batch is not None:
            record |= {'batch': self.batch, 'steps': self.steps}
            if self.saved is not None:
                record['saved'] = self.saved
        record['sec'] = {phase: round(sec, 6) for phase, sec in self.sec.items()}
        try:
            if self.file is None:
                self.file = open_to_append(self.path)
            append_json_line(self.file, record)
        except OSError:  # a full disk is for those to judge who save; the next line that can be written has this one's time
            self.file = None
            return
        self.sec.clear()
        self.steps = 0

    def end(self, reason: str) -> None:
        """Write the last line, unless there is one already."""
        if not self.ended:
            self.ended = True
            self.write('end', reason=reason)

    @property
    def elapsed_sec(self) -> float:
        """Seconds since the process began."""
        return time.monotonic() - self.began


_idle = Stopwatch(None, 0)
_running = _idle  # a process has one clock, which saving and drawing can use without being handed it


def start(path: Path | None, num_gpus: int) -> Stopwatch:
    """The stopwatch of this process from now on; the first counts from the process's own start, so that imports do not get lost."""
    global _running  # noqa: PLW0603
    _running = Stopwatch(path, num_gpus, process_age_sec() if _running is _idle else 0.0)
    return _running


def phase(name: str) -> AbstractContextManager[None]:
    """Count time in the block as phase `name` of the process's own stopwatch, if it has one."""
    return _running.phase(name)


def end(reason: str) -> None:
    """Record why the process is about to end."""
    _running.end(reason)


def saved(batch: int) -> None:
    """Record that a whole checkpoint of `batch` exists, or that the run begins there."""
    _running.saved = batch


def unsaved() -> str:
    """Describe the steps that no checkpoint holds."""
    steps, saved = (_running.batch or 0) - (_running.saved or 0), _running.saved
    return f'{counted(steps, "step")} since {f"the checkpoint of batch {saved:,}" if saved else "the start"}' if steps > 0 else 'nothing'


def whereabouts() -> str:
    """Describe the phase that the process is in, and after which batch."""
    return f'{_running.now_in} after batch {_running.batch or 0:,}'


def process_age_sec() -> float:
    """Seconds since Linux started this process; 0 elsewhere."""
    try:
        after_name = Path('/proc/self/stat').read_text().rpartition(')')[2].split()
    except OSError:
        return 0.0
    started = int(after_name[19]) / os.sysconf('SC_CLK_TCK')  # field 22 of proc(5), since boot
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started
