"""Reference convergence points: how many samples the reference needs at each batch, and how few a submission may need.

Rule: training_rules.adoc, "Reference Convergence Points" (mlcommons/training_policies 87a1364, 2026-05-14). A submission may not converge
significantly sooner than the reference: the least acceptable mean follows from a one-sided two-sample Student's t-test of unequal sizes and equal
variances at p = 0.05. Highest and lowest run are dropped from both means.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

RUNS = 10  # of a result; "Deprecated benchmarks results"
ALPHA = 0.05

Convergence = Mapping[int, Mapping[int, int]]
"""By batch: how many reference runs converged after each number of samples."""

REFERENCE: Convergence = {
    256: {1_536_000: 13, 2_048_000: 7},
    384: {1_536_768: 2, 2_049_024: 16, 2_561_280: 2},
    512: {1_536_000: 2, 2_048_000: 14, 2_560_000: 4},
    1024: {2_560_000: 6, 3_072_000: 7},
    2048: {3_584_000: 4, 4_096_000: 7, 4_608_000: 2},
}
"""rcps_stable_diffusion.json of round v5.0, the last one (mlcommons/logging 7bbf792, mlperf_logging/rcp_checker/training_5.0.0)."""


@dataclass(frozen=True)
class ReferencePoint:
    """Samples to convergence of the reference at one batch.

    Attributes:
        batch: global.
        mean, deviation: in samples, without highest and lowest run; the population's deviation, as in the rules' examples.
        count: runs that they stand for in the test.
        runs: of a result that is compared with it.
    """

    batch: int
    mean: float
    deviation: float
    count: int
    runs: int = RUNS

    @property
    def least(self) -> float:
        """The fewest samples that a result may need on average, highest and lowest run dropped."""
        from scipy import stats  # takes a second, and nothing else here needs it

        compared = self.runs - 2
        t = stats.t.ppf(1 - ALPHA, self.count + compared - 2)
        return self.mean - float(t) * self.deviation * math.sqrt(1 / self.count + 1 / compared)


def without_extremes(values: Sequence[float]) -> list[float]:
    """Drop one highest and one lowest value."""
    return sorted(values)[1:-1]


def point_of(batch: int, converged: Mapping[int, int], runs: int = RUNS) -> ReferencePoint:
    """The point of reference runs, `converged` of which needed each number of samples."""
    kept = without_extremes([samples for samples, count in converged.items() for _ in range(count)])
    return ReferencePoint(batch, statistics.fmean(kept), statistics.pstdev(kept), len(kept), runs)


def between(low: ReferencePoint, high: ReferencePoint, batch: int) -> ReferencePoint:
    """Interpolate mean and deviation linearly in the batch; it stands for 2 N runs, as in the rules' example S3."""
    share = (batch - low.batch) / (high.batch - low.batch)
    mean, deviation = ((1 - share) * one + share * other for one, other in ((low.mean, high.mean), (low.deviation, high.deviation)))
    return ReferencePoint(batch, mean, deviation, 2 * low.runs, low.runs)


def pruned(points: Sequence[ReferencePoint]) -> list[ReferencePoint]:
    """The points of fastest convergence: none below the batch of the fastest one, none above the line between two others."""
    ordered = sorted(points, key=lambda point: point.batch)
    fastest = min(ordered, key=lambda point: point.mean)
    kept = list[ReferencePoint]()
    for point in (point for point in ordered if point.batch >= fastest.batch):
        while len(kept) > 1 and kept[-1].mean > between(kept[-2], point, kept[-1].batch).mean:
            kept.pop()
        kept.append(point)
    return kept


def reference_for(batch: int, reference: Convergence = REFERENCE, runs: int = RUNS) -> ReferencePoint | None:
    """What a result at this batch is compared with; None above the largest batch of the reference.

    Below the smallest batch that is its point: who converges sooner there would have to provide one.
    """
    points = pruned([point_of(size, converged, runs) for size, converged in reference.items()])
    if batch > points[-1].batch:
        return None
    exact = next((point for point in points if point.batch == batch), None)
    if exact is not None or batch < points[0].batch:
        return exact or points[0]
    low = max((point for point in points if point.batch < batch), key=lambda point: point.batch)
    high = min((point for point in points if point.batch > batch), key=lambda point: point.batch)
    return between(low, high, batch)
