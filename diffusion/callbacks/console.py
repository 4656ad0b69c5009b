"""One line a person can read, where there is no terminal for a progress bar: batch systems, CI, `nohup`."""

from __future__ import annotations

import sys
from datetime import timedelta
from typing import Any

from composer.core import State
from composer.loggers import Logger, LoggerDestination
from composer.utils import dist

from diffusion.cost.formulas import SEC_PER_HOUR

# metric: how it is printed
PARTS = {
    'loss/train/total': 'loss {:.4f}',
    'lr-AdamW/group0': 'lr {:.2e}',
    'throughput/images_per_sec': '{:,.1f} images/s',
    'throughput/images_per_sec_per_gpu': '{:,.1f} per GPU',
    'throughput/mfu': 'MFU {:.1%}',
    'throughput/data_wait_share': 'waiting {:.1%}',
    'throughput/peak_memory_gb': '{:.1f} GB',
    'cost/dollars_so_far': '${:,.2f} spent',
    'cost/dollars_to_go': '${:,.2f} to go',
}


class ConsoleLine(LoggerDestination):
    """Prints every `every` batches on rank 0 what was logged last.

    Args:
        every: batches between lines.
    """

    def __init__(self, every: int):
        self.every = every
        self.latest: dict[str, Any] = {}

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        self.latest.update(metrics)

    def batch_checkpoint(self, state: State, logger: Logger) -> None:
        if dist.get_global_rank() == 0 and state.timestamp.batch.value % self.every == 0:
            print(self.line(state), file=sys.stderr, flush=True)

    def line(self, state: State) -> str:
        done = state.get_elapsed_duration()
        share = '' if done is None else f' ({done.value:.1%})'
        parts = [f'batch {state.timestamp.batch.value:,}{share}']
        parts += [pattern.format(float(self.latest[name])) for name, pattern in PARTS.items() if name in self.latest]
        if 'time/remaining_hours' in self.latest:
            parts.append(f'{timedelta(seconds=round(self.latest["time/remaining_hours"] * SEC_PER_HOUR))} left')
        return '  '.join(parts)
