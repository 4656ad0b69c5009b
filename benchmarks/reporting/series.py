"""The data of figures: throughput over the number of GPUs, everything else being equal, and over configurations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from diffusion.cost.formulas import HOURS_PER_DAY, hours
from diffusion.cost.scaling import ScalingFit, ScalingLaws, ScalingPoint, fit


@dataclass(frozen=True)
class TrainingWork:
    """A number of samples to train."""

    name: str  # of the amount, in words
    num_samples: int

    def days(self, images_per_sec: float) -> float:
        return hours(self.num_samples, images_per_sec) / HOURS_PER_DAY

    def gpu_hours(self, point: ScalingPoint) -> float:
        return hours(self.num_samples, point.images_per_sec) * point.num_gpus


MILLION = TrainingWork('a million samples', 1_000_000)

# Origin of images per second on a number of GPUs: a row, the law, or the law through all points where that is the lower one.
MEASURED, PREDICTED, WITH_OUTLIER = 'measured', 'predicted', 'with outlier'
LOWER_LAW = f'Where a series has an outlier the lower of its two predictions is taken: "{WITH_OUTLIER}" where that is the law through all points.'


@dataclass(frozen=True, kw_only=True)
class ScalingSeries(ScalingLaws):
    """Points that differ in the number of GPUs, by rising number of GPUs."""

    name: str
    work: TrainingWork
    claimed: tuple[ScalingPoint, ...] = ()  # predictions that the source printed
    unit: str = 'GPUs'  # or processes, on a CPU

    def up_to(self, num_gpus: int) -> ScalingFit:
        """Fit the points of at most `num_gpus` GPUs."""
        return fit([point for point in self.points if point.num_gpus <= num_gpus], self.gpus_per_node)

    @property
    def most_gpus(self) -> int:
        return max(point.num_gpus for point in self.points)

    def global_size(self, num_gpus: int) -> int:
        """Global batch of a run on `num_gpus` GPUs: constant if it was, or in proportion if the batch per GPU was constant."""
        sizes = {point.global_size for point in self.points}
        largest = max(self.points, key=lambda point: point.num_gpus)
        return largest.global_size if len(sizes) == 1 else largest.global_size * num_gpus // largest.num_gpus

    def rate(self, num_gpus: int) -> float:
        """Images per second of such a run: as measured, or else the lower prediction."""
        return self.images_per_sec(num_gpus, self.global_size(num_gpus))

    def origin(self, num_gpus: int) -> str:
        """Which of MEASURED, PREDICTED and WITH_OUTLIER the rate is."""
        global_size = self.global_size(num_gpus)
        if self.measured_at(num_gpus, global_size) is not None:
            return MEASURED
        return WITH_OUTLIER if self.outliers and not self.slowest_first(num_gpus, global_size)[0].left_out else PREDICTED


class Bar(NamedTuple):
    """One configuration of an ablation."""

    name: str
    images_per_sec: float
    derived: bool = False  # the source does not print it
