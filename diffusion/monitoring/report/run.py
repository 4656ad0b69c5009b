"""The content of a run folder, read once."""

from __future__ import annotations

import datetime
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from diffusion.common.files import parse_json_object
from diffusion.common.json_lines import read_lines
from diffusion.common.stopwatch import EVENTS
from diffusion.contracts.errors import RunError
from diffusion.cost.encoders import EncoderBill, encoder_bill
from diffusion.cost.prices import Price, price_of_run
from diffusion.monitoring.time_accounts import Accounts, account, read_events
from diffusion.recipe import any_recipe_from_yaml
from diffusion.recipe.schema import Cost, RayEncoders

LOSS, EVAL_LOSS, GRAD_NORM = 'loss/train/total', 'metrics/eval/loss', 'grad_norm'
LEARNING_RATE, LEARNING_RATE_OF_MUON = 'lr-AdamW/group0', 'lr-Muon/group0'
EVAL = 'metrics/eval/'  # begins the names of losses by timestep and of the scores of drawn images, too
MEAN_OF = 10  # records that the training loss at the end is a mean of: one batch's is noisy


@dataclass(frozen=True)
class Run:
    """A run so far.

    Attributes:
        recipe_text: recipe.yaml.
        recipe: the same, resolved.
        log: records by batch (`read_log`).
        events: lines of events.jsonl.
        environment: where it runs: environment.json, empty if it has not begun to train.
    """

    folder: Path
    recipe_text: str
    recipe: dict[str, Any]
    log: list[dict[str, float]]
    events: list[dict[str, Any]]
    environment: dict[str, Any]

    @staticmethod
    def read(folder: Path) -> Run:
        """Read a run folder.

        Raises:
            RunError: the folder has no recipe.yaml, or another file is damaged.
            RecipeError: recipe.yaml is not a recipe.
        """
        path = folder / 'recipe.yaml'
        if not path.is_file():
            raise RunError(f'{path}: no such file; {folder} is not the folder of a run')
        text = path.read_text()
        recipe = asdict(any_recipe_from_yaml(text, str(path)))
        return Run(folder, text, recipe, read_log(folder / 'log.jsonl'), list(read_events(folder / EVENTS)), read_json(folder / 'environment.json'))

    @cached_property
    def last(self) -> dict[str, float]:
        """The latest value of every metric."""
        merged: dict[str, float] = {}
        for record in self.log:
            merged.update(record)
        return merged

    @cached_property
    def accounts(self) -> Accounts:
        return account(self.events)

    def points(self, metric: str) -> list[tuple[float, float]]:
        """(batch, value) of a metric, where it was logged."""
        return [(record['batch'], record[metric]) for record in self.log if metric in record]

    @property
    def mean_loss(self) -> float | None:
        """Mean of the last MEAN_OF training losses."""
        losses = [loss for _, loss in self.points(LOSS)[-MEAN_OF:]]
        return sum(losses) / len(losses) if losses else None

    @property
    def network(self) -> str:
        """Name of the configuration of what is trained."""
        return (self.recipe.get('model') or self.recipe['autoencoder'])['network']

    @property
    def samples_seen(self) -> float:
        return self.last.get('batch', 0) * self.global_size

    @property
    def global_size(self) -> int:
        """Samples in a batch of all GPUs."""
        return self.recipe['batch']['global_size']

    @property
    def device(self) -> str:
        """Number and name; on a CPU the processor's name too."""
        name = self.environment.get('device', 'unknown device')
        cpu = self.environment.get('cpu')
        return f'{self.environment.get("num_gpus", 1)} x {name}' + (f' ({cpu})' if name == 'CPU' and cpu else '')

    @cached_property
    def encoders(self) -> EncoderBill | None:
        """Machines that encoded next to training (`data.encoders`), as the recipe has them now; None without them."""
        online = self.recipe['data'].get('encoders')
        return None if online is None else encoder_bill(RayEncoders(**online['ray']), Cost(**self.recipe['cost']), self.accounts.running_sec)

    @property
    def dollars(self) -> float | None:
        """Dollars so far, with the encoders; None if a part of it is not known."""
        gpus, encoders = self.last.get('cost/dollars_so_far'), self.encoders
        if gpus is None or encoders is None:
            return gpus
        return None if encoders.dollars is None else gpus + encoders.dollars

    @property
    def dates(self) -> tuple[str, str] | None:
        """When the first process began, and the last sign of life."""
        if not self.events:
            return None
        first, last = self.events[0], self.events[-1]
        return date(first['time'] - sum(first['sec'].values())), date(last['time'])

    @property
    def price(self) -> Price | None:
        """Price that the run used; a run that recorded none has at most a number in its recipe."""
        if 'price' in self.environment:
            return Price(**self.environment['price']) if self.environment['price'] is not None else None
        return price_of_run(Cost(**self.recipe['cost'])) if self.recipe['cost']['price_per_gpu_hour'] is not None else None


def date(unix_sec: float) -> str:
    return datetime.datetime.fromtimestamp(unix_sec).astimezone().strftime('%Y-%m-%d %H:%M %Z')


def format_value(value: float | None, pattern: str) -> str:
    """Format a number by `pattern`; `not measured` for None."""
    return 'not measured' if value is None else pattern.format(value)


def read_json(path: Path) -> dict[str, Any]:
    """Read the JSON object in a file of the run folder; empty if there is no file.

    Raises:
        RunError: it is damaged, or no object.
    """
    try:
        return parse_json_object(path.read_bytes()) if path.exists() else {}
    except ValueError as error:
        raise RunError(f'{path}: cannot be read: {error}; restore the file, or remove it: the report does without') from error


def _is_record(line: dict[str, Any]) -> bool:
    return 'batch' in line and all(value is None or isinstance(value, int | float) for value in line.values())


def read_log(path: Path) -> list[dict[str, float]]:
    """Return the records by batch, in order, without values that were not finite.

    Where a resumed run repeated a batch, its later record counts; a line that a kill cut short is left out.

    Raises:
        RunError: a line holds something else than numbers.
    """
    records: dict[float, dict[str, float]] = {}
    for record in read_lines(path, _is_record, RunError):
        finite = {name: value for name, value in record.items() if value is not None}
        records[record['batch']] = {**records.get(record['batch'], {}), **finite}
    return [records[batch] for batch in sorted(records)]
