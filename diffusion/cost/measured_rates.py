"""A series of images per second from a file of benchmarks.throughput: the rows that are most like a recipe, and their differences from it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from diffusion.common.text import counted
from diffusion.cost.hardware import gpu_name
from diffusion.cost.rates import RateError, RateRequest, RateSeries
from diffusion.cost.results import Result, ResultError, gpus_per_node, read_results

MATCHED = ('precision', 'compile', 'checkpoint_activations', 'ema', 'sharding', 'micro_size')  # of a row; as in the recipe at best
ALIKE = MATCHED[:4]  # in all rows of a series; sharding and micro-batch change with the number of GPUs


def series_of_file(path: Path, asked: RateRequest) -> RateSeries:
    """Return the latest rows of the recipe's network, resolution and kind, one per number of GPUs and global batch.

    Rows of the recipe's own global batch come first; the law goes through those of others too, as it takes the batch into account.

    Raises:
        RateError: there is no such file, or none of its rows matches; says what it has.
    """
    if not path.exists():
        raise RateError(
            f'--throughput {path}: no such file; give one that benchmarks.throughput wrote, a number such as 11600@128, published, or --mfu instead'
        )
    if path.is_dir():
        raise RateError(f'--throughput {path}: is a folder; give the file of results in it')
    try:
        results = read_results([path])
    except ResultError as error:
        raise RateError(f'--throughput {error}') from error
    recipe, kinds = asked.facts.recipe, ('images',) if asked.facts.encodes_images else ('latents', 'synthetic')
    by_setting: dict[str, list[Result]] = {}  # a law goes through rows that differ in the number of GPUs, and what it asks for
    for result in results.throughput:
        is_same = (result.text('unet'), result.count('resolution')) == (recipe.model.network, asked.resolution)
        if result.is_rated and is_same and result.text('kind') in kinds:
            by_setting.setdefault(json.dumps([result.row.get(key) for key in ('device', 'interconnect', *ALIKE)]), []).append(result)
    if not by_setting:
        raise RateError(f'--throughput {path}: has no measured row for {asked.what}; {_rows_text(results.throughput)}')

    def rank(series: list[Result]) -> tuple[Any, ...]:
        points = [result.point for result in series]
        return (
            gpu_name(_device(series[0])) == asked.gpu,
            _likeness(series[0], asked)[: len(ALIKE)],
            len({point.num_gpus for point in points if point.global_size == recipe.batch.global_size}),
            len({point.num_gpus for point in points}),
            max(point.images_per_sec / point.num_gpus for point in points),
        )

    best: dict[tuple[int, int], Result] = {}
    for result in max(by_setting.values(), key=rank):
        place = result.point.num_gpus, result.point.global_size
        if place not in best or _preference(result, asked) > _preference(best[place], asked):
            best[place] = result
    best = dict(sorted(best.items()))
    dates = sorted({result.text('date')[:10] or '?' for result in best.values()})
    devices = ', '.join(sorted({_device(result) for result in best.values()}))
    warnings = [f'{path}: {text}' for text in _differences(list(best.values()), asked)]
    if results.num_unread:
        warnings.append(f'{path}: lines that could not be read, as a kill leaves them: {results.num_unread}')
    return RateSeries(
        points=tuple(result.point for result in best.values()),
        gpus_per_node=gpus_per_node(best.values(), asked.gpus_per_node),
        how='measured',
        name=f'{path} ({devices}; {dates[0]}{f" to {dates[-1]}" if len(dates) > 1 else ""})',
        global_size=recipe.batch.global_size,
        rows=best,
        warnings=warnings,
    )


def _wanted(asked: RateRequest) -> dict[str, Any]:
    """Values of MATCHED in the recipe."""
    recipe = asked.facts.recipe
    wanted = {key: getattr(recipe.train, key) for key in ('precision', 'compile', 'checkpoint_activations')}
    return wanted | {'ema': recipe.ema.half_life is not None, 'sharding': recipe.train.sharding, 'micro_size': recipe.batch.micro_size}


def _likeness(result: Result, asked: RateRequest) -> tuple[bool, ...]:
    """Which of MATCHED are as in the recipe."""
    wanted = _wanted(asked)
    return tuple(result.row.get(key) == wanted[key] for key in MATCHED)


def _preference(result: Result, asked: RateRequest) -> tuple[Any, ...]:
    return result.status == 'measured', _likeness(result, asked), result.point.images_per_sec


def _device(result: Result) -> str:
    return result.text('device') or 'an unknown device'


def _differences(results: Sequence[Result], asked: RateRequest) -> Iterator[str]:
    """Yield what a reader must know of rows that are not exactly as the recipe."""
    name, batch = asked.facts.name, asked.facts.recipe.batch.global_size
    for key, wanted in _wanted(asked).items():
        other = sorted({str(one.row.get(key)) for one in results if one.row.get(key) != wanted and not (key == 'micro_size' and wanted == 'auto')})
        if other:
            yield f'measured with {key} {" and ".join(other)}, {name} has {wanted}'
    same_batch = {one.point.num_gpus for one in results if one.point.global_size == batch}
    if elsewhere := sorted({one.point.num_gpus for one in results} - same_batch):
        sizes = ' and '.join(f'{size:,}' for size in sorted({one.point.global_size for one in results if one.point.num_gpus in elsewhere}))
        yield f'measured on {", ".join(map(str, elsewhere))} GPUs with a global batch of {sizes}, {name} has {batch:,}: predicted for it'
    if devices := sorted({_device(one) for one in results if gpu_name(_device(one)) != asked.gpu}):
        yield f'measured on {", ".join(devices)}, and the plan is for {asked.gpu}'
    if unsteady := sorted({one.point.num_gpus for one in results if one.status != 'measured'}):
        yield f'the rows of {", ".join(map(str, unsteady))} GPUs were not steady'


def _rows_text(results: Sequence[Result]) -> str:
    if not results:
        return 'it has no rows of benchmarks.throughput'
    counts: dict[str, int] = {}
    for one in results:
        network, resolution, kind, num_gpus = (one.text(key) or 'unknown' for key in ('unet', 'resolution', 'kind', 'num_gpus'))
        what = f'network {network}, {resolution} px, {kind}, {num_gpus} GPU{"" if num_gpus == "1" else "s"}: {one.status}'
        counts[what] = counts.get(what, 0) + 1
    return 'it has ' + '; '.join(f'{what} ({counted(count, "row")})' if count > 1 else what for what, count in counts.items())
