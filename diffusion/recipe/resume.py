"""Which fields of a recipe may differ when a run goes on.

Composer takes the optimizer's settings and the data order of a resumed run from its checkpoint, and everything else from the
recipe: a changed learning rate would be recorded and never used, a changed objective used halfway. So what shapes the result
must stay; what does not may change.
"""

from __future__ import annotations

from fnmatch import fnmatch
from typing import Any

from diffusion.recipe.load import RecipeError, recipe_from_yaml, to_dict
from diffusion.recipe.schema import Recipe

MAY_CHANGE = (
    'name',
    'run_folder',
    'load_path',
    'train.duration',  # unless the learning rate falls towards the end of it
    'train.compile',
    'train.attention',
    'train.cudnn_benchmark',
    'train.checkpoint_activations',
    'train.sharding',
    'train.cpu_threads',
    'ema.offload',
    'batch.micro_size',
    'data.streams.*.remote',
    'data.streams.*.local',
    'data.workers',
    'data.predownload',
    'data.cache_limit',
    'data.verify',
    'data.timeout_sec',
    'data.max_bad_samples',
    'eval.*',
    'checkpoint.*',
    'faults.*',
    'log.*',
    'cost.*',
)


def changed_fields(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """`optimizer.lr: 0.0001 -> 0.001` for every field that differs and may not; recipes as plain dictionaries."""
    old, new = ({**_flat(recipe), 'data.streams': sorted(recipe['data']['streams'])} for recipe in (before, now))
    allowed = [pattern for pattern in MAY_CHANGE if pattern != 'train.duration' or now['optimizer']['decay'] == 'constant']
    return [
        f'{path}: {old.get(path)} -> {new.get(path)}'
        for path in sorted({**old, **new})
        if old.get(path) != new.get(path) and not any(fnmatch(path, pattern) for pattern in allowed)
    ]


def refuse_changes(recipe: Recipe, begun_with: str) -> None:
    """Raise RecipeError if going on with `recipe` would not continue the run whose resolved recipe is `begun_with`, as YAML.

    A field that is younger than the run has its default there, which stands for what was done before it existed.
    """
    changes = changed_fields(to_dict(recipe_from_yaml(begun_with, recipe.run_folder)), to_dict(recipe))
    if changes:
        remedy = f'undo it, or train another run from these weights: name=NEW load_path={recipe.run_folder}'
        raise RecipeError(f'{recipe.run_folder} was begun with another recipe; {remedy}', changes)


def _flat(section: dict[str, Any], prefix: str = '') -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for key, value in section.items():
        fields |= _flat(value, f'{prefix}{key}.') if isinstance(value, dict) else {f'{prefix}{key}': value}
    return fields
