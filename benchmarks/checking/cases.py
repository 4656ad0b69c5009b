"""The structure of a GPU check: parts, each a list of cases, each of which becomes one row. No torch."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

Values: TypeAlias = dict[str, Any]
"""The result of a case, which becomes part of its row. Two keys have a meaning:

checks       {what: [value, limit]}: wrong if the value is above the limit, or NaN. Equality is a count of differences, with the limit 0.
predicted    {key of the row: [low, high]}: computed, not looked up in predictions.yaml; null where there is no such bound.
"""


class NotHere(Exception):
    """The case means nothing on this machine, or something it needs is missing; the message says what."""


def require_gpu(why: str = '') -> None:
    """Raises NotHere: there is no GPU."""
    from benchmarks.timing import on_gpu  # imports torch, as the cases do

    if not on_gpu():
        raise NotHere(f'needs a GPU{why}')


@dataclass(frozen=True)
class Setting:
    """The setting of all cases.

    Args:
        tiny: small enough for a CPU; numbers then say nothing about speed.
        work: folder for everything that need not be kept: encoders, runs, logs.
        images: beginning of the paths of images to keep, next to the rows.
    """

    tiny: bool
    work: str
    images: str

    @property
    def network(self) -> str:
        return 'tiny' if self.tiny else 'sd2-base'

    @property
    def micro_batch(self) -> dict[int, int]:
        """Images of a step, by resolution in pixels: the two phases of the shipped recipes."""
        return {32: 4, 64: 2} if self.tiny else {256: 128, 512: 32}

    @property
    def folder(self) -> Path:
        return Path(self.work)

    def encoders(self, network: str | None = None) -> Path:
        """Return the folder of stand-in encoders of a network (default: that of the setting); they are written if they are not there."""
        folder = self.folder / f'encoders-{network or self.network}'
        if not folder.exists():
            from diffusion.encoders.random_encoders import write_stand_in

            write_stand_in(folder, network or self.network)
        return folder

    @property
    def first_px(self) -> int:
        """The resolution of the recipes' first phase."""
        return min(self.micro_batch)

    def sec(self, planned_sec: float) -> float:
        """Planned seconds of a case, given those on an H200; the tiny form takes a few, whatever the case."""
        return min(planned_sec, 5.0) if self.tiny else planned_sec


@dataclass(frozen=True)
class Case:
    """One row.

    Args:
        name: unique in its part.
        planned_sec: a slice with less time left does not begin it.
    """

    name: str
    measure: Callable[[], Values]
    planned_sec: float = 5.0

    def limit_sec(self, slice_sec: float) -> float:
        """After which it is given up. Less than a slice: a case that never ends would otherwise be begun in every slice."""
        return min(2 * self.planned_sec + 60, 0.8 * slice_sec)


@dataclass(frozen=True)
class CheckPart:
    """Cases that share a process.

    Args:
        cases: `module:function` of a function that takes a Setting and returns the list of cases.
        planned_sec: on an H200, with nothing in the caches.
    """

    name: str
    cases: str
    planned_sec: float
    about: str


# In the order of what they tell: a GPU that is taken away early has told the most.
PARTS = (
    CheckPart('ceilings', 'benchmarks.checking.ceilings:ceilings', 20, 'matrix product and copy, which everything else is held against'),
    CheckPart('correctness', 'benchmarks.checking.correctness:cases', 150, 'noise, gradients, optimizer, average and encoders against the CPU'),
    CheckPart('headline', 'benchmarks.checking.steps:headline', 320, 'images/s of train.py at both resolutions'),
    CheckPart('profile', 'benchmarks.checking.steps:profile', 120, "where a step's time goes, and its 20 heaviest kernels"),
    CheckPart('training', 'benchmarks.checking.training:cases', 240, 'the Trainer: host waits, each of its ways, checkpoint and resume'),
    CheckPart('memory', 'benchmarks.checking.memory:cases', 150, 'measured against the prediction; `batch.micro_size: auto`'),
    CheckPart('optimizer', 'benchmarks.checking.ceilings:once_a_step', 40, 'clipping, AdamW and the average of the weights'),
    CheckPart('demo', 'benchmarks.checking.demo:cases', 200, 'the whole path on drawn shapes, trained here'),
)  # fmt: skip
