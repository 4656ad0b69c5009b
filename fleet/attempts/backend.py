"""Contract of an attempt with whoever gives it work and takes what it hands over: a worker of a queue, or `fleet run` with storage of its own."""

import re
from collections.abc import Callable, Mapping, MutableSequence, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

from diffusion.checkpoints.manifest import Content
from fleet.jobs.spec import JobValidation

TRAIN, SAMPLE = 'train', 'sample'  # kinds of jobs
INPUTS, CHECKPOINT, MODEL = 'inputs', 'checkpoint', 'model'  # where a backend has files for an attempt
_PART = re.compile(r'[A-Za-z0-9][A-Za-z0-9._-]{0,127}')


class LeaseLost(Exception):
    """The job is another attempt's now, or may be: kill what runs for it, write nothing more, forget it."""


class BackendUnavailable(Exception):
    """Storage or service does not answer at the moment; trying again may help."""


class UploadRejected(Exception):
    """Refusal of what was handed over; trying again does not help."""


class JobInputError(Exception):
    """An input is not what the job says, or cannot be used: the job's fault."""


class MachineError(Exception):
    """This machine cannot do it, whatever the job is: no room, files that do not arrive."""


class Order(StrEnum):
    """Wish of the backend for a running attempt."""

    CONTINUE = 'continue'
    RELEASE = 'release'  # save, hand over, give the job back
    STOP = 'stop'  # save, hand over, end


@dataclass(frozen=True)
class HeldCheckpoint:
    """A checkpoint that the backend holds."""

    step: int
    files: dict[str, Content]


@dataclass(frozen=True)
class Assignment:
    """Work of one attempt.

    Attributes:
        epoch: number of the attempt, the fencing token.
        inputs: archives and files by name.
        model: of kind `sample`: the result files of its parent by path.
        draws: the prompts of `validation` after the training, into the result; in a queue they are a job of their own.
        hours_left: until the job's limit; None: not known.
    """

    job: str
    epoch: int
    recipe: str
    overrides: dict[str, Any] = field(default_factory=dict)
    inputs: dict[str, Content] = field(default_factory=dict)
    kind: str = TRAIN
    name: str = ''
    validation: JobValidation = field(default_factory=JobValidation)
    model: dict[str, Content] = field(default_factory=dict)
    checkpoint: HeldCheckpoint | None = None
    hours_left: float | None = None
    draws: bool = False

    @property
    def title(self) -> str:
        """Name of the job, for lines of a log."""
        return f'{self.job} ({self.name})' if self.name and self.name != self.job else self.job


@dataclass(frozen=True)
class HandedFile:
    """A file of this machine that is handed over."""

    path: Path
    content: Content


@dataclass(frozen=True)
class AttemptEnd:
    """How an attempt ended.

    Attributes:
        exit_code: of train.py; None where it was not reached and `ending` says why.
        ending: `released` or `node_fault`; None: the exit code says it.
        step: that was reached.
        message: for people, at most MESSAGE_CHARS, without credentials.
        results: files that were handed over.
        curve: points of the loss that no heartbeat has handed over (child.py).
    """

    exit_code: int | None
    step: int
    ending: str | None = None
    message: str = ''
    results: dict[str, Content] = field(default_factory=dict)
    curve: Sequence[Sequence[float | None]] = ()


class JobBackend(Protocol):
    """Place where inputs and the latest checkpoint come from, and where checkpoints and results go.

    `heartbeat` is called by the main thread, everything else by the one thread that transfers. `given_up` says that the transfer is not wanted
    any more: then BackendUnavailable is raised soon. All raise LeaseLost.
    """

    def heartbeat(self, step: int, steps_per_sec: float | None, points: MutableSequence[Any]) -> Order:
        """Called every second or so: keep what has to be kept, and hear what is wanted.

        Args:
            points: new ones of the curve (child.py); those that are handed over are taken out.
        """

    def lent_folder(self, name: str) -> Path | None:
        """A folder of this machine that is the input; None: it has to be fetched."""

    def fetch(self, place: str, name: str, path: Path, given_up: Callable[[], bool]) -> None:
        """Write a file of the assignment to `path`, its size and digest checked on the way.

        Args:
            place: INPUTS, CHECKPOINT or MODEL.

        Raises:
            BackendUnavailable, JobInputError, MachineError, OSError.
        """

    def publish(self, step: int, files: Mapping[str, HandedFile], given_up: Callable[[], bool]) -> None:
        """Hand over a checkpoint: afterwards the job resumes from it.

        Raises:
            BackendUnavailable, UploadRejected.
        """

    def put_results(self, files: Mapping[str, HandedFile], given_up: Callable[[], bool]) -> None:
        """Hand over the result files; `end` then names them.

        Raises:
            BackendUnavailable, UploadRejected.
        """

    def end(self, outcome: AttemptEnd, given_up: Callable[[], bool]) -> None:
        """Report the end.

        Raises:
            BackendUnavailable, UploadRejected.
        """


def safe_name(name: str) -> str:
    """Return a relative path that came from another machine if it stays in its folder, at most four folders deep.

    Raises:
        MachineError: it does not.
    """
    parts = name.split('/')
    if len(parts) > 5 or not all(_PART.fullmatch(part) for part in parts):
        raise MachineError(f'a file is called {name[:80]!r}, which is no plain relative path')
    return name
