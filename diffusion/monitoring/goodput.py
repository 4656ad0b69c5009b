"""Feed the stopwatch with what the run is doing, and print at the end where the time went."""

import sys

from composer.core import Callback, State, Time
from composer.loggers import Logger

from diffusion.common.stopwatch import Stopwatch
from diffusion.monitoring.time_accounts import account, propose, read_events, summary
from diffusion.recipe import AnyRecipe


class Goodput(Callback):
    """A line of events.jsonl every `log.every` batches; saves, sample grids and evaluations have lines of their own.

    Stands behind Throughput, which in the batches that both write in waits for the GPU.

    Args:
        recipe: the resolved recipe.
        watch: the stopwatch of the process.
    """

    def __init__(self, recipe: AnyRecipe, watch: Stopwatch):
        self.recipe, self.watch = recipe, watch
        self.total: Time | None = None  # unknown in a process that finds the run finished
        self.closed = False

    def fit_start(self, state: State, logger: Logger) -> None:
        self.total = state.max_duration  # what stops a run early shortens it
        self.watch.batch = state.timestamp.batch.value

    def before_dataloader(self, state: State, logger: Logger) -> None:
        if self.watch.now_in != 'start':  # the loader's first fill is part of it
            self.watch.switch('data wait')

    def after_dataloader(self, state: State, logger: Logger) -> None:
        if self.watch.now_in == 'start':
            self.watch.write('begin')
        self.watch.switch('compute')

    def batch_end(self, state: State, logger: Logger) -> None:
        batch = state.timestamp.batch.value
        self.watch.step(batch)
        self.watch.switch('other')
        if batch % self.recipe.log.every == 0:
            self.watch.write('steps')

    def eval_before_all(self, state: State, logger: Logger) -> None:
        self.watch.switch('evaluation')

    def eval_after_all(self, state: State, logger: Logger) -> None:
        self.watch.switch('other')
        self.watch.write('evaluation')

    def close(self, state: State, logger: Logger) -> None:
        if self.closed:  # Composer closes again when Python ends
            return
        self.closed = True
        self.watch.end(self._reason(state))
        if self.watch.path is not None and self.total is not None:
            accounts = account(read_events(self.watch.path))
            print(summary(accounts, propose(accounts, self.recipe.checkpoint.every, self.recipe.faults.gpu_hours_between_failures)), file=sys.stderr)

    def _reason(self, state: State) -> str:
        error = sys.exc_info()[0] or getattr(sys, 'last_type', None)
        if error is not None:
            return error.__name__
        return 'finished' if self.total is None or state.timestamp.get(self.total.unit) >= self.total else 'stopped'
