"""Sweeps and their points: a point is a recipe, the `key=value` that measure it, and a place to run it.

A sweep is a YAML file (benchmarks/sweeps/), read as strictly as a recipe (loading.py). `grid` names axes with their values, and every combination is
a point; `points` is a list of settings that belong together, each of which is measured with every combination of the grid. An axis is a key of the
recipe, such as `batch.micro_size`, or one of PLACES.
"""

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.sweeping.launching import DEFAULT_LAUNCHER, PLACEHOLDERS
from diffusion.common.text import counted, did_you_mean
from diffusion.contracts.errors import ManifestError
from diffusion.cost.facts import known_images
from diffusion.cost.hardware import PEAK_FLOPS, gpu_name
from diffusion.recipe import Recipe
from diffusion.recipe.keys import MISSING, key

PLACES = ('num_gpus', 'num_nodes', 'gpus_per_node')  # where a point runs; on a CPU a GPU is a process
ON_CPU = 'cpu'  # a sweep's `hardware`: this machine's
NEVER = '1000000000ba'  # the measurement ends a run, not its duration: warm-up, EMA and schedule are those of the recipe's first steps

# Set by `measuring`; a sweep that sets one too would be overruled silently, so it is refused.
DECIDED = ('run_folder', 'load_path', 'train.duration', 'data.synthetic_samples', 'eval', 'checkpoint', 'log')


SECTIONS = ('model.', 'data.', 'batch.', 'train.')  # of a recipe; what they hold is clear without them


def label(settings: Mapping[str, Any]) -> str:
    """Describe a point by the axes of its sweep: `num_gpus=2, resolution=256, ema.half_life=null`, or `the recipe` if it has none."""
    names = {key: next((key.removeprefix(section) for section in SECTIONS if key.startswith(section)), key) for key in settings}
    return ', '.join(f'{names[key]}={as_yaml(value)}' for key, value in settings.items()) or 'the recipe'


def as_yaml(value: Any) -> str:
    """Write a value as a sweep file has it."""
    return value if isinstance(value, str) else json.dumps(value)


@dataclass
class Method:
    """How a point is measured."""

    warmup_steps: int = key(20, 'Steps left out at first, rounded up to whole windows.', low=1, high=10**6)
    windows: int = key(4, 'Least number of windows that a rate is taken from.', low=2, high=1000)
    steps_per_window: int = key(50, 'Steps between two synchronizations with the GPU, and between two records of the log.', low=1, high=10**5)
    steady_within: float = key(0.05, 'Windows are steady if none is further from their median than this share of it.', low=0, high=1)
    max_steps: int = key(1000, 'Steps after which a point that is not steady ends all the same, the first ones included.')

    @property
    def first_boundary(self) -> int:
        """The step that the first window begins after."""
        return -(-self.warmup_steps // self.steps_per_window) * self.steps_per_window


@dataclass
class Sweep(Method):
    """A sweep file."""

    name: str = key('', "Of the sweep; the file's name if it is left out.")
    recipe: str = key(MISSING, 'The recipe that is varied.', remedy='name the recipe that is varied, relative to this file')
    set: dict[str, Any] = key(dict, 'Keys of the recipe, or places, for every point.')
    grid: dict[str, Any] = key(dict, 'Axes and their values: every combination is a point, the last axis changing fastest.')
    points: list[Any] = key(list, 'Settings that belong together; each is measured with every combination of the grid, in this order.')
    stand_in_encoders: bool = key(False, "Random encoders of the right sizes in the place of the recipe's: nothing is downloaded.")
    hardware: str | None = key(
        None,
        'What the points run on, if the launcher takes them elsewhere, such as `a100-80gb`; `cpu`: no GPU, if this machine has one; null: this one.',
    )
    interconnect: str | None = key(
        None, 'What joins the nodes, in words, for the rows and the report; nothing else tells two clusters of the same GPU apart.'
    )
    launcher: str = key(DEFAULT_LAUNCHER, f'Command line that runs a point and waits for its end; filled in are {", ".join(PLACEHOLDERS)}.')
    time_limit_sec: float = key(900.0, 'For a point, including its start and its wait in a queue; then it is stopped.', low=1, high=7 * 86400)
    attempts: int = key(1, 'Times that a point is started which crashes, as one does that loses a node.', low=1, high=10)


@dataclass(frozen=True)
class Place:
    """Processes of a point; on a CPU they count as GPUs."""

    num_gpus: int
    num_nodes: int
    gpus_per_node: int


@dataclass(frozen=True)
class Point:
    """One measurement.

    Args:
        settings: what tells it from the other points.
        path: of the recipe that it varies.
        overrides: of that recipe, as a command line has them.
        recipe: the two together, as `train.py` would load them, before anything is DECIDED.
    """

    settings: dict[str, Any]
    place: Place
    path: Path
    overrides: Sequence[str]
    recipe: Recipe

    @property
    def label(self) -> str:
        return label(self.settings)

    def command(self, method: Method, run_folder: Path, encoders: Path | None) -> list[str]:
        """Return the recipe and the `key=value` of its measurement, for `train.py`."""
        where = {'run_folder': str(run_folder), **({'model.encoders.source': str(encoders)} if encoders else {})}
        return [str(self.path.resolve()), *self.overrides, *as_overrides({**measuring(self.recipe, method), **where})]

    def identity(self, sweep: Sweep, hardware: str) -> str:
        """Return 12 hex digits, equal for what would be the same measurement: on any day, in any folder, started in any way."""
        recipe = {key: value for key, value in leaves(dataclasses.asdict(self.recipe)) if not is_decided(key)}
        method = {item.name: getattr(sweep, item.name) for item in dataclasses.fields(Method)}
        what = [recipe, self.settings, dataclasses.asdict(self.place), method, sweep.stand_in_encoders, hardware]
        what += [sweep.interconnect] if sweep.interconnect else []
        return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:12]


def measuring(recipe: Recipe, method: Method) -> dict[str, Any]:
    """Return the settings that give a recipe no end, and leave out evaluation, images, checkpoints and what outlives the run. All are DECIDED."""
    return {
        'load_path': None,
        'train.duration': NEVER,
        # An epoch longer than the measurement: its end would be an artefact of data that are not there.
        'data.synthetic_samples': recipe.batch.global_size * (method.max_steps + 1),
        'eval.every': None,
        **{f'eval.streams.{name}': None for name in recipe.eval.streams},
        'checkpoint.folder': '${run_folder}/checkpoints',
        'checkpoint.every': NEVER,
        'checkpoint.keep_every': None,
        'log.every': method.steps_per_window,
        'log.to': [],
        'log.project': None,
        'log.samples.every': None,
    }


def is_decided(key: str) -> bool:
    """Whether a dotted key is one of DECIDED or inside one."""
    return any(f'{key}.'.startswith(f'{decided}.') for decided in DECIDED)


def as_overrides(settings: Mapping[str, Any]) -> list[str]:
    """Return settings as a command line has them."""
    return [f'{key}={json.dumps(value)}' for key, value in settings.items()]


def leaves(mapping: Any, prefix: str = '') -> Iterator[tuple[str, Any]]:
    """Yield the values of a nested mapping by their dotted keys."""
    for name, value in mapping.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f'{prefix}{name}.')
        else:
            yield f'{prefix}{name}', value


def place_of(settings: Mapping[str, Any]) -> Place:
    """Return where a point runs, from any of PLACES; one that is not given is 1, or follows from the others.

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
    """Warn of each point whose data is known to have shorter epochs than `max_steps`: the change from one to the next may be measured."""
    warnings = []
    for point in points:
        try:
            num_images = known_images(point.recipe)
        except ManifestError:  # the point will be refused
            continue
        global_size = point.recipe.batch.global_size
        if point.recipe.data.kind != 'synthetic' and num_images is not None and num_images // global_size < max_steps:
            warnings.append(
                f'{point.label}: {num_images:,} samples are epochs of {num_images // global_size} steps and max_steps is {max_steps}, so the change '
                f'of epochs may be measured too; take {max_steps * global_size:,} samples or more, a smaller batch.global_size or fewer max_steps'
            )
    return warnings


def unknown_hardware(sweep: Sweep) -> list[str]:
    """Warn if `hardware` is no GPU of cost/hardware.py: it may be another one, or a typing error, for which all points would be measured again."""
    name = sweep.hardware
    if name in (None, ON_CPU) or gpu_name(name, PEAK_FLOPS):
        return []
    known = sorted(PEAK_FLOPS)
    hint = did_you_mean(name.lower(), known)
    return [f"hardware: no GPU '{name}' is known{hint} It is used unchanged, and tells these rows from others. Known: {', '.join(known)}"]
