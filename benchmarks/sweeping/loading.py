"""A sweep file and the changes of the command line -> checked points, or all errors at once, before anything is run."""

import dataclasses
import itertools
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.sweeping.launching import wrong_template
from benchmarks.sweeping.sweep import PLACES, Point, Sweep, as_overrides, as_yaml, is_decided, label, leaves, place_of
from diffusion.common.text import closest
from diffusion.recipe import Recipe, RecipeError, load_recipe
from diffusion.recipe.keys import first_unknown, suggestion
from diffusion.recipe.merging import merge
from diffusion.recipe.reading import file_layers, override_layers

MAX_POINTS = 2000  # weeks of measurements, and more than a minute of checks
ALIKE = 0.75  # least likeness (0..1) of a key and what is suggested for it

STAND_IN = {'model.encoders.source': '.', 'model.encoders.revision': None}  # any folder, until the stand-ins are written

OTHERWISE = f'; known are {", ".join(PLACES)} and the keys of a recipe'
FIELDS = tuple(item.name for item in dataclasses.fields(Sweep))

tqdm.monitor_interval = 0  # its thread, which comes with the first bar, and the forks of the launcher do not go together


def load_sweep(path: Path, overrides: Sequence[str] = ()) -> tuple[Sweep, list[Point]]:
    """Read a sweep and check all of its points; a bar on stderr if that takes long.

    Args:
        overrides: `key=value`: of the sweep itself, such as `time_limit_sec=60` or `grid.num_gpus=[4]`, which replaces or adds an axis, or else of
            the recipe of every point, which the grid and the points must not name.

    Raises:
        RecipeError: with everything that is wrong in the file and in the recipe of any point; if a file cannot be read, with that alone.
    """
    errors: list[str] = []
    layers = file_layers(path, errors)
    if errors:  # all else would follow from them
        raise RecipeError(str(path), errors)
    settings: dict[str, Any] = {}
    given: dict[str, Any] = {}  # settings of the command line
    grid: dict[str, Any] = {}
    for origin, layer in layers:
        # Taken out before they are merged, which would bring the axes of a section together: their order is that of the points.
        settings |= _flat(layer, 'set', errors)
        grid = _flat(layer, 'grid', errors) or grid
        errors += _strangers(layer, origin)
    for origin, layer in override_layers(overrides, errors):
        head = str(next(iter(layer)))
        if head == 'grid':
            grid = grid | axes if (axes := _flat(layer, 'grid', errors)) else {}  # grid=null: no axes
        elif head == 'set':
            own = _flat(layer, 'set', errors)
            given |= own
            settings = settings if own else {}  # set=null: those of the file are left out
        elif head in FIELDS:
            layers.append((origin, layer))
        else:
            given |= dict(leaves(layer))
    sweep: Sweep = merge(Sweep, layers, errors)
    if errors:
        raise RecipeError(str(path), errors)
    sweep.name, sweep.set, sweep.grid = sweep.name or path.stem, settings | given, grid
    recipe = path.parent / sweep.recipe
    file_layers(recipe, unread := list[str]())
    errors = [*_unsound(sweep), *(f'recipe: {error}' for error in unread), *(_unsound_axes(sweep) or _overruled(given, sweep))]
    if errors:
        raise RecipeError(str(path), errors)
    return sweep, _points(sweep, path, recipe, _unknown(given, sweep))


def _points(sweep: Sweep, path: Path, recipe: Path, unknown: Mapping[str, str]) -> list[Point]:
    """Args: unknown: an error for each key that is not looked at any more."""
    points: list[Point] = []
    wrong: dict[str, list[str]] = {}  # the labels of the points, by error
    combinations = list(_combinations(sweep))
    for settings in tqdm(combinations, desc='checking', unit='point', delay=1, mininterval=0.5, leave=False):
        try:
            points.append(_point(sweep, recipe, settings, unknown))
        except ValueError as error:
            for line in error.errors if isinstance(error, RecipeError) else [str(error)]:
                wrong.setdefault(line.replace(' (command line)', ''), []).append(label(settings))
    errors = [*unknown.values(), *(f'{error} [{_where(names, len(combinations))}]' for error, names in wrong.items())]
    seen = set[str]()
    for settings in combinations:
        text = json.dumps(settings, sort_keys=True)
        if text in seen:
            errors.append(f'the point {label(settings)} is there twice')
        seen.add(text)
    if errors:
        raise RecipeError(str(path), list(dict.fromkeys(errors)))
    return points


def _point(sweep: Sweep, path: Path, settings: dict[str, Any], unknown: Iterable[str]) -> Point:
    place = place_of({**sweep.set, **settings})
    own = {key: value for key, value in {**sweep.set, **settings}.items() if key not in PLACES and key not in unknown}
    overrides = as_overrides({**own, 'load_path': None, **(STAND_IN if sweep.stand_in_encoders else {})})
    return Point(settings, place, path, overrides, load_recipe(path, overrides, place.num_gpus))


def _combinations(sweep: Sweep) -> Iterator[dict[str, Any]]:
    for point in sweep.points or [{}]:
        for values in itertools.product(*sweep.grid.values()):
            yield {**dict(leaves(point)), **dict(zip(sweep.grid, values, strict=True))}


def _unsound(sweep: Sweep) -> list[str]:
    errors = []
    needed = sweep.first_boundary + sweep.windows * sweep.steps_per_window
    if sweep.max_steps < needed:
        errors.append(
            f'max_steps: {sweep.max_steps} is less than warmup_steps in whole windows, {sweep.first_boundary}, and {sweep.windows} windows of '
            f'{sweep.steps_per_window} steps; set max_steps={needed} or more'
        )
    if not re.fullmatch(r'[\w.-]+', sweep.name):
        errors.append(f"name: '{sweep.name}' names a folder; use letters, digits, dots and dashes")
    return [*errors, *(f'launcher: {error}' for error in wrong_template(sweep.launcher))]


def _unsound_axes(sweep: Sweep) -> list[str]:
    no_lists = {key: value for key, value in sweep.grid.items() if not isinstance(value, list) or not value}
    errors = [f'grid.{key}: {as_yaml(value)} is not a list of values; write [1, 2] or the like' for key, value in no_lists.items()]
    errors += [f'points: {as_yaml(point)} is not a mapping of keys to values' for point in sweep.points if not isinstance(point, dict) or not point]
    if errors:
        return errors
    factors = [len(sweep.points or [{}]), *map(len, sweep.grid.values())]
    if math.prod(factors) > MAX_POINTS:
        product = ' x '.join(f'{factor:,}' for factor in factors[0 if sweep.points else 1 :])
        return [f'grid: {product} are {math.prod(factors):,} points, and a sweep has at most {MAX_POINTS:,}; leave out values, or split it']
    in_points = {key for point in sweep.points for key, _ in leaves(point)}
    errors += [f'{key}: is an axis of the grid and named in points; leave it out of one' for key in sorted(in_points & set(sweep.grid))]
    axes = {*sweep.grid, *in_points}
    for key in sorted({*sweep.set, *axes}):
        if is_decided(key):
            errors.append(f'{key}: the sweep decides it, so that nothing but training is measured; leave it out')
        if sweep.stand_in_encoders and key.startswith('model.encoders'):
            errors.append(f'{key}: has no effect with stand_in_encoders; leave out one of them')
    return errors


def _overruled(given: Mapping[str, Any], sweep: Sweep) -> list[str]:
    """Return an error for each setting of the command line that the grid or a point would overrule."""
    errors = []
    for key, value in given.items():
        for axis in sweep.grid:
            if _touch(key, axis):
                errors.append(f'{key}: the grid has the axis {axis}, which overrules the command line; write grid.{axis}=[{as_yaml(value)}]')
        own = [label(dict(leaves(point))) for point in sweep.points if any(_touch(key, name) for name, _ in leaves(point))]
        if own:
            errors.append(f'{key}: {len(own)} of {len(sweep.points)} points overrule the command line; change them in the file [{_some(own)}]')
    return errors


def _unknown(given: Mapping[str, Any], sweep: Sweep) -> dict[str, str]:
    """Return an error for each key of the settings that is neither one of PLACES nor of a recipe, by the key."""
    sections: dict[str, str] = {key: 'points: ' for point in sweep.points for key, _ in leaves(point)}
    sections |= dict.fromkeys(sweep.grid, 'grid.') | {key: '' if key in given else 'set.' for key in sweep.set}
    errors = {}
    for key, section in sections.items():
        head, _, tail = key.partition('.')
        if _is_known(key):
            continue
        if key in FIELDS:
            errors[key] = f'{section}{key}: belongs to the sweep itself and is the same for all points; write it next to {section.rstrip(".: ")}'
            continue
        own = closest(head, [*PLACES, *(FIELDS if key in given else ())], ALIKE)
        if own and tail and _is_known(tail):
            own = f'{own}.{tail}'
        errors[key] = f'{section}{key}: unknown key' + (f"; did you mean '{own}'?" if own else suggestion(Recipe, key) or OTHERWISE)
    return errors


def _strangers(layer: dict[Any, Any], origin: str) -> Iterator[str]:
    """Yield an error for each key of a file that no sweep has, and take it out."""
    for key in [key for key in layer if key not in FIELDS]:
        inner, _ = next(leaves({key: layer[key]}))
        place = inner if _is_known(str(inner)) else closest(inner, PLACES, ALIKE)
        meant = closest(str(key), FIELDS, ALIKE) or (f'set.{place}' if place else None)
        yield f'{key!s}: unknown key ({origin})' + (f"; did you mean '{meant}'?" if meant else '')
        del layer[key]


def _is_known(key: str) -> bool:
    """Whether it is one of PLACES or of a recipe, whatever its value; names of streams and the like are free."""
    return key in PLACES or not first_unknown(Recipe, tuple(key.split('.')))


def _touch(key: str, other: str) -> bool:
    """Whether two dotted keys are the same, or one is inside the other."""
    return f'{key}.'.startswith(f'{other}.') or f'{other}.'.startswith(f'{key}.')


def _flat(layer: dict[Any, Any], name: str, errors: list[str]) -> dict[str, Any]:
    """Take a section out of a layer and return it by dotted keys, whether they are written so or nested."""
    value = layer.pop(name, None)
    if value is None:
        return {}
    if not isinstance(value, dict):
        errors.append(f'{name}: {as_yaml(value)} is not a mapping of keys to values')
        return {}
    return dict(leaves(value))


def _where(names: Sequence[str], total: int) -> str:
    return 'at every point' if len(names) == total > 1 else _some(names)


def _some(names: Sequence[str]) -> str:
    return names[0] + (f' and {len(names) - 1} more point{"s" if len(names) > 2 else ""}' if len(names) > 1 else '')
