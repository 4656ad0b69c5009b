"""What points say of any number of GPUs: the measurement where there is one, and else the lower of two scaling laws, with outliers and without.

An outlier is either a bad measurement or the first sign of a limit, and points alone do not tell which: a plan that takes the lower of both laws is
not late whichever it was.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from diffusion.cost.scaling import Point, ScalingFit, fit, outliers


class Laws:
    """Of a series of points, which the class that inherits this has, with the number of GPUs of its nodes."""

    if TYPE_CHECKING:

        @property
        def points(self) -> tuple[Point, ...]: ...

        @property
        def gpus_per_node(self) -> int: ...

    @cached_property
    def outliers(self) -> tuple[Point, ...]:
        return outliers(self.points, self.gpus_per_node)

    @cached_property
    def fit(self) -> ScalingFit:
        """Of all points, outliers included."""
        return fit(self.points, self.gpus_per_node)

    @cached_property
    def fit_without_outliers(self) -> ScalingFit:
        return fit(self.points, self.gpus_per_node, self.outliers)

    def law_of(self, num_gpus: int, global_size: int) -> ScalingFit:
        """The one that counts here: that which predicts less."""
        return self.slowest_first(num_gpus, global_size)[0]

    def measured(self, num_gpus: int, global_size: int) -> Point | None:
        """The point of just these, if there is one."""
        return next((point for point in self.points if (point.num_gpus, point.global_size) == (num_gpus, global_size)), None)

    def slowest_first(self, num_gpus: int, global_size: int) -> list[ScalingFit]:
        """The law without outliers, and if there are any that with them too; first the one that predicts less here."""
        laws = [self.fit_without_outliers, *([self.fit] if self.outliers else [])]
        return sorted(laws, key=lambda law: -law.step_sec(num_gpus, global_size))

    def images_per_sec(self, num_gpus: int, global_size: int) -> float:
        """Of all GPUs together: as measured, or else the lower prediction."""
        point = self.measured(num_gpus, global_size)
        return global_size / self.law_of(num_gpus, global_size).step_sec(num_gpus, global_size) if point is None else point.images_per_sec
