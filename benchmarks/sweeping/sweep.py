"""What a sweep may say, and what a point of it is: a recipe, ready to be measured, in a place.

A sweep is a YAML file (benchmarks/sweeps/), read as strictly as a recipe (loading.py). `grid` names axes with their values, and every combination is
a point; `points` is a list of settings that belong together, each of which is measured with every combination of the grid. An axis is a key of the
recipe, such as `batch.micro_size`, or one of PLACES.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from benchmarks.sweeping.launching import DEFAULT_LAUNCHER
from diffusion.common.text import counted, did_you_mean
from diffusion.contracts.manifest import ManifestError
from diffusion.cost.facts import known_images
from diffusion.cost.hardware import MEMORY_GB, PEAK_FLOPS, gpu_name
from diffusion.cost.results import label
from diffusion.recipe import Duration, Recipe
from diffusion.recipe.keys import key
from diffusion.recipe.schema import Checkpoint, Eval, Log

PLACES = ('num_gpus', 'num_nodes', 'gpus_per_node')  # where a point runs; on a CPU a GPU is a process
ON_CPU = 'cpu'  # a sweep's `hardware`: this machine's
LONGEST_LOADING = 3  # times loader_sec: at most 2 until what was prepared is used up, then 1 that is measured (measuring.loader_images_per_sec)
FOREVER = Duration('1000000000ba')  # the measurement ends a run, not its duration: so warm-up, EMA and schedule are those of the recipe's first steps

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
    recipe: str = key(MISSING, 'The recipe that is varied.', remedy='name the recipe that is varied, relative to this file')
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
        recipe = dataclasses.asdict(self.recipe)  # resolved, and 100 times as fast as to_dict
        what = [recipe, self.settings, dataclasses.asdict(self.place), dataclasses.asdict(sweep.method), sweep.stand_in_encoders, hardware]
        what += [sweep.interconnect] if sweep.interconnect else []
        return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:12]


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
    for name, value in given.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f'{name}: {value!r} is not a whole number of at least 1')
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
        raise ValueError(f'num_gpus: {total} is not {counted(nodes, "node")} x {counted(per_node, "GPU")} (num_nodes, gpus_per_node); {remedy}')
    return Place(total, nodes, per_node)


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


def unknown_hardware(sweep: Sweep) -> list[str]:
    """A warning if `hardware` is no GPU of cost/hardware.py: it may be another one, or a slip, for which all points would be measured again."""
    name = sweep.hardware
    if name in (None, ON_CPU) or gpu_name(name) or gpu_name(name, PEAK_FLOPS):
        return []
    known = sorted({*MEMORY_GB, *(gpu.lower().replace(' ', '-') for gpu in PEAK_FLOPS)})
    hint = did_you_mean(name.lower(), known)
    return [f"hardware: no GPU '{name}' is known{hint} It is taken as it is, and tells these rows from others. Known: {', '.join(known)}"]
