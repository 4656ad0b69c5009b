"""A study: a folder of recipes over one baseline, the data that they share, and the runs of each recipe and seed. No torch.

benchmarks/ablations/STUDY/baseline.yaml      the baseline, over a shipped recipe
benchmarks/ablations/STUDY/NAME.yaml          a method: `base: baseline.yaml`, and the keys that turn it on
OUT/data/DATA/                                train/, held-out/, encoders and features, made once: `${run_folder}/../../data/DATA` of a recipe
OUT/STUDY/NAME-SEED/                          the run folder of a recipe and seed
OUT/STUDY/NAME-time-ROUND/                    of the recipe's first batches alone, of which the table has the time of a batch
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from diffusion.common.stopwatch import EVENTS
from diffusion.contracts.errors import InputError, RunError
from diffusion.monitoring.report.run import EVAL, EVAL_LOSS
from diffusion.monitoring.time_accounts import read_events
from diffusion.recipe import Recipe, load_recipe, to_yaml
from diffusion.recipe.load import changed_fields

BASELINE = 'baseline'
PAGE = 'ablations.md'  # in docs/
# Batches alone, with an average of the weights where there is one; nothing is scored.
TIMING = (
    'train.duration=60ba', 'ema.start=0ba', 'checkpoint.every=60ba',
    'eval.every=null', 'eval.streams.held-out=null', 'eval.samples.every=null',
)  # fmt: skip
FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Criterion:
    """What runs are compared by: a column of the table.

    Attributes:
        key: in log.jsonl.
        scale: what is shown is the logged value times this.
        digits: behind the point.
    """

    title: str
    key: str
    lower_is_better: bool = True
    scale: float = 1.0
    digits: int = 4

    def text(self, value: float) -> str:
        return f'{self.scale * value:.{self.digits}f}'


LOSS = Criterion('loss', EVAL_LOSS)
KID = Criterion('KID x 1000', EVAL + 'kid/random-conv', scale=1000, digits=1)
JUDGE = Criterion('judge, %', EVAL + 'right_everything', lower_is_better=False, scale=100, digits=1)


@dataclass(frozen=True)
class Study:
    """Recipes that are compared with one another.

    Attributes:
        name: the folder of its recipes.
        data: the data that it shares with other studies (data.py).
        criteria: the columns of the table.
    """

    name: str
    data: str
    criteria: tuple[Criterion, ...]

    def variants(self, only: Sequence[str] | None = None) -> list[str]:
        """Return the names of its recipes, the baseline first.

        Raises:
            InputError: `only` names one that there is not.
        """
        names = sorted(path.stem for path in (FOLDER / self.name).glob('*.yaml'))
        unknown = [name for name in only or () if name not in names]
        if unknown:
            raise InputError(f"no recipe '{unknown[0]}' in {FOLDER / self.name}; there are {', '.join(names)}")
        return [BASELINE, *(name for name in names if name != BASELINE and (not only or name in only))]

    def reads_features(self, variants: Sequence[str]) -> bool:
        """Whether one of its recipes takes the feature network that is trained on its data."""
        return any('/features' in (FOLDER / self.name / f'{variant}.yaml').read_text() for variant in variants)


_ALL = (Study('shapes', 'shapes', (LOSS, KID, JUDGE)), Study('shapes-unet', 'shapes', (LOSS, KID, JUDGE)), Study('emoji', 'emoji', (LOSS, KID)))
STUDIES = {study.name: study for study in _ALL}


@dataclass(frozen=True)
class AblationRun:
    """One recipe with one seed.

    Attributes:
        kind: before the seed in the name of its folder.
    """

    study: Study
    variant: str
    seed: int
    out: Path
    changes: tuple[str, ...] = ()
    kind: str = ''

    @property
    def folder(self) -> Path:
        return self.out / self.study.name / f'{self.variant}-{self.kind}{self.seed}'

    def timing(self, turn: int) -> AblationRun:
        """The same recipe for its first batches."""
        return AblationRun(self.study, self.variant, turn, self.out, (*self.changes, *TIMING), 'time-')

    @property
    def arguments(self) -> list[str]:
        """The words after `train.py`."""
        return [str(FOLDER / self.study.name / f'{self.variant}.yaml'), f'seed={self.seed}', f'run_folder={self.folder}', *self.changes]

    def recipe(self) -> Recipe:
        """Load it.

        Raises:
            RecipeError: it is wrong, or its data are not there.
        """
        return load_recipe(self.arguments[0], self.arguments[1:])

    def check(self) -> None:
        """Load it before its data are there.

        Raises:
            RecipeError: it is wrong.
        """
        features = ['methods.alignment.source=.'] if self.study.reads_features([self.variant]) else []
        load_recipe(self.arguments[0], [*self.arguments[1:], 'model.encoders.source=.', *features])

    def finished(self) -> bool:
        """Whether it has been trained to its end.

        Raises:
            RunError: it was begun with another recipe.
        """
        written = self.folder / 'recipe.yaml'
        if not written.exists():
            return False
        before, now = yaml.safe_load(written.read_text()), yaml.safe_load(to_yaml(self.recipe()))
        if changes := changed_fields(before, now):
            raise RunError(f'{self.folder}: was begun with another recipe: {"; ".join(changes)}; undo it, name another --out, or delete the folder')
        return ended(self.folder) and before['train']['duration'] == now['train']['duration']


def ended(folder: Path) -> bool:
    """Whether the last line of a run's events says that it reached the end of its recipe."""
    return [line.get('reason') for line in read_events(folder / EVENTS)][-1:] == ['finished']


def in_turn(study: Study, variants: Sequence[str], seeds: Sequence[int], out: Path, changes: Sequence[str] = ()) -> Iterator[AblationRun]:
    """Yield all variants of the first seed, then those of the second: what slows the machine for an hour slows all variants."""
    for seed in seeds:
        for variant in variants:
            yield AblationRun(study, variant, seed, out, tuple(changes))


def timed(runs: Sequence[AblationRun], rounds: int) -> list[AblationRun]:
    """Return the runs that time the recipes of these, round after round."""
    of_each = {run.variant: run for run in runs}.values()
    return [run.timing(turn) for turn in range(rounds) for run in of_each]
