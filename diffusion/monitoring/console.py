"""Console output of a run: one line that updates on a terminal; elsewhere (batch systems, CI) a line every `log.every` batches or minute."""

import logging
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from datetime import timedelta
from typing import Any, TextIO

from composer.core import State
from composer.loggers import Logger, LoggerDestination
from composer.utils import dist
from tqdm import tqdm
from tqdm.contrib import DummyTqdmFile

from diffusion.common.text import counted
from diffusion.cost.formulas import SEC_PER_HOUR
from diffusion.recipe.techniques import LEARNING_RATE, plain_name

EVAL_LOSS = 'metrics/eval/loss'
LINES_SEC = 60  # at most, between two lines where there is no terminal and a batch takes less
BETWEEN = '  '
BAR = '{percentage:3.0f}%|{bar}| {n:,}/{total:,}{desc}'
BAR_COLUMNS = 14  # of the percentage and the shortest bar, which takes what is left
PER_GPU = 'throughput/images_per_sec_per_gpu'
REMAINING = 'time/remaining_hours'
DOLLARS = ('cost/dollars_so_far', 'cost/dollars_to_go')
LEAST_DOLLARS = 0.01
# The most important first: a terminal shows as many as fit.
PARTS = {
    'loss/train/total': 'loss {:.4f}',
    REMAINING: '{} left',
    'throughput/images_per_sec': '{:,.1f} images/s',
    'cost/dollars_to_go': '${:,.2f} to go',
    'throughput/mfu': 'MFU {:.1%}',
    LEARNING_RATE: 'lr {:.2e}',
    EVAL_LOSS: 'eval loss {:.4f}',
    'throughput/data_wait_share': 'waiting {:.1%}',
    'cost/dollars_so_far': '${:,.2f} spent',
    PER_GPU: '{:,.1f} per GPU',
    'throughput/peak_memory_gb': '{:.1f} GB',
}
tqdm.monitor_interval = 0  # no thread that redraws: loader processes are forked from this one


class ConsoleLine(LoggerDestination):
    """On rank 0: where the run is, and what was logged last; evaluation losses on a line of their own, which stays.

    Metrics are read every `every` batches alone, because reading one may wait for the GPU. While the line of a terminal is there, what is printed to
    stdout, stderr and the handlers of `logging` appears above it, in whole lines.

    Args:
        every: batches between lines, or between new numbers on a terminal. Slow batches have a line each LINES_SEC, with the numbers of the last
            record.
        file: where to; `sys.stderr` if it is None. A terminal gets a line that updates.
    """

    def __init__(self, every: int, file: TextIO | None = None):
        self.every = every
        self.latest: dict[str, Any] = {}
        self.file = sys.stderr if file is None else file
        self.bar: tqdm[Any] | None = None
        self.parts: list[str] = []
        self.redirected = ExitStack()
        self.printed_at = time.monotonic()

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        self.latest.update({plain_name(name): value for name, value in metrics.items()})

    def fit_start(self, state: State, logger: Logger) -> None:
        if dist.get_global_rank() == 0 and self.file.isatty():
            assert state.max_duration is not None
            total, batch = state.max_duration.value, state.timestamp.batch.value
            self.bar = tqdm(total=total, initial=batch, file=self.file, bar_format=BAR, dynamic_ncols=True, mininterval=0.2, miniters=1)
            self._redirect()

    def batch_checkpoint(self, state: State, logger: Logger) -> None:
        if dist.get_global_rank() != 0:
            return
        batch = state.timestamp.batch.value
        due = batch % self.every == 0
        if self.bar is not None:
            if due:
                self.parts = list(self._parts(state))
                self._describe(self.bar)
            self.bar.update(batch - self.bar.n)
        elif due or time.monotonic() - self.printed_at >= LINES_SEC:
            self.printed_at = time.monotonic()
            done = state.get_elapsed_duration()
            share = '' if done is None else f' ({done.value:.1%})'
            print(BETWEEN.join([f'batch {batch:,}{share}', *self._parts(state)]), file=self.file, flush=True)

    def eval_start(self, state: State, logger: Logger) -> None:
        if self.bar is not None:
            self.bar.n = state.timestamp.batch.value  # a batch is evaluated before it is checkpointed
            self._describe(self.bar, _evaluating(0, state))

    def eval_batch_end(self, state: State, logger: Logger) -> None:
        if self.bar is not None:
            self._describe(self.bar, _evaluating(state.eval_timestamp.batch.value, state))

    def eval_end(self, state: State, logger: Logger) -> None:
        if dist.get_global_rank() != 0:
            return
        if EVAL_LOSS in self.latest:
            print(f'evaluation after batch {state.timestamp.batch.value:,}: loss {float(self.latest[EVAL_LOSS]):.4f}', file=sys.stderr, flush=True)
        if self.bar is not None:
            self._describe(self.bar, '')

    def fit_end(self, state: State, logger: Logger) -> None:
        self._end()

    def close(self, state: State, logger: Logger) -> None:
        self._end()

    def _end(self) -> None:
        self.redirected.close()
        if self.bar is not None:
            self.bar.close()
            self.bar = None

    def _parts(self, state: State) -> Iterator[str]:
        for name, pattern in PARTS.items():
            value = float(self.latest[name]) if name in self.latest else None
            if value is None or (name == PER_GPU and dist.get_world_size() == 1) or (name in DOLLARS and value < LEAST_DOLLARS):
                continue
            yield pattern.format(timedelta(seconds=round(value * SEC_PER_HOUR)) if name == REMAINING else value)
        yield counted(state.timestamp.sample.value, 'sample')

    def _describe(self, bar: 'tqdm[Any]', phase: str | None = None) -> None:
        """Put behind the bar what fits.

        Args:
            phase: what the run is doing between two steps, shown at once; '' is training. None: nothing has to be shown before the next step.
        """
        columns = (bar.format_dict['ncols'] or 80) - BAR_COLUMNS - len(f'{bar.total:,}/{bar.total:,}')
        bar.set_description_str(fitting([phase, *self.parts] if phase else self.parts, columns), refresh=phase is not None)

    def _redirect(self) -> None:
        loggers = [logging.root, *logging.root.manager.loggerDict.values()]
        # A handler that has no stream of its own, as logging's last resort, asks `sys` each time.
        handlers = [handler for logger in loggers for handler in getattr(logger, 'handlers', ()) if _is_terminal(vars(handler).get('stream'))]
        for handler in handlers:
            self.redirected.callback(handler.setStream, handler.setStream(DummyTqdmFile(self.file)))
        for stream, redirect in ((sys.stdout, redirect_stdout), (sys.stderr, redirect_stderr)):
            if _is_terminal(stream):
                self.redirected.enter_context(redirect(DummyTqdmFile(self.file)))


def fitting(parts: Sequence[str], columns: int) -> str:
    """Join the parts that fit, each after a space; the last are left out first."""
    text = ''
    for part in parts:
        if len(text) + len(BETWEEN) + len(part) > columns:
            break
        text += BETWEEN + part
    return text


def _evaluating(batch: int, state: State) -> str:
    length = state.dataloader_len
    return f'evaluating {batch:,}' + ('' if length is None else f'/{int(length):,}')


def _is_terminal(stream: Any) -> bool:
    return stream is not None and not stream.closed and stream.isatty()
