"""What a run's log says, over FLOP and over time. No torch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Literal

import numpy as np
import yaml

from benchmarks.ablations.study import ended
from diffusion.contracts.errors import RunError
from diffusion.monitoring.report.run import read_log

Axis = Literal['flop', 'sec']
RATE, FLOP = 'throughput/images_per_sec', 'cost/flop'


@dataclass(frozen=True)
class RunCurve:
    """The evaluations of a run that reached its end.

    Attributes:
        batch: the last one.
        flop: of the network in all of its batches, forward and backward.
        sec: of training in all of its batches, at the time of a batch that was measured apart; NaN if it was not.
        points: (batch, value) of each evaluation by key of the log, in order.
    """

    batch: int
    flop: float
    sec: float
    points: dict[str, list[tuple[int, float]]]

    def total(self, axis: Axis) -> float:
        return self.flop if axis == 'flop' else self.sec

    def series(self, key: str, axis: Axis) -> tuple[list[float], list[float]]:
        """(x, value) of all evaluations. A batch costs the same throughout a run."""
        points = self.points.get(key, [])
        return [self.total(axis) * batch / self.batch for batch, _ in points], [value for _, value in points]

    def at(self, key: str, axis: Axis, x: float) -> float | None:
        """The value at `x`, linear between evaluations; None outside of them."""
        xs, values = self.series(key, axis)
        if not xs or x < xs[0] or x > xs[-1] * (1 + 1e-9):
            return None
        return float(np.interp(x, xs, values))


def read_curve(folder: Path, keys: Sequence[str], batch_sec: float = math.nan) -> RunCurve | None:
    """Read a run folder; None if the run has not reached its end.

    Args:
        batch_sec: time of a batch of its recipe.

    Raises:
        RunError: its log does not say how many FLOP it took.
    """
    if not ended(folder):
        return None
    log = read_log(folder / 'log.jsonl')
    flops = [(record['batch'], record[FLOP]) for record in log if FLOP in record]
    if not flops:
        raise RunError(f'{folder}/log.jsonl: no {FLOP}; log.every must be well below train.duration')
    last = int(log[-1]['batch'])
    counted_to, flop = flops[-1]
    points = {key: [(int(record['batch']), record[key]) for record in log if key in record] for key in keys}
    return RunCurve(last, flop * last / counted_to, last * batch_sec, points)


def read_batch_sec(folder: Path) -> float | None:
    """Return the median time of a batch of a run, in seconds; None if the run has not reached its end.

    Raises:
        RunError: its log has no rates.
    """
    if not ended(folder):
        return None
    rates = [record[RATE] for record in read_log(folder / 'log.jsonl') if RATE in record]
    if not rates:
        raise RunError(f'{folder}/log.jsonl: no {RATE}; log.every must be well below train.duration')
    return yaml.safe_load((folder / 'recipe.yaml').read_text())['batch']['global_size'] * median(1 / rate for rate in rates)
