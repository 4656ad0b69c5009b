"""A series of images per second out of a file that benchmarks.throughput wrote: the rows that are most like a recipe, and how they differ from it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from diffusion.cost.hardware import gpu_name
from diffusion.cost.results import Result, ResultError, gpus_per_node, read_results
from diffusion.cost.sources import Asked, OriginError, Series

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
    try:
        results = read_results([path])
    except ResultError as error:
        raise OriginError(f'--throughput {error}') from error
    recipe = asked.facts.recipe
    kinds = ('images',) if asked.facts.encodes_images else ('latents', 'synthetic')
    what = recipe.model.network, asked.resolution
    matching = [
        one for one in results.throughput if one.is_rated and (one.text('unet'), one.count('resolution')) == what and one.text('kind') in kinds
    ]
    if not matching:
        raise OriginError(f'--throughput {path}: has no measured row for {asked.what}; {_rows_text(results.throughput)}')
    by_setting: dict[str, list[Result]] = {}
    for result in matching:  # a law goes through rows that differ in the number of GPUs, and what it asks for
        by_setting.setdefault(json.dumps([result.row.get(key) for key in ('device', 'interconnect', *ALIKE)]), []).append(result)

    def rank(series: list[Result]) -> tuple[Any, ...]:
        points = [result.point for result in series]
        return (
            _is_on(series[0], asked.gpu),
            _likeness(series[0], asked)[: len(ALIKE)],
            len({point.num_gpus for point in points if point.global_size == recipe.batch.global_size}),
            len({point.num_gpus for point in points}),
            max(point.images_per_sec / point.num_gpus for point in points),
        )

    chosen = max(by_setting.values(), key=rank)
    best: dict[tuple[int, int], Result] = {}
    for result in chosen:
        place = result.point.num_gpus, result.point.global_size
        if place not in best or _preferred(result, asked) > _preferred(best[place], asked):
            best[place] = result
    best = dict(sorted(best.items()))
    points = tuple(result.point for result in best.values())
    dates = sorted({result.text('date')[:10] or '?' for result in best.values()})
    devices = ', '.join(sorted({_device(result) for result in best.values()}))
    name = f'{path} ({devices}; {dates[0]}{f" to {dates[-1]}" if len(dates) > 1 else ""})'
    warnings = list(_differences(best.values(), asked, path))
    if results.num_unread:
        warnings.append(f'{path}: lines that could not be read, as a kill leaves them: {results.num_unread}')
    return Series('measured', name, points, recipe.batch.global_size, gpus_per_node(best.values(), asked.gpus_per_node), best, warnings)


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


def _likeness(result: Result, asked: Asked) -> tuple[bool, ...]:
    """Which of MATCHED are as in the recipe."""
    wanted = _wanted(asked)
    return tuple(result.row.get(key) == wanted[key] for key in MATCHED)


def _device(result: Result) -> str:
    return result.text('device') or 'an unknown device'


def _is_on(result: Result, gpu: str) -> bool:
    return gpu_name(_device(result)) == gpu


def _preferred(result: Result, asked: Asked) -> tuple[Any, ...]:
    return result.status == 'measured', _likeness(result, asked), result.point.images_per_sec


def _differences(results: Iterable[Result], asked: Asked, path: Path) -> Iterable[str]:
    """What a reader must know of rows that are not just as the recipe."""
    results = list(results)
    name = asked.facts.name
    for key, wanted in _wanted(asked).items():
        other = sorted({str(one.row.get(key)) for one in results if one.row.get(key) != wanted and not (key == 'micro_size' and wanted == 'auto')})
        if other:
            yield f'{path}: measured with {key} {" and ".join(other)}, {name} has {wanted}'
    batch = asked.facts.recipe.batch.global_size
    places = {result.point.num_gpus for result in results}
    if elsewhere := sorted(places - {one.point.num_gpus for one in results if one.point.global_size == batch}):
        sizes = sorted({one.point.global_size for one in results if one.point.num_gpus in elsewhere})
        yield (
            f'{path}: measured on {", ".join(map(str, elsewhere))} GPUs with a global batch of {" and ".join(f"{size:,}" for size in sizes)}, '
            f'{name} has {batch:,}: predicted for it'
        )
    devices = sorted({_device(result) for result in results if not _is_on(result, asked.gpu)})
    if devices:
        yield f'{path}: measured on {", ".join(devices)}, and the plan is for {asked.gpu}'
    unsteady = sorted({result.point.num_gpus for result in results if result.status != 'measured'})
    if unsteady:
        yield f'{path}: the rows of {", ".join(map(str, unsteady))} GPUs were not steady'


def _rows_text(results: Sequence[Result]) -> str:
    if not results:
        return 'it has no rows of benchmarks.throughput'
    counts: dict[str, int] = {}
    for one in results:
        unet, resolution, kind, num_gpus = (one.text(key) or 'unknown' for key in ('unet', 'resolution', 'kind', 'num_gpus'))
        what = f'U-Net {unet}, {resolution} px, {kind}, {num_gpus} GPU{"" if num_gpus == "1" else "s"}: {one.status}'
        counts[what] = counts.get(what, 0) + 1
    return 'it has ' + '; '.join(f'{what} ({count} rows)' if count > 1 else what for what, count in counts.items())
