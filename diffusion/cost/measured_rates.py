"""A series of images per second from a file of benchmarks.throughput: the rows that are most like a recipe, and their differences from it."""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from diffusion.common.text import counted
from diffusion.cost.facts import Cluster, Facts
from diffusion.cost.hardware import gpu_name
from diffusion.cost.rates import RateError, RateSource, points_and_laws, wanted
from diffusion.cost.results import Result, ResultError, gpus_per_node, read_results
from diffusion.cost.scaling import ScalingLaws
from diffusion.recipe import AnyRecipe
from diffusion.recipe.averaging import profiles

ALIKE = ('precision', 'compile', 'checkpoint_activations', 'ema')  # in all rows of a series; sharding and micro-batch change with the number of GPUs


def series_of_file(path: Path, facts: Facts, cluster: Cluster) -> RateSource:
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
    recipe, kinds = facts.recipe, ('images',) if facts.encodes_images else ('latents', 'synthetic')
    by_setting: dict[str, list[Result]] = {}  # a law goes through rows that differ in the number of GPUs, and what it asks for
    for result in results.throughput:
        is_same = (result.text('network'), result.count('resolution')) == (recipe.trained_network, facts.resolution)
        if result.is_rated and is_same and result.text('kind') in kinds:
            by_setting.setdefault(json.dumps([result.row.get(key) for key in ('device', 'interconnect', *ALIKE)]), []).append(result)
    if not by_setting:
        raise RateError(f'--throughput {path}: has no measured row for {wanted(facts, cluster.gpu)}; {_rows_text(results.throughput)}')

    def rank(series: list[Result]) -> tuple[Any, ...]:
        points = [result.point for result in series]
        return (
            gpu_name(_device(series[0])) == cluster.gpu,
            _likeness(series[0], recipe)[: len(ALIKE)],
            len({point.num_gpus for point in points if point.global_size == recipe.batch.global_size}),
            len({point.num_gpus for point in points}),
            max(point.images_per_sec / point.num_gpus for point in points),
        )

    def preference(result: Result) -> tuple[Any, ...]:
        return result.status == 'measured', _likeness(result, recipe), result.point.images_per_sec

    best: dict[tuple[int, int], Result] = {}
    for result in max(by_setting.values(), key=rank):
        place = result.point.num_gpus, result.point.global_size
        if place not in best or preference(result) > preference(best[place]):
            best[place] = result
    best = dict(sorted(best.items()))
    dates = sorted({result.text('date')[:10] or '?' for result in best.values()})
    devices = ', '.join(sorted({_device(result) for result in best.values()}))
    warnings = [f'{path}: {text}' for text in _differences(list(best.values()), facts, cluster.gpu)]
    if results.num_unread:
        warnings.append(f'{path}: lines that could not be read, as a kill leaves them: {results.num_unread}')
    name = f'{path} ({devices}; {dates[0]}{f" to {dates[-1]}" if len(dates) > 1 else ""})'
    laws = ScalingLaws(points=tuple(result.point for result in best.values()), gpus_per_node=gpus_per_node(best.values(), cluster.gpus_per_node))
    return points_and_laws(laws, 'measured', name, recipe.batch.global_size, warnings, best)


def _settings(recipe: AnyRecipe) -> dict[str, Any]:
    """What rows are compared by, ALIKE first, as in the recipe."""
    settings = {key: getattr(recipe.train, key) for key in ('precision', 'compile', 'checkpoint_activations')}
    return settings | {'ema': bool(profiles(recipe.ema)), 'sharding': recipe.train.sharding, 'micro_size': recipe.batch.micro_size}


def _likeness(result: Result, recipe: AnyRecipe) -> tuple[bool, ...]:
    """Which settings are as in the recipe."""
    return tuple(result.row.get(key) == value for key, value in _settings(recipe).items())


def _device(result: Result) -> str:
    return result.text('device') or 'an unknown device'


def _differences(results: Sequence[Result], facts: Facts, gpu: str) -> Iterator[str]:
    """Yield what a reader must know of rows that are not exactly as the recipe."""
    name, batch = facts.name, facts.recipe.batch.global_size
    for key, value in _settings(facts.recipe).items():
        other = sorted({str(one.row.get(key)) for one in results if one.row.get(key) != value and not (key == 'micro_size' and value == 'auto')})
        if other:
            yield f'measured with {key} {" and ".join(other)}, {name} has {value}'
    same_batch = {one.point.num_gpus for one in results if one.point.global_size == batch}
    if elsewhere := sorted({one.point.num_gpus for one in results} - same_batch):
        sizes = ' and '.join(f'{size:,}' for size in sorted({one.point.global_size for one in results if one.point.num_gpus in elsewhere}))
        yield f'measured on {", ".join(map(str, elsewhere))} GPUs with a global batch of {sizes}, {name} has {batch:,}: predicted for it'
    if devices := sorted({_device(one) for one in results if gpu_name(_device(one)) != gpu}):
        yield f'measured on {", ".join(devices)}, and the plan is for {gpu}'
    if unsteady := sorted({one.point.num_gpus for one in results if one.status != 'measured'}):
        yield f'the rows of {", ".join(map(str, unsteady))} GPUs were not steady'


def _rows_text(results: Sequence[Result]) -> str:
    if not results:
        return 'it has no rows of benchmarks.throughput'
    rows = []
    for one in results:
        network, resolution, kind, num_gpus = (one.text(key) or 'unknown' for key in ('network', 'resolution', 'kind', 'num_gpus'))
        rows.append(f'network {network}, {resolution} px, {kind}, {num_gpus} GPU{"" if num_gpus == "1" else "s"}: {one.status}')
    return 'it has ' + '; '.join(f'{row} ({counted(count, "row")})' if count > 1 else row for row, count in Counter(rows).items())
