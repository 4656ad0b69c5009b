"""What a sweep may say, and its points: each a recipe, checked before anything is run.

A sweep is a YAML file (benchmarks/sweeps/), read as strictly as a recipe. `grid` names axes with their values, and every combination is a point;
`points` is a list of settings that belong together, each of which is measured with every combination of the grid. An axis is a key of the recipe,
such as `batch.micro_size`, or one of PLACES.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import MISSING, DictConfig, OmegaConf

from benchmarks.sweeping.launching import DEFAULT_LAUNCHER, wrong_template
from diffusion.cost.results import as_yaml, label
from diffusion.datasets.manifest import ManifestError
from diffusion.planning.facts import known_images
from diffusion.recipe import Recipe, RecipeError, load_recipe, to_dict
from diffusion.recipe.schema import Checkpoint, Eval, Log
from diffusion.strict_yaml import file_layers, merge, override_layers

PLACES = ('num_gpus', 'num_nodes', 'gpus_per_node')  # where a point runs; on a CPU a GPU is a process
LONGEST_LOADING = 3  # times loader_sec: at most 2 until what was prepared is used up, then 1 that is measured (measuring.loader_images_per_sec)
FOREVER = '1000000000ba'  # the measurement ends a run, not its duration: so warm-up, EMA and schedule are those of the recipe's first steps

# What `for_measuring` sets; a sweep that sets it too would be overruled without a word, so it is refused.
DECIDED = ('run_folder', 'load_path', 'train.duration', 'data.synthetic_samples', 'eval', 'checkpoint', 'log')


@dataclass
class Method:
    """How a point is measured: what its own process needs to know."""

    warmup_steps: int = 20
    """Steps left out at first, rounded up to whole windows, so that what the log fetches from the GPU is fetched between two windows."""
    windows: int = 4
    """Least number of windows that a rate is taken from."""
    steps_per_window: int = 50
    """Steps between two synchronisations with the GPU."""
    steady_within: float = 0.05
    """Windows are steady if none is further from their median than this share of it."""
    max_steps: int = 1000
    """Steps after which a point that is not steady ends all the same, the first ones included."""
    loader_sec: float = 10.0
    """How long the loader is then run alone; 0 leaves that out."""


@dataclass
class Sweep(Method):
    """A sweep file."""

    name: str = ''
    """Of the sweep; the file's name if it is left out."""
    recipe: str = MISSING
    """The recipe that is varied, relative to the sweep file."""
    set: dict[str, Any] = field(default_factory=dict)
    """Keys of the recipe, or places, for every point."""
    grid: dict[str, Any] = field(default_factory=dict)
    """Axes and their values: every combination is a point, the last axis changing fastest."""
    points: list[Any] = field(default_factory=list)
    """Settings that belong together; each is measured with every combination of the grid, in this order."""
    stand_in_encoders: bool = False
    """Random encoders of the right sizes in the place of the recipe's: nothing is downloaded."""
    hardware: str | None = None
    """What the points run on, if the launcher takes them elsewhere, such as `a100-80gb`; `cpu`: this machine's, and no GPU; null: this machine."""
    interconnect: str | None = None
    """What joins the nodes, in words, for the rows and the report; nothing else tells two clusters of the same GPU apart."""
    launcher: str = DEFAULT_LAUNCHER
    """Command line that runs a point and waits for its end; {num_gpus}, {num_nodes}, {gpus_per_node}, {python} and {command} are filled in."""
    time_limit_sec: float = 900.0
    """For a point, its start (and its wait in a queue) included; then it is stopped."""

    @property
    def method(self) -> Method:
        return Method(**{item.name: getattr(self, item.name) for item in dataclasses.fields(Method)})


@dataclass(frozen=True)
class Place:
    """Processes of a point; on a CPU they count as GPUs."""

    num_gpus: int
    num_nodes: int
    gpus_per_node: int


@dataclass(frozen=True)
class Point:
    """One measurement: a recipe, ready to be measured, in a place.

    Args:
        settings: what tells it from the other points.
        recipe: without folders and stand-in encoders, which the launching adds.
    """

    settings: dict[str, Any]
    place: Place
    recipe: Recipe

    @property
    def label(self) -> str:
        return label(self.settings)

    def identity(self, sweep: Sweep, hardware: str) -> str:
        """12 hex digits, equal for what would be the same measurement: on any day, in any folder, started in any way."""
        recipe = to_dict(self.recipe)
        what = [recipe, self.settings, dataclasses.asdict(self.place), dataclasses.asdict(sweep.method), sweep.stand_in_encoders, hardware]
        what += [sweep.interconnect] if sweep.interconnect else []
        return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:12]


def load_sweep(path: Path, overrides: Sequence[str] = ()) -> tuple[Sweep, list[Point]]:
    """Read a sweep and check all of its points.

    Args:
        overrides: `key=value`: of the sweep itself, such as `time_limit_sec=60`, or else of the recipe of every point.

    Raises:
        RecipeError: with everything that is wrong in the file and in the recipe of any point.
    """
    errors: list[str] = []
    fields = {item.name for item in dataclasses.fields(Sweep)}
    settings: dict[str, Any] = {}
    grid: dict[str, Any] = {}
    layers = file_layers(path, errors)
    for _, layer in layers:
        # Taken out before they are merged, which would bring the axes of a section together: their order is that of the points.
        settings |= _flat(layer, 'set', errors)
        grid = _flat(layer, 'grid', errors) or grid
    for origin, layer in override_layers(overrides, errors):
        if set(layer) <= fields:
            layers.append((origin, layer))
        else:
            settings |= dict(_leaves(OmegaConf.to_container(layer)))
    config = merge(Sweep, layers, errors, {'recipe': '; name the recipe that is varied, relative to this file'})
    if errors:
        raise RecipeError(str(path), errors)
    sweep = OmegaConf.to_object(config)
    assert isinstance(sweep, Sweep)
    sweep.name, sweep.set, sweep.grid = sweep.name or path.stem, settings, grid
    errors = [*_unsound(sweep), *_unsound_axes(sweep)]
    if errors:
        raise RecipeError(str(path), errors)
    return sweep, _points(sweep, path)


def for_measuring(recipe: Recipe, method: Method) -> Recipe:
    """The recipe without an end, and without what a measurement leaves out: evaluation, pictures, checkpoints and what outlives the run.

    The list of what it sets is DECIDED.
    """
    recipe.run_folder, recipe.load_path = '', None
    recipe.train.duration = FOREVER
    recipe.eval, recipe.checkpoint = Eval(), Checkpoint(folder='')
    recipe.log = Log(every=method.steps_per_window)
    # An epoch longer than the measurement: its end would be an artefact of data that are not there.
    recipe.data.synthetic_samples = recipe.batch.global_size * (method.max_steps + 1)
    return recipe


def place_of(settings: Mapping[str, Any]) -> Place:
    """Where a point runs, of any of PLACES; what is not said is one, or follows from the others.

    Raises:
        ValueError: they contradict each other.
    """
    given = {key: settings[key] for key in PLACES if settings.get(key) is not None}
    for key, value in given.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f'{key}: {value} is not a whole number of at least 1')
    total, nodes, per_node = (given.get(key) for key in PLACES)
    if total is None:
        total = (nodes or 1) * (per_node or 1)
    if nodes is None:
        per_node = min(per_node or total, total)
        nodes = total // per_node
    elif per_node is None:
        per_node = total // nodes
    if nodes * per_node != total:
        remedy = f'nearest: {max(1, total // per_node) * per_node}' if per_node else f'at least {nodes}'
        raise ValueError(f'num_gpus: {total} is not {nodes} nodes x {per_node} GPUs (num_nodes, gpus_per_node); {remedy}')
    return Place(total, nodes, per_node)


def _points(sweep: Sweep, path: Path) -> list[Point]:
    points: list[Point] = []
    wrong: dict[str, list[str]] = {}  # the labels of the points, by error
    for settings in _combinations(sweep):
        try:
            points.append(_point(sweep, path, settings))
        except RecipeError as error:
            for line in error.errors:
                wrong.setdefault(line.replace(' (command line)', ''), []).append(label(settings))
        except ValueError as error:
            wrong.setdefault(str(error), []).append(label(settings))
    total = len(points) + len({name for names in wrong.values() for name in names})
    errors = [f'{error} [{_where(names, total)}]' for error, names in wrong.items()]
    twice = {point.label for i, point in enumerate(points) if any(point == other for other in points[:i])}
    errors += [f'the point {name} is there twice' for name in sorted(twice)]
    if errors:
        raise RecipeError(str(path), errors)
    return points


def _point(sweep: Sweep, path: Path, settings: dict[str, Any]) -> Point:
    everything = {**sweep.set, **settings}
    place = place_of(everything)
    overrides = {'load_path': None, **{key: value for key, value in everything.items() if key not in PLACES}}
    if sweep.stand_in_encoders:  # a folder that is there: they are made when they are needed
        overrides |= {'model.encoders.source': '.', 'model.encoders.revision': None}
    recipe = load_recipe(path.parent / sweep.recipe, [f'{key}={json.dumps(value)}' for key, value in overrides.items()], place.num_gpus)
    stall_sec = recipe.faults.stall_sec
    if LONGEST_LOADING * sweep.loader_sec >= stall_sec:  # no step ends meanwhile, and the watchdog would end a point that was measured
        raise ValueError(
            f'loader_sec: {sweep.loader_sec:g} s may take {LONGEST_LOADING} x as long, and faults.stall_sec ends a point in which nothing moves for '
            f'{stall_sec} s; set loader_sec below {stall_sec / LONGEST_LOADING:g}, or faults.stall_sec above {LONGEST_LOADING * sweep.loader_sec:g}'
        )
    return Point(settings, place, for_measuring(recipe, sweep.method))


def _combinations(sweep: Sweep) -> Iterator[dict[str, Any]]:
    for point in sweep.points or [{}]:
        for values in itertools.product(*sweep.grid.values()):
            yield {**dict(_leaves(point)), **dict(zip(sweep.grid, values, strict=True))}


def _unsound(sweep: Sweep) -> list[str]:
    limits: dict[str, tuple[float, float, float]] = {
        'warmup_steps': (sweep.warmup_steps, 1, 10**6),
        'windows': (sweep.windows, 2, 1000),
        'steps_per_window': (sweep.steps_per_window, 1, 10**5),
        'steady_within': (sweep.steady_within, 0, 1),
        'loader_sec': (sweep.loader_sec, 0, 3600),
        'time_limit_sec': (sweep.time_limit_sec, 1, 7 * 86400),
    }
    errors = [f'{key}: {value:g} is outside {low:g} .. {high:g}' for key, (value, low, high) in limits.items() if not low <= value <= high]
    needed = first_boundary(sweep) + sweep.windows * sweep.steps_per_window if not errors else 0
    if sweep.max_steps < needed:
        errors.append(
            f'max_steps: {sweep.max_steps} is less than warmup_steps in whole windows, {first_boundary(sweep)}, and {sweep.windows} windows of '
            f'{sweep.steps_per_window} steps; set max_steps={needed} or more'
        )
    if not re.fullmatch(r'[\w.-]+', sweep.name):
        errors.append(f"name: '{sweep.name}' names a folder; use letters, digits, dots and dashes")
    return [*errors, *(f'launcher: {error}' for error in wrong_template(sweep.launcher))]


def _unsound_axes(sweep: Sweep) -> list[str]:
    no_lists = {key: value for key, value in sweep.grid.items() if not isinstance(value, list) or not value}
    errors = [f'grid.{key}: {as_yaml(value)} is not a list of values' for key, value in no_lists.items()]
    errors += [f'points: {as_yaml(point)} is not a mapping of keys to values' for point in sweep.points if not isinstance(point, dict) or not point]
    if errors:
        return errors
    in_points = {key for point in sweep.points for key, _ in _leaves(point)}
    errors += [f'{key}: is an axis of the grid and named in points; leave it out of one' for key in sorted(in_points & set(sweep.grid))]
    axes = {*sweep.grid, *in_points}
    for key in sorted({*sweep.set, *axes}):
        if any(key == decided or key.startswith(f'{decided}.') for decided in DECIDED):
            errors.append(f'{key}: the sweep decides it, so that nothing but training is measured; leave it out')
        if sweep.stand_in_encoders and key.startswith('model.encoders'):
            errors.append(f'{key}: has no effect with stand_in_encoders; leave out one of them')
    return errors


def ends_of_epochs(points: Sequence[Point], max_steps: int) -> list[str]:
    """A warning for each point whose data is known to have shorter epochs than `max_steps`: the change from one to the next may be measured."""
    warnings = []
    for point in points:
        try:
            num_images = known_images(point.recipe)
        except ManifestError:  # the point will be refused
            continue
        global_size = point.recipe.batch.global_size
        if num_images is not None and num_images // global_size < max_steps:
            warnings.append(
                f'{point.label}: {num_images:,} samples are epochs of {num_images // global_size} steps and max_steps is {max_steps}, so the change '
                f'of epochs may be measured too; take {max_steps * global_size:,} samples or more, a smaller batch.global_size or fewer max_steps'
            )
    return warnings


def first_boundary(method: Method) -> int:
    """The step that the first window begins after."""
    return -(-method.warmup_steps // method.steps_per_window) * method.steps_per_window


def _flat(layer: DictConfig, name: str, errors: list[str]) -> dict[str, Any]:
    """A section of a layer, taken out of it, by dotted keys, whether they are written so or nested."""
    value = OmegaConf.to_container(OmegaConf.create({name: layer.pop(name, None)}))[name]  # type: ignore[call-overload, index]
    if value is None:
        return {}
    if not isinstance(value, dict):
        errors.append(f'{name}: {as_yaml(value)} is not a mapping of keys to values')
        return {}
    return dict(_leaves(value))


def _leaves(mapping: Any, prefix: str = '') -> Iterator[tuple[str, Any]]:
    for key, value in mapping.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f'{prefix}{key}.')
        else:
            yield f'{prefix}{key}', value


def _where(names: Sequence[str], total: int) -> str:
    if len(names) == total:
        return 'at every point' if total > 1 else names[0]
    return names[0] + (f' and {len(names) - 1} more points' if len(names) > 1 else '')
