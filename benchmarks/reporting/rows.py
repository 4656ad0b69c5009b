"""Rows of result files: read, the latest of each point kept, and put together into series that differ in the number of GPUs only."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.reporting.series import MILLION, Series, Work
from benchmarks.sweeping.rows import RATED
from diffusion.cost.formulas import SD2_BASE
from diffusion.cost.scaling import Point
from diffusion.json_lines import read_lines

# Of a sweep's settings: what scaling is over, and what follows from it. A GPU's share of the batch bounds its micro-batch.
GPU_AXES = ('num_gpus', 'num_nodes', 'gpus_per_node', 'batch.global_size', 'batch.micro_size')
NAMED = ('model.unet', 'data.resolution', 'data.kind')  # of a sweep's settings: what a series is called by anyway
# What must be equal in rows of one series, beside the other axes of the sweep.
SAME = ('unet', 'resolution', 'kind', 'precision', 'sharding', 'compile', 'attention', 'checkpoint_activations', 'ema', 'device')


class ResultError(ValueError):
    """A result file cannot be reported on; the message says why and what to do."""


@dataclass(frozen=True)
class Result:
    """One row, of which any value may be missing or null: the point may have failed."""

    row: Mapping[str, Any]

    def text(self, key: str) -> str:
        value = self.row.get(key)
        return '' if value is None else str(value)

    def number(self, key: str) -> float | None:
        """A finite number, or None."""
        value = self.row.get(key)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        return float(value) if is_number else None  # type: ignore[arg-type]

    @property
    def status(self) -> str:
        """With numbers only if they are there."""
        status = self.text('status') or 'no status'
        return f'{status}, but without images/s' if status in RATED and (self.number('images_per_sec') or 0) <= 0 else status

    @property
    def is_rated(self) -> bool:
        return self.status in RATED

    @property
    def num_gpus(self) -> int:
        return max(1, int(self.number('num_gpus') or 1))

    @property
    def settings(self) -> Mapping[str, Any]:
        settings = self.row.get('settings')
        return settings if isinstance(settings, Mapping) else {}

    @property
    def label(self) -> str:
        """The axes of the sweep, as `key=value`; of other benchmarks the name of the row."""
        return self.text('row') or label(self.settings) or self.text('point') or 'the recipe'

    @property
    def on_gpus(self) -> bool:
        return self.row.get('device') not in (None, 'CPU')

    @property
    def identity(self) -> str:
        """Equal for rows that measured the same point."""
        setting = ('sweep', 'point', 'settings', 'row', 'unet', 'resolution', 'kind', 'micro_batch')
        hardware = ('gpu', 'cpu')
        if self.row.get('point'):
            return f'{self.text("benchmark")} {self.text("point")}'
        return json.dumps([self.row.get(key) for key in ('benchmark', *setting, *hardware)], sort_keys=True)


SECTIONS = ('model.', 'data.', 'batch.', 'train.')  # of a recipe; what they hold is clear without them


def label(settings: Mapping[str, Any]) -> str:
    """`num_gpus=2, resolution=256, ema.half_life=null`."""
    names = {key: next((key.removeprefix(section) for section in SECTIONS if key.startswith(section)), key) for key in settings}
    return ', '.join(f'{names[key]}={"null" if value is None else value}' for key, value in settings.items())


@dataclass(frozen=True)
class Results:
    """What the files say: one result a point, in the order in which the points first came."""

    throughput: Sequence[Result]
    steps: Sequence[Result]  # of benchmarks/step.py
    num_superseded: int  # rows of points that were measured again later
    num_unread: int  # lines that are no JSON object, as a kill leaves them


def read_results(paths: Sequence[Path]) -> Results:
    """
    Raises:
        ResultError: a file is not there, not JSON, or none has a row of `throughput` or `step`.
    """
    latest: dict[str, Result] = {}
    num_rows = num_unread = 0
    others = set[str]()
    for path in paths:
        if not path.is_file():
            raise ResultError(f'{path}: no such file; benchmarks.throughput writes one with --out FILE.jsonl')
        rows = list(read_lines(path))
        num_lines = sum(1 for line in path.read_bytes().splitlines() if line.strip())
        if num_lines and not rows:
            raise ResultError(f'{path}: none of its {num_lines:,} lines is a JSON object; a result file has one a line')
        num_unread += num_lines - len(rows)
        for result in map(Result, rows):
            if result.text('benchmark') not in ('throughput', 'step'):
                others.add(result.text('benchmark') or 'without a name')
                continue
            num_rows += 1
            latest[result.identity] = result  # the place of the first, the content of the last
    if not latest:
        found = f'rows of {", ".join(sorted(others))}' if others else 'no rows'
        raise ResultError(f'{", ".join(map(str, paths))}: {found}; a report needs rows of benchmarks.throughput or benchmarks.step')
    kinds = {name: [result for result in latest.values() if result.text('benchmark') == name] for name in ('throughput', 'step')}
    return Results(kinds['throughput'], kinds['step'], num_rows - len(latest), num_unread)


@dataclass(frozen=True)
class Group:
    """A series with the rows behind it."""

    series: Series
    results: Sequence[Result]
    resolution: int
    family: str  # equal for groups that differ in resolution and batch only

    @property
    def device(self) -> str:
        return self.results[0].text('device') or 'unknown device'


def group(results: Iterable[Result]) -> list[Group]:
    """Rated rows that differ in GPUs only; of these first those of one global batch, then those of one batch per GPU.

    The micro-batch may differ, too: of several with equal GPUs and batch the fastest counts.
    """
    alike: dict[str, list[Result]] = {}
    for result in results:
        if result.is_rated and (result.number('global_size') or 0) >= 1:
            alike.setdefault(_key(result), []).append(result)
    groups = []
    for rows in alike.values():
        for chosen in _split(_fastest(rows)):
            groups.append(_group(chosen))
    return groups


def _key(result: Result, without: Sequence[str] = ()) -> str:
    axes = {key: value for key, value in result.settings.items() if key not in (*GPU_AXES, *without)}
    return json.dumps([result.text('sweep'), axes, {key: result.row.get(key) for key in SAME if key not in without}], sort_keys=True)


def _fastest(rows: Sequence[Result]) -> list[Result]:
    best: dict[tuple[int, float | None], Result] = {}
    for result in rows:
        place = result.num_gpus, result.number('global_size')
        if place not in best or (result.number('images_per_sec') or 0) > (best[place].number('images_per_sec') or 0):
            best[place] = result
    return list(best.values())


def _split(rows: list[Result]) -> list[list[Result]]:
    """By global batch where that gives more than one number of GPUs; what is left by batch per GPU."""
    parts, rest = [], rows
    for size_of in (lambda r: r.number('global_size'), lambda r: r.number('global_size') / r.num_gpus):
        sizes: dict[float, list[Result]] = {}
        for result in rest:
            sizes.setdefault(size_of(result), []).append(result)
        parts += [part for part in sizes.values() if len({result.num_gpus for result in part}) > 1]
        rest = [result for part in sizes.values() for result in part if len({other.num_gpus for other in part}) == 1]
    return parts + [[result] for result in rest]


def _group(rows: list[Result]) -> Group:
    rows = sorted(rows, key=lambda result: result.num_gpus)
    first = rows[0]
    resolution = int(first.number('resolution') or 0)
    points = tuple(
        Point(r.num_gpus, int(r.number('global_size') or 0), r.number('images_per_sec') or 0.0, r.number('images_per_sec_spread')) for r in rows
    )
    axes = {key: value for key, value in first.settings.items() if key not in (*GPU_AXES, *NAMED)}
    parts = [first.text('unet'), f'{resolution} px', first.text('kind'), label(axes), _batch(points)]
    series = Series(
        ', '.join(part for part in parts if part),
        points,
        work_of(first.text('unet'), resolution),
        gpus_per_node=max(1, *(int(r.number('gpus_per_node') or 8) for r in rows)),
        unit='GPUs' if first.on_gpus else 'processes',
    )
    return Group(series, rows, resolution, _key(first, without=('resolution', 'data.resolution')))


def _batch(points: Sequence[Point]) -> str:
    sizes = {point.global_size for point in points}
    return f'global batch {points[0].global_size:,}' if len(sizes) == 1 else f'{points[0].global_size // points[0].num_gpus:,} images a GPU'


def work_of(unet: str, resolution: int) -> Work:
    """The phase of Stable Diffusion 2 base with this U-Net and resolution, or else a million samples."""
    for phase in SD2_BASE:
        if (unet, resolution) == ('sd2-base', phase.resolution):
            return Work(phase.amount, phase.num_samples)
    return MILLION
