"""Throughput over the number of GPUs, everything else being equal: series of rows of result files."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.sweeping.sweep import label
from diffusion.cost.formulas import HOURS_PER_DAY, SD2_BASE, Phase, hours
from diffusion.cost.results import Result, gpus_per_node
from diffusion.cost.scaling import ScalingLaws, ScalingPoint

# Origin of images per second on a number of GPUs: a row, the law, or the law through all points where that is the lower one.
MEASURED, PREDICTED, WITH_OUTLIER = 'measured', 'predicted', 'with outlier'
LOWER_LAW = f'Where a series has an outlier the lower of its two predictions is taken: "{WITH_OUTLIER}" where that is the law through all points.'

# Of a sweep's settings: the axes of scaling, and what follows from them. A GPU's share of the batch bounds its micro-batch.
GPU_AXES = ('num_gpus', 'num_nodes', 'gpus_per_node', 'batch.global_size', 'batch.micro_size')
NAMED = ('model.network', 'data.resolution', 'data.kind')  # of a sweep's settings: in the name of a series anyway
# Keys that must be equal in rows of one series, in addition to the other axes of the sweep.
SAME = ('network', 'resolution', 'kind', 'precision', 'sharding', 'compile', 'attention', 'checkpoint_activations', 'ema', 'device', 'interconnect')


@dataclass(frozen=True, kw_only=True)
class ScalingSeries(ScalingLaws):
    """Points that differ in the number of GPUs, by rising number of GPUs.

    Args:
        unit: or processes, on a CPU.
        results: the rows of a result file that the points are of.
        phase: what is to be trained at the resolution of the series; None: nothing that is known, and days are those of a million samples.
        family: equal for series that differ in resolution and batch only.
    """

    name: str
    unit: str = 'GPUs'
    results: tuple[Result, ...] = ()
    resolution: int = 0
    phase: Phase | None = None
    family: str = ''

    @property
    def work(self) -> Phase:
        return self.phase or Phase(self.resolution, 1_000_000)

    @property
    def device(self) -> str:
        return self.results[0].text('device') or 'unknown device'

    @property
    def most_gpus(self) -> int:
        return max(point.num_gpus for point in self.points)

    def days(self, images_per_sec: float) -> float:
        return hours(self.work.num_samples, images_per_sec) / HOURS_PER_DAY

    def gpu_hours(self, point: ScalingPoint) -> float:
        return hours(self.work.num_samples, point.images_per_sec) * point.num_gpus

    def global_size(self, num_gpus: int) -> int:
        """Global batch of a run on `num_gpus` GPUs: constant if it was, or in proportion if the batch per GPU was constant."""
        sizes = {point.global_size for point in self.points}
        largest = max(self.points, key=lambda point: point.num_gpus)
        return largest.global_size if len(sizes) == 1 else largest.global_size * num_gpus // largest.num_gpus

    def images_per_sec(self, num_gpus: int, global_size: int) -> float:
        """Images per second of all GPUs together: as measured, or else the lower prediction."""
        point = self.measured_at(num_gpus, global_size)
        return global_size / self.slowest_first(num_gpus, global_size)[0].step_sec(num_gpus, global_size) if point is None else point.images_per_sec

    def origin(self, num_gpus: int) -> str:
        """Which of MEASURED, PREDICTED and WITH_OUTLIER the rate of such a run is."""
        global_size = self.global_size(num_gpus)
        if self.measured_at(num_gpus, global_size) is not None:
            return MEASURED
        return WITH_OUTLIER if self.outliers and not self.slowest_first(num_gpus, global_size)[0].left_out else PREDICTED


def efficiency(points: Sequence[ScalingPoint]) -> list[float]:
    """Images per second per GPU of each point, as a share of that of the point with the fewest GPUs."""
    smallest = min(points, key=lambda point: point.num_gpus)
    return [point.images_per_sec / point.num_gpus / (smallest.images_per_sec / smallest.num_gpus) for point in points]


def settings_of(result: Result) -> Mapping[str, Any]:
    """Return the axes of a row's sweep."""
    settings = result.row.get('settings')
    return settings if isinstance(settings, Mapping) else {}


def label_of(result: Result) -> str:
    """Return the axes of the sweep as `key=value`; of other benchmarks the name of the row."""
    name = result.text('row') or ('' if isinstance(result.row.get('settings'), Mapping) else result.text('point'))
    return name or label(settings_of(result))


def group(results: Iterable[Result], phases: Sequence[Phase] | None = None) -> list[ScalingSeries]:
    """Group rated rows that differ in GPUs only; of these first those of one global batch, then those of one batch per GPU.

    The micro-batch may differ, too: of several with equal GPUs and batch the fastest counts.

    Args:
        phases: what is to be trained; None: Stable Diffusion 2 base, by its U-Net alone.
    """
    alike: dict[str, list[Result]] = {}
    for result in results:
        if result.is_rated:
            alike.setdefault(_key(result), []).append(result)
    return [_series(chosen, phases) for rows in alike.values() for chosen in _split(_fastest(rows))]


def _key(result: Result, without: Sequence[str] = ()) -> str:
    axes = {key: value for key, value in settings_of(result).items() if key not in (*GPU_AXES, *without)}
    return json.dumps([result.text('sweep'), axes, {key: result.row.get(key) for key in SAME if key not in without}], sort_keys=True)


def _fastest(rows: Sequence[Result]) -> list[Result]:
    best: dict[tuple[int, int], Result] = {}
    for result in rows:
        point = result.point
        place = point.num_gpus, point.global_size
        if place not in best or point.images_per_sec > best[place].point.images_per_sec:
            best[place] = result
    return list(best.values())


def _split(rows: list[Result]) -> list[list[Result]]:
    """Split by global batch where that gives more than one number of GPUs, the rest by batch per GPU."""
    parts, rest = [], rows
    for size_of in (lambda point: point.global_size, lambda point: point.global_size / point.num_gpus):
        sizes: dict[float, list[Result]] = {}
        for result in rest:
            sizes.setdefault(size_of(result.point), []).append(result)
        scales = {size: len({result.point.num_gpus for result in part}) > 1 for size, part in sizes.items()}
        parts += [part for size, part in sizes.items() if scales[size]]
        rest = [result for size, part in sizes.items() if not scales[size] for result in part]
    return parts + [[result] for result in rest]


def _series(rows: list[Result], phases: Sequence[Phase] | None) -> ScalingSeries:
    rows = sorted(rows, key=lambda result: result.point.num_gpus)
    first, network = rows[0], rows[0].text('network')
    resolution = int(first.number('resolution') or 0)
    points = tuple(result.point for result in rows)
    axes = {key: value for key, value in settings_of(first).items() if key not in (*GPU_AXES, *NAMED)}
    is_constant = len({point.global_size for point in points}) == 1
    batch = f'global batch {points[0].global_size:,}' if is_constant else f'{points[0].global_size // points[0].num_gpus:,} images a GPU'
    parts = [network, f'{resolution} px', first.text('kind'), label(axes) if axes else '', batch, first.text('device')]
    if phases is None:
        phases = SD2_BASE if network == 'sd2-base' else ()
    return ScalingSeries(
        name=', '.join(part for part in parts if part),
        points=points,
        gpus_per_node=gpus_per_node(rows),
        unit='GPUs' if first.on_gpus else 'processes',
        results=tuple(rows),
        resolution=resolution,
        phase=next((phase for phase in phases if phase.resolution == resolution), None),
        family=_key(first, without=('resolution', 'data.resolution')),
    )
