"""What figures have curves and bars of: throughput over the number of GPUs, everything else being equal, and over configurations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from diffusion.cost.formulas import days, dollars, gpu_hours, hours
from diffusion.cost.laws import Laws
from diffusion.cost.scaling import Point, ScalingFit, fit


@dataclass(frozen=True)
class Work:
    """What is to be trained: so many samples."""

    name: str  # of the amount, in words
    num_samples: int

    def days(self, images_per_sec: float) -> float:
        return days(hours(self.num_samples, images_per_sec))

    def gpu_hours(self, images_per_sec: float, num_gpus: int) -> float:
        return gpu_hours(hours(self.num_samples, images_per_sec), num_gpus)

    def dollars(self, images_per_sec: float, num_gpus: int, price: float) -> float:
        return dollars(self.gpu_hours(images_per_sec, num_gpus), price)


MILLION = Work('a million samples', 1_000_000)


# Where images per second on so many GPUs are from: a row, the law, or the law through all points where that is the lower one.
MEASURED, PREDICTED, WITH_OUTLIER = 'measured', 'predicted', 'with outlier'
LOWER_LAW = f'Where a series has an outlier the lower of its two predictions is taken: "{WITH_OUTLIER}" where that is the law through all points.'


@dataclass(frozen=True)
class Series(Laws):
    """Points that differ in the number of GPUs, by rising number of GPUs."""

    name: str
    points: tuple[Point, ...]
    work: Work
    gpus_per_node: int = 8
    claimed: tuple[Point, ...] = ()  # predictions that the source printed
    unit: str = 'GPUs'  # or processes, on a CPU

    def up_to(self, num_gpus: int) -> ScalingFit:
        """The fit that was possible when no more GPUs had been tried."""
        return fit([point for point in self.points if point.num_gpus <= num_gpus], self.gpus_per_node)

    @property
    def most_gpus(self) -> int:
        return max(point.num_gpus for point in self.points)

    def global_size(self, num_gpus: int) -> int:
        """Of a run on so many GPUs: constant if it was, or in proportion if the batch per GPU was constant."""
        sizes = {point.global_size for point in self.points}
        largest = max(self.points, key=lambda point: point.num_gpus)
        return largest.global_size if len(sizes) == 1 else largest.global_size * num_gpus // largest.num_gpus

    def rate(self, num_gpus: int) -> float:
        """Images per second of such a run: as measured, or else the lower prediction."""
        return self.images_per_sec(num_gpus, self.global_size(num_gpus))

    def origin(self, num_gpus: int) -> str:
        """Which of MEASURED, PREDICTED and WITH_OUTLIER the rate is."""
        global_size = self.global_size(num_gpus)
        if self.measured(num_gpus, global_size) is not None:
            return MEASURED
        return WITH_OUTLIER if self.outliers and not self.law_of(num_gpus, global_size).left_out else PREDICTED


class Bar(NamedTuple):
    """One configuration of an ablation."""

    name: str
    images_per_sec: float
    derived: bool = False  # the source does not print it
