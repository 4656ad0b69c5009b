"""Images per second on more GPUs than were measured: a small physical law, its uncertainty, and its error on points that it was not fitted to.

The seconds of one optimizer step on n GPUs in m = ceil(n / GPUs per node) nodes, with a global batch of B images, are

    T(n, B) = a B/n + c (m - 1)/m + f        a, c, f >= 0

a: seconds that a GPU computes on one image. c: communication that computation does not hide; of a ring's all-reduce, or reduce-scatter and
all-gather, (m - 1)/m of the data crosses between nodes (P. Patarasuk and X. Yuan, Journal of Parallel and Distributed Computing 69(2), 2009):
none on one node, almost constant on many. f: what every step costs, however small the share of a GPU.

The fit is non-negative least squares of relative errors. What points cannot tell apart is given to the first of the terms: a and f where all have
the same B/n; c and f where all have the same B and fill their nodes, for then n T is a straight line in n, and what is predicted for that B does not
depend on the choice. One point gives linear scaling, an assumption.

Whatever a, c and f are, a step of s' images a GPU takes at least min(1, s'/s) times a step of s images a GPU on no more nodes. The best measured GPU
thereby bounds larger clusters: with as many images a step or fewer no GPU does more a second, and with more no step is shorter.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from diffusion.common.text import counted

COMPUTE, COMMUNICATION, OVERHEAD = range(3)

# A point is an outlier if the fit of the others, with at least these degrees of freedom, misses it by more than this share and this number of
# their standard deviations. The points of the published tables are foretold to within 7 %, but for two that contradict each other, and a plan
# that is off by 10 % is still the same plan. A significance test would say less: with two degrees of freedom a miss of 39 % has p = 0.05.
# Where too few points are left to accuse one, a law that deviates from all of them by more than the share is doubted as a whole (`ScalingFit.doubt`).
OUTLIER_MISS, OUTLIER_DEVIATIONS, OUTLIER_DEGREES = 0.10, 3.0, 2

IQR_OF_NORMAL = 1.349  # interquartile range of a normal distribution, in standard deviations


@dataclass(frozen=True)
class ScalingPoint:
    """A measured throughput: images per second of all GPUs together, at a global batch of `global_size` images."""

    num_gpus: int
    global_size: int
    images_per_sec: float
    spread: float | None = None  # interquartile range of windows / median, where it is known

    def __post_init__(self) -> None:
        if self.num_gpus < 1 or self.global_size < 1 or not 0 < self.images_per_sec < math.inf:
            raise ValueError(f'{self}: GPUs and global batch are whole numbers of at least 1, images per second a finite number above 0')

    @property
    def step_sec(self) -> float:
        return self.global_size / self.images_per_sec


@dataclass(frozen=True)
class PredictedRate:
    """Images per second to expect of a number of GPUs, with its uncertainty."""

    num_gpus: int
    global_size: int
    images_per_sec: float
    low: float | None  # of the interval, with `level`; None: no degree of freedom is left to estimate one
    high: float | None
    level: float
    extrapolation: float  # times the most GPUs that were measured
    leave_one_out: float | None  # root mean square of the fit's relative leave-one-out errors; None: it has only one point
    is_below: bool = False  # fewer GPUs than any point has
    is_network_unseen: bool = False  # it needs several nodes, and none of the points did: what crosses the network costs nothing in it

    @property
    def interval(self) -> str:
        """Interval in words; empty if there is none."""
        if self.low is None or self.high is None:
            return ''
        return f'{self.low:,.1f} to {self.high:,.1f}' if math.isfinite(self.high) else f'{self.low:,.1f} or more'

    def __str__(self) -> str:
        interval = f'{self.level:.0%} interval {self.interval}' if self.interval else 'no interval: no degree of freedom is left'
        within = 'fewer than were measured' if self.is_below else 'within what was measured'
        reach = f'{self.extrapolation:.3g} times the most that were measured' if self.extrapolation > 1 else within
        error = 'no leave-one-out error: one point' if self.leave_one_out is None else f'leave-one-out error {self.leave_one_out:.1%}'
        network = '; nothing was measured on several nodes, so their network is not in it' if self.is_network_unseen else ''
        return f'{self.images_per_sec:,.1f} images/s on {counted(self.num_gpus, "GPU")} ({interval}; {reach}; {error}{network})'


@dataclass(frozen=True)
class ScalingFit:
    """The law through some points; coefficients in seconds, zero where a term is not in use."""

    points: tuple[ScalingPoint, ...]
    left_out: tuple[ScalingPoint, ...]  # on request; not in the fit
    gpus_per_node: int
    coefficients: np.ndarray  # (3,): a, c, f
    active: tuple[int, ...]  # COMPUTE, COMMUNICATION and OVERHEAD, as far as they are in use

    @property
    def degrees_of_freedom(self) -> int:
        return len(self.points) - len(self.active)

    def step_sec(self, num_gpus: int, global_size: int) -> float:
        return float(self._asked(num_gpus, global_size) @ self.coefficients)

    @cached_property
    def deviation(self) -> float:
        """Standard deviation of a measurement from the law, as a share of its step; NaN without degrees of freedom.

        Not below what the spread of the measurements' own windows means for a normal distribution: a fit can hit noisy points by chance.
        """
        if not self.degrees_of_freedom:
            return math.nan
        spreads = [point.spread for point in self.points if point.spread is not None]
        return max(self._residual_deviation, float(np.median(spreads)) / IQR_OF_NORMAL if spreads else 0.0)

    @property
    def doubt(self) -> str:
        """A sentence where the law deviates from its own points by more than what makes an outlier of one; nothing where it does not.

        `outliers` may name none all the same: with few points each of several could be the wrong one.
        """
        if not self.degrees_of_freedom or self._residual_deviation <= OUTLIER_MISS:
            return ''
        few = self.degrees_of_freedom <= OUTLIER_DEGREES  # of the fit without a point: one fewer
        which = f'{len(self.points)} rows are too few to say which one is off' if few else 'no row stands out as the one that is off'
        return f'{which}: the law misses them by {self._residual_deviation:.1%}; measure again'

    def predict(self, num_gpus: int, global_size: int, level: float = 0.95) -> PredictedRate:
        """Images per second with a prediction interval: that of one more measurement, by Student's t over the active terms.

        The best measured GPU bounds it above (`_shortest_sec`). A term that the fit set to zero is taken for known to be zero, and the law itself
        for true.
        """
        low = high = None
        if self.degrees_of_freedom:
            low, high = (float(end) for end in self.quantiles(num_gpus, global_size, np.array([1 - level, 1 + level]) / 2))
        counts = [point.num_gpus for point in self.points]
        return PredictedRate(
            num_gpus, global_size, global_size / self.step_sec(num_gpus, global_size), low, high, level, num_gpus / max(counts),
            self.leave_one_out_error, num_gpus < min(counts), num_gpus > self.gpus_per_node >= max(counts),
        )  # fmt: skip

    def quantiles(self, num_gpus: int, global_size: int, shares: np.ndarray) -> np.ndarray:
        """Images per second that one more measurement stays below with these probabilities (0..1); infinite where only a step of no length does."""
        if not self.degrees_of_freedom:
            raise ValueError(f'{len(self.points)} points for {len(self.active)} terms leave no degree of freedom')
        from scipy.special import stdtrit  # here, as commands that only read arguments import this module

        asked, active = self._asked(num_gpus, global_size), list(self.active)
        relative = _design(self.points, self.gpus_per_node)[:, active] / np.array([[point.step_sec] for point in self.points])
        step = float(asked @ self.coefficients)
        variance = asked[active] @ np.linalg.inv(relative.T @ relative) @ asked[active] + step**2  # of one more measurement
        scale = self.deviation * math.sqrt(variance)
        steps = np.maximum(step + stdtrit(self.degrees_of_freedom, 1 - shares) * scale, self._shortest_sec(num_gpus, global_size))
        return np.where(steps > 0, global_size / np.where(steps > 0, steps, 1.0), np.inf)

    @cached_property
    def leave_one_out(self) -> tuple[float | None, ...]:
        """Images per second of each point by the fit of the others, relative to what was measured, less 1; None without others."""
        misses = []
        for i, point in enumerate(self.points):
            others = self.points[:i] + self.points[i + 1 :]
            misses.append(miss(fit(others, self.gpus_per_node), point) if others else None)
        return tuple(misses)

    @property
    def leave_one_out_error(self) -> float | None:
        """Root mean square over the points; None if there is one."""
        misses = [error for error in self.leave_one_out if error is not None]
        return float(np.sqrt(np.mean(np.square(misses)))) if misses else None

    def __str__(self) -> str:
        where = f'{len(self.points)} point{"s" if len(self.points) > 1 else ""}, {min(p.num_gpus for p in self.points)}'
        where += f' to {counted(max(p.num_gpus for p in self.points), "GPU")}, {self.gpus_per_node} a node' if len(self.points) > 1 else ' GPUs'
        a, c, f = self.coefficients
        terms = [f'{_ms(a)} per image and GPU', f'{_ms(c)} (m - 1)/m of exposed communication', f'{_ms(f)} fixed']
        law = ' + '.join(terms[i] for i in self.active)
        if len(self.points) == 1:
            return f'step = {law}; {where}: linear scaling is assumed'
        error = f'leave-one-out error {self.leave_one_out_error:.1%}'
        fits = (
            f'deviation {self.deviation:.1%}, {self.degrees_of_freedom} {"degree" if self.degrees_of_freedom == 1 else "degrees"} of freedom'
            if self.degrees_of_freedom
            else 'no degrees of freedom'
        )
        return f'step = {law}; {where}: {fits}, {error}'

    def _shortest_sec(self, num_gpus: int, global_size: int) -> float:
        """Seconds that a step takes at least by the best measured GPU (images/s each) on no more nodes; 0 if all were on more.

        Less the share that makes an outlier, as the best of several is better than it should be: intervals of points that scale linearly
        would else hold in three of four cases only. And no longer than the law says itself, whose best point may be another one.
        """
        nodes = math.ceil(num_gpus / self.gpus_per_node)
        known = [point for point in self.points if math.ceil(point.num_gpus / self.gpus_per_node) <= nodes]
        if not known:
            return 0.0
        best = max(known, key=lambda point: point.images_per_sec / point.num_gpus)
        images = global_size / num_gpus / (best.global_size / best.num_gpus)
        return min(best.step_sec * min(1.0, images) / (1 + OUTLIER_MISS), self.step_sec(num_gpus, global_size))

    @cached_property
    def _residual_deviation(self) -> float:
        """`deviation`, but for what windows say."""
        residuals = [self.step_sec(point.num_gpus, point.global_size) / point.step_sec - 1 for point in self.points]
        return math.sqrt(sum(residual**2 for residual in residuals) / self.degrees_of_freedom)

    def _asked(self, num_gpus: int, global_size: int) -> np.ndarray:
        """Its row of the design."""
        return _design([ScalingPoint(num_gpus, global_size, 1.0)], self.gpus_per_node)[0]


def fit(points: Sequence[ScalingPoint], gpus_per_node: int = 8, without: Sequence[ScalingPoint] = ()) -> ScalingFit:
    """The law with the smallest sum of squared relative errors of the steps' seconds; of laws that fit alike, the one with fewer or earlier terms.

    Points `without`, such as `outliers`, are left out; ValueError if none is left, or a node has no GPU.
    """
    if gpus_per_node < 1:
        raise ValueError(f'{gpus_per_node} GPUs a node: a node has at least 1')
    used = tuple(point for point in points if point not in without)
    if not used:
        raise ValueError('a scaling law needs at least one measured point that is not left out')
    from scipy.optimize import nnls  # here, as commands that only read arguments import this module

    relative = _design(used, gpus_per_node) / np.array([[point.step_sec] for point in used])
    best, coefficients = math.inf, np.zeros(3)
    for columns in ([COMPUTE, COMMUNICATION], [COMPUTE, OVERHEAD], [COMPUTE, COMMUNICATION, OVERHEAD]):
        solution, residual = nnls(relative[:, columns], np.ones(len(used)))
        solution[(relative[:, columns] * solution).max(axis=0) < 1e-12] = 0.0  # a share of a step that is rounding
        is_possible = solution[0] > 0 or (solution[-1] > 0 and columns[-1] == OVERHEAD)  # with communication alone, 1 node would take no time
        if is_possible and residual**2 < best - 1e-12:
            best, coefficients = residual**2, np.zeros(3)
            coefficients[columns] = solution
    return ScalingFit(used, tuple(point for point in points if point in without), gpus_per_node, coefficients, tuple(np.flatnonzero(coefficients)))


def miss(law: ScalingFit, point: ScalingPoint) -> float:
    """Predicted / measured images per second of a point, less 1."""
    return point.step_sec / law.step_sec(point.num_gpus, point.global_size) - 1


def outliers(points: Sequence[ScalingPoint], gpus_per_node: int = 8) -> tuple[ScalingPoint, ...]:
    """Points that the fit of the others misses by more than 10 % and three of their standard deviations; the worst goes first, then again.

    A fit with fewer than two degrees of freedom accuses none: a second point that is wrong would decide.
    """
    found, rest = list[ScalingPoint](), list(points)
    while len(rest) > 1:
        suspects = []
        for i, point in enumerate(rest):
            others = fit(rest[:i] + rest[i + 1 :], gpus_per_node)
            error = abs(miss(others, point))
            if others.degrees_of_freedom >= OUTLIER_DEGREES and error > max(OUTLIER_MISS, OUTLIER_DEVIATIONS * others.deviation):
                suspects.append((error, i))
        if not suspects:
            break
        found.append(rest.pop(max(suspects)[1]))
    return tuple(found)


@dataclass(frozen=True, kw_only=True)
class ScalingLaws:
    """Points that differ in the number of GPUs and the batch: the measurement where there is one, else the lower of two laws.

    An outlier is either a bad measurement or the first sign of a limit, and points alone do not tell which. A plan that takes the lower of the laws
    with and without outliers is not late whichever it was.
    """

    points: tuple[ScalingPoint, ...]
    gpus_per_node: int = 8

    @cached_property
    def outliers(self) -> tuple[ScalingPoint, ...]:
        return outliers(self.points, self.gpus_per_node)

    @cached_property
    def fit(self) -> ScalingFit:
        """Fit of all points, outliers included."""
        return fit(self.points, self.gpus_per_node)

    @cached_property
    def fit_without_outliers(self) -> ScalingFit:
        return fit(self.points, self.gpus_per_node, self.outliers)

    def measured_at(self, num_gpus: int, global_size: int) -> ScalingPoint | None:
        """The point with exactly these, if there is one."""
        return next((point for point in self.points if (point.num_gpus, point.global_size) == (num_gpus, global_size)), None)

    def slowest_first(self, num_gpus: int, global_size: int) -> list[ScalingFit]:
        """The law without outliers and, if there are any, the law with them; first the one that predicts fewer images/s here."""
        laws = [self.fit_without_outliers, *([self.fit] if self.outliers else [])]
        return sorted(laws, key=lambda law: -law.step_sec(num_gpus, global_size))


def _design(points: Sequence[ScalingPoint], gpus_per_node: int) -> np.ndarray:
    """(points, 3): images per GPU and step, (m - 1)/m of m nodes, and 1."""
    nodes = [math.ceil(point.num_gpus / gpus_per_node) for point in points]
    return np.array([[point.global_size / point.num_gpus, (m - 1) / m, 1.0] for point, m in zip(points, nodes, strict=True)])


def _ms(sec: float) -> str:
    return f'{sec * 1e3:,.0f} ms' if sec >= 1 else f'{sec * 1e3:.4g} ms'
