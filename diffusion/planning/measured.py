"""A series of images per second out of a file that benchmarks.throughput wrote: the rows that are most like a recipe, and how they differ from it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from diffusion.cost.scaling import Point
from diffusion.hardware import gpu_name
from diffusion.json_lines import read_lines
from diffusion.planning.sources import Asked, OriginError, Series

MATCHED = ('precision', 'compile', 'checkpoint_activations', 'ema', 'sharding', 'micro_size')  # of a row; as in the recipe at best
ALIKE = MATCHED[:4]  # in all rows of a series; sharding and micro-batch change with the number of GPUs


def series_of_file(path: Path, asked: Asked) -> Series:
    """The latest rows of the recipe's U-Net, resolution and kind, one a number of GPUs and global batch.

    Rows of the recipe's own global batch come first; the law goes through those of others too, as it takes the batch into account.

    Raises:
        OriginError: there is no such file, or none of its rows will do; says what it has.
    """
    if not path.exists():
        raise OriginError(
            f'--throughput {path}: no such file; give one that benchmarks.throughput wrote, a number such as 11600@128, published, or --mfu instead'
        )
    if path.is_dir():
        raise OriginError(f'--throughput {path}: is a folder; give the file of results in it')
    latest = {row.get('point', str(row)): row for row in read_lines(path) if row.get('benchmark') == 'throughput'}
    rows = [row for row in latest.values() if row.get('images_per_sec')]
    recipe = asked.facts.recipe
    kinds = ('images',) if asked.facts.encodes_images else ('latents', 'synthetic')
    matching = [row for row in rows if (row.get('unet'), row.get('resolution')) == (recipe.model.unet, asked.resolution) and row.get('kind') in kinds]
    if not matching:
        raise OriginError(f'--throughput {path}: has no measured row for {asked.what}; {_rows_text(list(latest.values()))}')
    by_setting: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in matching:  # a law goes through rows that differ in the number of GPUs, and what it asks for
        by_setting.setdefault(tuple(row.get(key) for key in ('device', *ALIKE)), []).append(row)

    def rank(series: list[dict[str, Any]]) -> tuple[Any, ...]:
        return (
            _is_on(series[0], asked.gpu),
            _likeness(series[0], asked)[: len(ALIKE)],
            len({row['num_gpus'] for row in series if row['global_size'] == recipe.batch.global_size}),
            len({row['num_gpus'] for row in series}),
            max(row['images_per_sec'] / row['num_gpus'] for row in series),
        )

    chosen = max(by_setting.values(), key=rank)
    best: dict[tuple[int, int], dict[str, Any]] = {}
    for row in chosen:
        place = row['num_gpus'], row['global_size']
        known = best.get(place)
        if known is None or _preferred(row, asked) > _preferred(known, asked):
            best[place] = row
    points = tuple(Point(*place, row['images_per_sec'], row.get('images_per_sec_spread')) for place, row in sorted(best.items()))
    gpus_per_node = next((row['gpus_per_node'] for row in best.values() if row.get('num_nodes', 1) > 1), asked.gpus_per_node)
    dates = sorted({str(row.get('date', '?'))[:10] for row in best.values()})
    devices = ', '.join(sorted({str(row.get('device')) for row in best.values()}))
    name = f'{path} ({devices}; {dates[0]}{f" to {dates[-1]}" if len(dates) > 1 else ""})'
    return Series('measured', name, points, recipe.batch.global_size, gpus_per_node, best, list(_differences(best.values(), asked, path)))


def _wanted(asked: Asked) -> dict[str, Any]:
    """What the recipe says of MATCHED."""
    recipe, train = asked.facts.recipe, asked.facts.recipe.train
    return {
        'precision': train.precision,
        'compile': train.compile,
        'checkpoint_activations': train.checkpoint_activations,
        'ema': recipe.ema.half_life is not None,
        'sharding': train.sharding,
        'micro_size': recipe.batch.micro_size,
    }


def _likeness(row: dict[str, Any], asked: Asked) -> tuple[bool, ...]:
    """Which of MATCHED are as in the recipe."""
    wanted = _wanted(asked)
    return tuple(row.get(key) == wanted[key] for key in MATCHED)


def _is_on(row: dict[str, Any], gpu: str) -> bool:
    return gpu_name(str(row.get('device'))) == gpu


def _preferred(row: dict[str, Any], asked: Asked) -> tuple[Any, ...]:
    return row.get('status') == 'measured', _likeness(row, asked), row['images_per_sec']


def _differences(rows: Iterable[dict[str, Any]], asked: Asked, path: Path) -> Iterable[str]:
    """What a reader must know of rows that are not just as the recipe."""
    rows = list(rows)
    name = asked.facts.name
    for key, wanted in _wanted(asked).items():
        other = sorted({str(row.get(key)) for row in rows if row.get(key) != wanted and not (key == 'micro_size' and wanted == 'auto')})
        if other:
            yield f'{path}: measured with {key} {" and ".join(other)}, {name} has {wanted}'
    devices = sorted({str(row.get('device')) for row in rows if not _is_on(row, asked.gpu)})
    if devices:
        yield f'{path}: measured on {", ".join(devices)}, and the plan is for {asked.gpu}'
    unsteady = sorted({row['num_gpus'] for row in rows if row.get('status') != 'measured'})
    if unsteady:
        yield f'{path}: the rows of {", ".join(map(str, unsteady))} GPUs were not steady'


def _rows_text(rows: Sequence[dict[str, Any]]) -> str:
    if not rows:
        return 'it has no rows of benchmarks.throughput'
    counts: dict[str, int] = {}
    for row in rows:
        what = f'U-Net {row.get("unet")}, {row.get("resolution")} px, {row.get("kind")}, {row.get("num_gpus")} GPUs: {row.get("status")}'
        counts[what] = counts.get(what, 0) + 1
    return 'it has ' + '; '.join(f'{what} ({count} rows)' if count > 1 else what for what, count in counts.items())
