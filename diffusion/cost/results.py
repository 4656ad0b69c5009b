"""Result files of benchmarks.throughput and benchmarks.step: read with tolerance, the latest row of each point kept, the rest counted.

A sweep that was killed, ran out of memory or was put together by hand leaves rows without numbers, or with odd ones: they are kept, and report
what they lack.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diffusion.common.files import read_json_lines
from diffusion.contracts.errors import InputError
from diffusion.cost.scaling import ScalingPoint

RATED = ('measured', 'unsteady')  # statuses of rows that have numbers
BENCHMARKS = ('throughput', 'step')  # that have images per second


class ResultError(InputError):
    """A result file cannot be read; the message says why and what to do."""


@dataclass(frozen=True)
class Result:
    """One row, of which any value may be missing, null or odd: the point may have failed."""

    row: Mapping[str, Any]

    def text(self, key: str) -> str:
        value = self.row.get(key)
        return '' if value is None else str(value)

    def number(self, key: str) -> float | None:
        """Return a finite number, or None."""
        value = self.row.get(key)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        return float(value) if is_number else None  # type: ignore[arg-type]

    def count(self, key: str) -> int | None:
        """Return a whole number of at least 1, or None."""
        value = self.number(key)
        return int(value) if value is not None and value >= 1 and value.is_integer() else None

    @property
    def images_per_sec(self) -> float | None:
        """Images per second of all GPUs together, above 0; or None."""
        value = self.number('images_per_sec')
        return value if value is not None and value > 0 else None

    @property
    def status(self) -> str:
        """Status of the row; one with numbers only if they are there."""
        status = self.text('status') or 'no status'
        needed = {'images/s': self.images_per_sec}
        if self.text('benchmark') == 'throughput':
            needed |= {'number of GPUs': self.count('num_gpus'), 'global batch': self.count('global_size')}
        lacking = [name for name, value in needed.items() if value is None]
        return f'{status}, but without {", ".join(lacking)}' if status in RATED and lacking else status

    @property
    def is_rated(self) -> bool:
        return self.status in RATED

    @property
    def point(self) -> ScalingPoint:
        """Point to fit a scaling law to. Raises ValueError: the row is not that of a rated point of a sweep."""
        num_gpus, global_size, images_per_sec = self.count('num_gpus'), self.count('global_size'), self.images_per_sec
        if num_gpus is None or global_size is None or images_per_sec is None:
            raise ValueError(f'{self.text("point")}: {self.status}')
        return ScalingPoint(num_gpus, global_size, images_per_sec, self.number('images_per_sec_spread'))

    @property
    def on_gpus(self) -> bool:
        return self.row.get('device') not in (None, 'CPU')

    @property
    def identity(self) -> str:
        """Equal for rows that measured the same point."""
        setting = ('sweep', 'point', 'settings', 'row', 'network', 'resolution', 'kind', 'micro_batch', 'num_gpus', 'global_size', 'micro_size')
        hardware = ('gpu', 'cpu')
        if self.row.get('point'):
            return f'{self.text("benchmark")} {self.text("point")}'
        return json.dumps([self.row.get(key) for key in ('benchmark', *setting, *hardware)], sort_keys=True)


@dataclass(frozen=True)
class Results:
    """Rows of some files: one result per point, in the order in which the points first came."""

    throughput: Sequence[Result]
    steps: Sequence[Result]  # of benchmarks/step.py
    num_superseded: int  # rows of points that were measured again later
    num_unread: int  # lines that are no JSON object, as a kill leaves them


def read_results(paths: Sequence[Path]) -> Results:
    """Read some result files together. Raises ResultError: a file is not there, cannot be read, is not JSON, or none has a row of BENCHMARKS."""
    latest: dict[str, Result] = {}
    num_rows = num_unread = 0
    others = set[str]()  # in words
    for path in paths:
        if not path.is_file():
            raise ResultError(f'{path}: no such file; benchmarks.throughput writes one with --out FILE.jsonl')
        try:
            rows = list(read_json_lines(path))
            num_lines = sum(1 for line in path.read_bytes().splitlines() if line.strip())
        except OSError as error:
            raise ResultError(f'{path}: cannot be read: {error.strerror}') from error
        if num_lines and not rows:
            raise ResultError(f'{path}: none of its {num_lines:,} lines is a JSON object; a result file has one a line')
        num_unread += num_lines - len(rows)
        for result in map(Result, rows):
            if result.text('benchmark') not in BENCHMARKS:
                name = result.text('benchmark')
                others.add(f'rows of {name}' if name else 'rows that do not say of which benchmark (no key "benchmark")')
                continue
            num_rows += 1
            latest[result.identity] = result  # the place of the first, the content of the last
    if not latest:
        found = ', '.join(sorted(others)) or 'no rows'
        raise ResultError(f'{", ".join(map(str, paths))}: {found}; needed are rows of {" or ".join(f"benchmarks.{name}" for name in BENCHMARKS)}')
    kinds = {name: [result for result in latest.values() if result.text('benchmark') == name] for name in BENCHMARKS}
    return Results(kinds['throughput'], kinds['step'], num_rows - len(latest), num_unread)


def gpus_per_node(results: Iterable[Result], otherwise: int = 8) -> int:
    """Infer the GPUs of a machine from rows of one series: those on several nodes fill each of them, one on a single node may leave most idle.

    Args:
        otherwise: where no row is of several nodes, unless one has more GPUs on a single one. On a CPU, where GPUs are processes, the most a row has.
    """
    results = list(results)
    sizes = [(size, result.count('num_nodes') or 1) for result in results if (size := result.count('gpus_per_node')) is not None]
    full = [size for size, num_nodes in sizes if num_nodes > 1]
    if full:
        return max(full)
    unseen = [otherwise] if not sizes or any(result.on_gpus for result in results) else []
    return max(unseen + [size for size, _ in sizes])
