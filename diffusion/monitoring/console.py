"""Console output of a run: one line that updates on a terminal; elsewhere (batch systems, CI) a line every `log.every` batches or minute."""

import io
import logging
import os
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple, TextIO

from composer.core import State
from composer.loggers import Logger, LoggerDestination
from composer.utils import dist
from tqdm import tqdm

from diffusion.common.text import counted
from diffusion.cost.formulas import SEC_PER_HOUR
from diffusion.monitoring.metrics import LEARNING_RATE, plain_name

EVAL_LOSS = 'metrics/eval/loss'
LEAST_BAR = 6  # columns of the bar itself, which takes what is left
LINES_SEC = 60  # at most, between two lines where there is no terminal and a batch takes less
BETWEEN = '  '


class LinePart(NamedTuple):
    """Format of a metric, and its rank: where the line is too long, parts of the highest `rank` are left out first."""

    pattern: str
    rank: int


# In the order of the line.
PARTS = {
    'loss/train/total': LinePart('loss {:.4f}', 1),
    EVAL_LOSS: LinePart('eval loss {:.4f}', 7),
    LEARNING_RATE: LinePart('lr {:.2e}', 6),
    'throughput/images_per_sec': LinePart('{:,.1f} images/s', 3),
    'throughput/images_per_sec_per_gpu': LinePart('{:,.1f} per GPU', 10),
    'throughput/mfu': LinePart('MFU {:.1%}', 5),
    'throughput/data_wait_share': LinePart('waiting {:.1%}', 8),
    'throughput/peak_memory_gb': LinePart('{:.1f} GB', 11),
    'cost/dollars_so_far': LinePart('${:,.2f} spent', 9),
    'cost/dollars_to_go': LinePart('${:,.2f} to go', 4),
    'time/remaining_hours': LinePart('{} left', 2),
}
SAMPLES_RANK = 12
PER_GPU = 'throughput/images_per_sec_per_gpu'
DOLLARS = ('cost/dollars_so_far', 'cost/dollars_to_go')
LEAST_DOLLARS = 0.01


class ConsoleLine(LoggerDestination):
    """On rank 0: where the run is, and what was logged last; evaluation losses on a line of their own, which stays.

    Metrics are read every `every` batches alone, because reading one may wait for the GPU.

    Args:
        every: batches between lines, or between new numbers on a terminal. Slow batches have a line each LINES_SEC, with the numbers of the last
            record.
        file: where to; `sys.stderr` if it is None. A terminal gets a line that updates.
    """

    def __init__(self, every: int, file: TextIO | None = None):
        self.every = every
        self.latest: dict[str, Any] = {}
        self.file = sys.stderr if file is None else file
        self.bar: ProgressLine | None = None
        self.printed_at = time.monotonic()

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        self.latest.update({plain_name(name): value for name, value in metrics.items()})

    def fit_start(self, state: State, logger: Logger) -> None:
        if dist.get_global_rank() == 0 and self.file.isatty():
            total = None if state.max_duration is None else state.max_duration.value
            self.bar = ProgressLine(total, state.timestamp.batch.value, self.file)

    def batch_checkpoint(self, state: State, logger: Logger) -> None:
        if dist.get_global_rank() != 0:
            return
        due = state.timestamp.batch.value % self.every == 0
        if self.bar is not None:
            if due:
                self.bar.parts = self._parts(state)
            self.bar.update(state.timestamp.batch.value - self.bar.n)
        elif due or time.monotonic() - self.printed_at >= LINES_SEC:
            self.printed_at = time.monotonic()
            print(self.line(state), file=self.file, flush=True)

    def eval_start(self, state: State, logger: Logger) -> None:
        if self.bar is not None:
            self.bar.n = state.timestamp.batch.value  # a batch is evaluated before it is checkpointed
            self.bar.show(f'evaluating {_of(0, state.dataloader_len)}')

    def eval_batch_end(self, state: State, logger: Logger) -> None:
        if self.bar is not None:
            self.bar.show(f'evaluating {_of(state.eval_timestamp.batch.value, state.dataloader_len)}')

    def eval_end(self, state: State, logger: Logger) -> None:
        if dist.get_global_rank() != 0:
            return
        if EVAL_LOSS in self.latest:
            print(f'evaluation after batch {state.timestamp.batch.value:,}: loss {float(self.latest[EVAL_LOSS]):.4f}', file=sys.stderr, flush=True)
        if self.bar is not None:
            self.bar.show('')

    def fit_end(self, state: State, logger: Logger) -> None:
        self._end()

    def close(self, state: State, logger: Logger) -> None:
        self._end()

    def _end(self) -> None:
        if self.bar is not None:
            self.bar.close()
            self.bar = None

    def line(self, state: State) -> str:
        done = state.get_elapsed_duration()
        share = '' if done is None else f' ({done.value:.1%})'
        return BETWEEN.join([f'batch {state.timestamp.batch.value:,}{share}', *(text for _, text in self._parts(state))])

    def _parts(self, state: State) -> list[tuple[int, str]]:
        """(rank, text) in the order of the line."""
        parts = []
        for name, part in PARTS.items():
            if name in self.latest:
                value = float(self.latest[name])
                if (name == PER_GPU and dist.get_world_size() == 1) or (name in DOLLARS and value < LEAST_DOLLARS):
                    continue
                shown = timedelta(seconds=round(value * SEC_PER_HOUR)) if name == 'time/remaining_hours' else value
                parts.append((part.rank, part.pattern.format(shown)))
        return [*parts, (SAMPLES_RANK, counted(state.timestamp.sample.value, 'sample'))]


class ProgressLine(tqdm):
    """A bar with parts behind it that fits the terminal: what does not fit is left out, the least important first.

    While it is there, what is printed to stdout, stderr and the handlers of `logging` appears above it, in whole lines.
    """

    monitor_interval = 0  # no thread that redraws: loader processes are forked from this one

    def __init__(self, total: int | None, initial: int, file: TextIO):
        self.parts: Sequence[tuple[int, str]] = ()
        self.phase = ''
        self.closed = False
        self.redirected: list[tuple[Any, str, Any]] = []
        super().__init__(total=total, initial=initial, file=file, unit='batch', dynamic_ncols=True, mininterval=0.2, miniters=1)
        self._redirect()

    def show(self, phase: str) -> None:
        """Name what the run is doing between two steps; an empty text is training."""
        self.phase = phase
        self.refresh()

    def __str__(self) -> str:
        try:
            columns = os.get_terminal_size(self.fp.fileno()).columns
        except OSError:
            columns = 0
        parts = [(0, self.phase), *self.parts] if self.phase else self.parts
        return progress_text(self.n, self.total, parts, columns or 80, '#' if self.ascii else '█')

    def print_above(self, text: str, stream: io.TextIOBase) -> None:
        """Print whole lines where the bar is, and the bar again below them."""
        with self.get_lock():
            self.clear(nolock=True)
            stream.write(text)
            stream.flush()
            self.refresh(nolock=True)

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        for owner, name, before in self.redirected:
            after = getattr(owner, name)
            if isinstance(after, LinesAbove):
                after.finish()
            setattr(owner, name, before)
        super().close()

    def _redirect(self) -> None:
        loggers = [logging.root, *logging.root.manager.loggerDict.values()]
        # A handler that has no stream of its own, as logging's last resort, asks `sys` each time.
        handlers = [(handler, 'stream') for logger in loggers for handler in getattr(logger, 'handlers', ()) if 'stream' in vars(handler)]
        for owner, name in [(sys, 'stdout'), (sys, 'stderr'), *handlers]:
            stream = getattr(owner, name, None)
            if isinstance(stream, io.TextIOBase) and not stream.closed and stream.isatty():
                self.redirected.append((owner, name, stream))
                setattr(owner, name, LinesAbove(stream, self))


class LinesAbove(io.TextIOBase):
    """A terminal with a bar at its end: prints whole lines above it."""

    def __init__(self, stream: io.TextIOBase, bar: ProgressLine):
        self.stream, self.bar, self.begun = stream, bar, ''

    def write(self, text: str) -> int:
        *lines, self.begun = (self.begun + text).split('\n')
        if lines:
            self.bar.print_above('\n'.join([*lines, '']), self.stream)
        return len(text)

    def finish(self) -> None:
        """Print the line that is begun, at the end."""
        if self.begun:
            self.bar.print_above(f'{self.begun}\n', self.stream)
            self.begun = ''

    def flush(self) -> None:
        self.stream.flush()

    def fileno(self) -> int:
        return self.stream.fileno()

    def isatty(self) -> bool:
        return self.stream.isatty()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self.stream.encoding


def progress_text(batch: int, total: int | None, parts: Sequence[tuple[int, str]], columns: int, block: str = '█') -> str:
    """` 12%|##--| 120/1,000  loss 0.1234 ...` of at most `columns` characters.

    Args:
        parts: (rank, text) in the order of the line; those of the highest rank are left out first where it is too long.
    """
    count = _of(batch, total)
    share = '' if not total else f'{batch / total:4.0%}'
    room = columns - 2 - len(share) - len(count)  # a full last column would begin another line
    kept = set[int]()
    for index in sorted(range(len(parts)), key=lambda index: parts[index][0]):
        length = len(BETWEEN) + len(parts[index][1])
        if length > room:
            break
        kept.add(index)
        room -= length
    text = BETWEEN.join([count, *(text for index, (_, text) in enumerate(parts) if index in kept)])
    width = room - 2  # without its borders
    if total and width >= LEAST_BAR:
        filled = min(width, width * batch // total)
        return f'{share}|{block * filled}{" " * (width - filled)}| {text}'
    return f'{share} {text}'[: columns - 1]


def _of(done: int, total: Any) -> str:
    return f'{done:,}/{int(total):,}' if total is not None else f'{done:,}'
