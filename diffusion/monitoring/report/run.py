"""The content of a run folder, read once."""

from __future__ import annotations

import datetime
import math
import statistics
import time
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from typing_extensions import TypedDict

from diffusion.common.files import is_number, read_json, read_json_lines
from diffusion.common.stopwatch import EVENTS
from diffusion.contracts.errors import RunError
from diffusion.cost.encoders import encoder_row
from diffusion.cost.formulas import SEC_PER_HOUR
from diffusion.cost.prices import CostRow, Price, price_of_run
from diffusion.evaluation.job.results import with_error
from diffusion.monitoring.time_accounts import EARLY, Accounts, account, read_events
from diffusion.recipe import Duration, any_recipe_from_yaml
from diffusion.recipe.schema import Cost, RayEncoders
from diffusion.recipe.techniques import plain_name

T = TypeVar('T')
LOSS, EVAL_LOSS, GRAD_NORM = 'loss/train/total', 'metrics/eval/loss', 'grad_norm'
EVAL = 'metrics/eval/'  # begins the names of losses by timestep and of the scores of drawn images, too
ERROR = '_error'  # ends the name of a score's error
FINAL_SHARE = 0.1  # of the batches: one loss is noisy, and the mean of a whole run says nothing of its end
NOT_MEASURED, NOT_BEGUN = 'not measured', 'not begun'
SILENCE_SEC = 900  # without a line of events.jsonl, after which nothing runs: long enough to compile
ENDS = {
    'Preempted': 'on request', 'KeyboardInterrupt': 'on request', 'NonFinite': 'by a loss that was not finite',
    'PeerLost': 'by the loss of another rank', 'stalled': 'by a stall',
}  # fmt: skip
REMEDY = 'restore the file, or remove it: the report does without'


class Environment(TypedDict, total=False):
    """Entries of environment.json that the report asks for; it has more, which are listed as they are."""

    __pydantic_config__ = {'extra': 'allow'}  # type: ignore[misc]  # noqa: RUF012
    device: str
    num_gpus: int
    cpu: str | None
    commit: str | None
    price: Price | None
    encoders: dict[str, str]


@dataclass(frozen=True)
class Run:
    """A run so far.

    Attributes:
        recipe_text: recipe.yaml.
        recipe: the same, resolved.
        log: records by batch (`read_log`), metrics by their `plain_name`.
        events: lines of events.jsonl.
        environment: where it runs: environment.json, empty if it has not begun to train.
    """

    folder: Path
    recipe_text: str
    recipe: dict[str, Any]
    log: list[dict[str, float]]
    events: list[dict[str, Any]]
    environment: Environment

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
        try:
            text = path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise RunError(f'{path}: cannot be read: {error}; restore the file') from error
        environment = read_if_present(folder / 'environment.json', Environment)
        recipe = asdict(any_recipe_from_yaml(text, str(path)))
        log = [{plain_name(name): value for name, value in record.items()} for record in read_log(folder / 'log.jsonl')]
        return Run(folder, text, recipe, log, list(read_events(folder / EVENTS)), environment)

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

    @cached_property
    def scores(self) -> list[str]:
        """Names of the scores of drawn images in the log; shares of images come first, the worst at the beginning."""
        names = sorted(name for name in self.last if name.startswith(EVAL) and not name.startswith(EVAL_LOSS) and not name.endswith(ERROR))
        return sorted(names, key=lambda name: self.last[name] if name.startswith((f'{EVAL}right_', f'{EVAL}composition')) else math.inf)

    @staticmethod
    def score_text(record: dict[str, float], name: str) -> str:
        """`0.012 ± 0.003`, if the record has the score's error."""
        return with_error(record[name], record.get(name + ERROR))

    def points(self, metric: str) -> list[tuple[float, float]]:
        """(batch, value) of a metric, where it was logged."""
        return [(record['batch'], record[metric]) for record in self.log if metric in record]

    @property
    def final_loss(self) -> tuple[str, int]:
        """Mean ± standard deviation of the training losses in the last tenth of the batches, and how many records these are."""
        points = self.points(LOSS)
        losses = [loss for batch, loss in points if batch > (1 - FINAL_SHARE) * points[-1][0]]
        spread = statistics.stdev(losses) if len(losses) > 1 else None
        return with_error(statistics.fmean(losses), spread) if losses else NOT_MEASURED, len(losses)

    @property
    def batches(self) -> str:
        """`40 of 60`, or `40` where the end is not known."""
        return f'{self.last.get("batch", 0):,.0f}' + (f' of {self.num_batches:,.0f}' if self.num_batches else '')

    @cached_property
    def num_batches(self) -> float | None:
        """Batches of the whole run: the recipe's, else by what the log last said was left; None if it says nothing."""
        duration = Duration(self.recipe['train']['duration'])
        if duration.unit == 'ba':
            return duration.value
        for record in reversed(self.log):
            if 'time/remaining_hours' in record:
                return round(record['batch'] + record['time/remaining_hours'] * SEC_PER_HOUR * record['throughput/images_per_sec'] / self.global_size)
        return None

    def state(self) -> str:
        """`finished`, `stopped by REASON`, `running`, or that it has not begun; a killed process says nothing of its end, but its last line ages."""
        if not self.events:
            return NOT_BEGUN
        last = self.events[-1]
        if last['event'] == 'end':
            reason = str(last.get('reason', 'stopped'))
            return reason if reason in ('finished', 'stopped', EARLY) else f'stopped {ENDS.get(reason, f"by {reason}")}'
        times = [event['time'] for event in self.events if event['process'] == last['process']]
        patience_sec = max(SILENCE_SEC, 3 * max((later - earlier for earlier, later in pairwise(times)), default=0))
        return 'running' if time.time() - last['time'] < patience_sec else 'stopped without a word'

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
    def encoders(self) -> CostRow | None:
        """Machines that encoded next to training (`data.encoders`), as the recipe has them now; None without them."""
        online = self.recipe['data'].get('encoders')
        return None if online is None else encoder_row(RayEncoders(**online['ray']), Cost(**self.recipe['cost']), self.accounts.running_sec)

    @property
    def dollars(self) -> float | None:
        """Dollars so far, with the encoders; None if a part of it is not known."""
        gpus, encoders = self.last.get('cost/dollars_so_far'), self.encoders
        if gpus is None or encoders is None:
            return gpus
        return None if encoders.price is None else gpus + encoders.dollars

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
            return self.environment['price']
        return price_of_run(Cost(**self.recipe['cost'])) if self.recipe['cost']['price_per_gpu_hour'] is not None else None


def date(unix_sec: float) -> str:
    return datetime.datetime.fromtimestamp(unix_sec).astimezone().strftime('%Y-%m-%d %H:%M %Z')


def format_value(value: float | None, pattern: str) -> str:
    """Format a number by `pattern`; `not measured` for None."""
    return NOT_MEASURED if value is None else pattern.format(value)


def read_if_present(path: Path, shape: type[T]) -> T:
    """Read a JSON file of the run folder, as `read_json`; an empty one if there is no file.

    Raises:
        RunError: it is damaged, or of another shape.
    """
    return read_json(path, shape, RunError, REMEDY) if path.exists() else shape()


def _is_record(line: dict[str, Any]) -> bool:
    return is_number(line.get('batch')) and all(value is None or is_number(value) for value in line.values())


def read_log(path: Path) -> list[dict[str, float]]:
    """Return the records by batch, in order, without values that were not finite.

    Where a resumed run repeated a batch, its later record counts; a line that a kill cut short is left out.

    Raises:
        RunError: a line holds something else than numbers.
    """
    records: dict[float, dict[str, float]] = {}
    for record in read_json_lines(path, _is_record, RunError):
        finite = {name: value for name, value in record.items() if value is not None}
        records[record['batch']] = {**records.get(record['batch'], {}), **finite}
    return [records[batch] for batch in sorted(records)]
