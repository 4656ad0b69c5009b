"""Judging rows: failures, values beyond their limits, and those that disagree with their prediction. No torch."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.checking.cases import PARTS, Values
from benchmarks.checking.rows import number
from diffusion.cost.hardware import gpu_name
from diffusion.recipe import RecipeError
from diffusion.recipe.keys import key
from diffusion.recipe.merging import merge
from diffusion.recipe.reading import file_layers

PREDICTIONS = Path(__file__).with_name('predictions.yaml')
FAILED = ('failed', 'crashed', 'timed out')
CPU = 'cpu'  # its name among devices


@dataclass
class PredictedValue:
    """A value of a row. Without `high` it is a lower bound, without `low` an upper one; `target` is shown, not judged."""

    part: str = ''
    row: str = ''
    key: str = ''
    source: str = ''
    low: float | None = None
    high: float | None = None
    target: float | None = None

    @property
    def errors(self) -> list[str]:
        """Return what is wrong with the prediction itself."""
        where, known = f'{self.part}, {self.row}: {self.key}', [part.name for part in PARTS]
        missing = [name for name in ('part', 'row', 'key', 'source') if not getattr(self, name)]
        if missing:
            return [f'{where}: {", ".join(missing)} missing; every prediction has part, row, key and source']
        if self.part not in known:
            return [f'{where}: there is no part {self.part}; there are {", ".join(known)}']
        if self.low is not None and self.high is not None and self.low > self.high:
            return [f'{where}: low is {number(self.low)}, above high, {number(self.high)}']
        return []


@dataclass
class Work:
    """One class of kernels in one step."""

    tflop: float = 0.0
    gb: float = 0.0


@dataclass
class Roofline:
    """FLOP and bytes of one step of the headline, by class of kernels."""

    source: str
    resolution: int
    micro_batch: int
    classes: dict[str, Work]


@dataclass
class Predictions:
    roofline: Roofline
    tolerance: float = key(0.15, 'Share by which a measured value may be outside its prediction.', low=0)
    devices: dict[str, list[PredictedValue]] = field(default_factory=dict)

    def of(self, device_name: str | None) -> list[PredictedValue]:
        """Those of a device as CUDA names it; None is a CPU. An unknown device has none."""
        name = CPU if device_name is None else gpu_name(device_name, self.devices)
        return self.devices.get(name or '', [])


def load_predictions(path: Path = PREDICTIONS) -> Predictions:
    """
    Raises:
        RecipeError: every mistake of the file.
    """
    errors: list[str] = []
    layers = file_layers(path, errors)
    if not errors:
        loaded: Predictions = merge(Predictions, layers, errors)
    if not errors:
        errors += [error for predictions in loaded.devices.values() for prediction in predictions for error in prediction.errors]
    if errors:
        raise RecipeError(str(path), errors)
    return loaded


@dataclass
class Comparison(PredictedValue):
    """A measured value next to what was predicted of it."""

    value: float = math.nan
    tolerance: float = 0.0

    @property
    def off(self) -> float:
        """Distance to the predicted range, as a share of the nearer end; 0 inside, negative below, NaN where there is no value."""
        if math.isnan(self.value):
            return self.value
        if self.low is not None and self.value < self.low:
            return self.value / self.low - 1
        if self.high is not None and self.value > self.high:
            return self.value / self.high - 1 if self.high else float('inf')
        return 0.0

    @property
    def disagrees(self) -> bool:
        return not abs(self.off) <= self.tolerance  # NaN disagrees

    @property
    def predicted(self) -> str:
        if self.low is None or self.high is None:
            return f'at least {number(self.low)}' if self.low is not None else f'at most {number(self.high or 0)}'
        return number(self.low) if self.low == self.high else f'{number(self.low)} to {number(self.high)}'

    def __str__(self) -> str:
        if math.isnan(self.value):
            return f'{self.part}, {self.row}: has no number {self.key}, predicted {self.predicted} ({self.source})'
        return f'{self.part}, {self.row}: {self.key} is {number(self.value)}, predicted {self.predicted} ({self.off:+.0%}; {self.source})'


def comparisons(rows: Iterable[Values], predictions: Predictions) -> list[Comparison]:
    """Of every measured value with a prediction: of predictions.yaml for full-size rows of a GPU (or a file that names `cpu`), or the row's own."""
    found = []
    for row in rows:
        if row['status'] != 'measured':
            continue
        known = [] if row['tiny'] and row['gpu'] is not None else predictions.of(row['gpu'])
        own = [PredictedValue(row['part'], row['row'], key, 'counted', low, high) for key, (low, high) in row.get('predicted', {}).items()]
        for prediction in [*own, *known]:
            if (prediction.part, prediction.row) == (row['part'], row['row']) and (prediction.low, prediction.high) != (None, None):
                value = row.get(prediction.key)
                value = value if isinstance(value, int | float) else math.nan
                found.append(Comparison(**vars(prediction), value=value, tolerance=predictions.tolerance))
    return found


def problems(rows: Mapping[tuple[str, str], Values], predictions: Predictions) -> list[str]:
    """A line for everything that failed, is wrong, or disagrees with its prediction; empty if all is well."""
    lines = []
    for (part, name), row in rows.items():
        where = f'{part}, {name}' if name else part
        if row['status'] in FAILED:
            lines.append(f'{where}: {row["status"]}: {row["reason"]} (once that is put right: --again {part})')
        for what, (value, limit) in row.get('checks', {}).items():
            if not value <= limit:  # NaN is wrong
                lines.append(f'{where}: {what} is {number(value)}, the limit is {number(limit)}')
    finished = [row for (_, name), row in rows.items() if not name and not row['tiny']]
    for row in finished:
        for prediction in predictions.of(row['gpu']):
            if prediction.part == row['part'] and (prediction.part, prediction.row) not in rows:
                lines.append(f'{prediction.part}, {prediction.row}: predicted, and there is no such row')
    return lines + [str(comparison) for comparison in comparisons(rows.values(), predictions) if comparison.disagrees]
