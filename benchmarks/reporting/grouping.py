"""Groups of rows of result files: series that differ in the number of GPUs only."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmarks.reporting.series import MILLION, ScalingSeries, TrainingWork
from diffusion.cost.formulas import SD2_BASE, Phase
from diffusion.cost.results import Result, gpus_per_node, label
from diffusion.cost.scaling import ScalingPoint

# Of a sweep's settings: the axes of scaling, and what follows from them. A GPU's share of the batch bounds its micro-batch.
GPU_AXES = ('num_gpus', 'num_nodes', 'gpus_per_node', 'batch.global_size', 'batch.micro_size')
NAMED = ('model.network', 'data.resolution', 'data.kind')  # of a sweep's settings: in the name of a series anyway
# Keys that must be equal in rows of one series, in addition to the other axes of the sweep.
SAME = ('unet', 'resolution', 'kind', 'precision', 'sharding', 'compile', 'attention', 'checkpoint_activations', 'ema', 'device', 'interconnect')


@dataclass(frozen=True)
class Group:
    """A series with its rows."""

    series: ScalingSeries
    results: Sequence[Result]
    resolution: int
    family: str  # equal for groups that differ in resolution and batch only

    @property
    def device(self) -> str:
        return self.results[0].text('device') or 'unknown device'


def group(results: Iterable[Result], phases: Sequence[Phase] | None = None) -> list[Group]:
    """Group rated rows that differ in GPUs only; of these first those of one global batch, then those of one batch per GPU.

    The micro-batch may differ, too: of several with equal GPUs and batch the fastest counts.

    Args:
        phases: what is to be trained; None: `work_of` the rows.
    """
    alike: dict[str, list[Result]] = {}
    for result in results:
        if result.is_rated:
            alike.setdefault(_key(result), []).append(result)
    groups = []
    for rows in alike.values():
        for chosen in _split(_fastest(rows)):
            groups.append(_group(chosen, phases))
    return groups


def _key(result: Result, without: Sequence[str] = ()) -> str:
    axes = {key: value for key, value in result.settings.items() if key not in (*GPU_AXES, *without)}
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
        parts += [part for part in sizes.values() if len({result.point.num_gpus for result in part}) > 1]
        rest = [result for part in sizes.values() for result in part if len({other.point.num_gpus for other in part}) == 1]
    return parts + [[result] for result in rest]


def _group(rows: list[Result], phases: Sequence[Phase] | None) -> Group:
    rows = sorted(rows, key=lambda result: result.point.num_gpus)
    first = rows[0]
    resolution = int(first.number('resolution') or 0)
    points = tuple(result.point for result in rows)
    axes = {key: value for key, value in first.settings.items() if key not in (*GPU_AXES, *NAMED)}
    parts = [first.text('unet'), f'{resolution} px', first.text('kind'), label(axes) if axes else '', _batch(points), first.text('device')]
    series = ScalingSeries(
        name=', '.join(part for part in parts if part),
        points=points,
        work=work_of(first.text('unet'), resolution, phases),
        gpus_per_node=gpus_per_node(rows),
        unit='GPUs' if first.on_gpus else 'processes',
    )
    return Group(series, rows, resolution, _key(first, without=('resolution', 'data.resolution')))


def _batch(points: Sequence[ScalingPoint]) -> str:
    sizes = {point.global_size for point in points}
    return f'global batch {points[0].global_size:,}' if len(sizes) == 1 else f'{points[0].global_size // points[0].num_gpus:,} images a GPU'


def work_of(unet: str, resolution: int, phases: Sequence[Phase] | None = None) -> TrainingWork:
    """Return the phase with this resolution, or else a million samples. Without `phases` those of Stable Diffusion 2 base, for its U-Net alone."""
    if phases is None:
        phases = SD2_BASE if unet == 'sd2-base' else ()
    works = (TrainingWork(phase.amount, phase.num_samples) for phase in phases if phase.resolution == resolution)
    return next(works, MILLION)
