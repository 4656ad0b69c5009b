"""The backend of `fleet run`: storage with credentials of its own, and no queue.

    JOB/latest.json            epoch of the newest attempt, the checkpoint from which the next one resumes, and the result as soon as the job is done
    JOB/eEPOCH/sSTEP/...       a checkpoint
    JOB/eEPOCH/result/...      the result files

Each attempt takes the next epoch by replacing latest.json, which of several at the same time one can; whoever finds another's there writes nothing
more. No clock is used.
"""

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, MutableSequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from diffusion.checkpoints.manifest import Content
from diffusion.common.storage import Folder, LocalFolder, RemoteFolder, StorageError, StorageRefusal, open_folder, scratch_for
from diffusion.contracts.errors import FINISHED, PREEMPTED, STALLED, SUPERSEDED, InputError
from fleet.attempts.attempt import Attempt, Programs, Workplace, write_log
from fleet.attempts.backend import (
    CHECKPOINT,
    INPUTS,
    Assignment,
    AttemptEnd,
    BackendUnavailable,
    HandedFile,
    HeldCheckpoint,
    JobInputError,
    LeaseLost,
    Order,
    UploadRejected,
)
from fleet.attempts.transfers import WrongContent, download, take_over
from fleet.attempts.workplace import StopRequest, attempt_folder, open_work
from fleet.jobs.checking import RECIPES, check_job
from fleet.jobs.spec import NAME, JobSpec, load_spec

LATEST = 'latest.json'


class HandedOver(BaseModel):
    """Files of an attempt: a checkpoint, or the result."""

    model_config = ConfigDict(frozen=True)

    folder: str  # below the job's
    step: int
    files: dict[str, Content]


class LatestRecord(BaseModel):
    """Content of latest.json.

    Attributes:
        job_sha256: tells jobs apart that have one name.
        token: tells attempts apart that begin at the same instant.
    """

    model_config = ConfigDict(frozen=True, extra='forbid')

    job_sha256: str
    epoch: int = 0
    token: str = ''
    checkpoint: HandedOver | None = None
    result: HandedOver | None = None

    def to_json(self) -> bytes:
        return self.model_dump_json(indent=1).encode() + b'\n'


def digest_of(spec: JobSpec) -> str:
    """SHA-256 of what decides the result of a job."""
    inputs = {name: given.sha256 for name, given in spec.inputs.items()}
    content = {'recipe': spec.recipe, 'overrides': spec.overrides, 'inputs': inputs}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def take_job(folder: Folder, spec: JobSpec, epoch: int | None) -> LatestRecord:
    """Begin an attempt: earlier ones may write nothing more. A job that has its result stays as it is.

    Args:
        epoch: that an engine counts; None takes the next one.

    Raises:
        LeaseLost: there is a later attempt, or the one of this number.
        InputError: the job of this name is another one, or its latest.json is damaged.
        StorageError: the storage does not answer.
    """
    while True:
        content = _read(folder, LATEST)
        try:
            before = LatestRecord(job_sha256=digest_of(spec)) if content is None else LatestRecord.model_validate_json(content)
        except ValidationError as error:
            remedy = 'restore it, or delete it to start the job from scratch'
            raise InputError(f'{folder.url}/{LATEST}: is damaged, or of another version; {remedy}') from error
        if before.job_sha256 != digest_of(spec):
            raise InputError(f'{folder.url}: holds another job (recipe, overrides or inputs differ); give this one another name, or delete that one')
        if before.result is not None:
            return before
        if epoch is not None and epoch <= before.epoch:
            raise LeaseLost(f'{folder.url}: attempt {epoch} is late, attempt {before.epoch} has begun')
        taken = before.model_copy(update={'epoch': epoch or before.epoch + 1, 'token': secrets.token_hex(8)})
        if folder.swap(LATEST, content, taken.to_json()):
            _remove_superseded(folder, taken)
            return taken


@dataclass
class DirectBackend:
    """Args:
    folder: of the job.
    latest: of this attempt.
    spec: of the job.
    """

    folder: Folder
    latest: LatestRecord
    spec: JobSpec
    fenced: bool = False

    def heartbeat(self, step: int, steps_per_sec: float | None, points: MutableSequence[Any]) -> Order:
        if self.fenced:
            raise LeaseLost(f'{self.folder.url}: another attempt has begun')
        return Order.CONTINUE

    def lent_folder(self, name: str) -> Path | None:
        url = self.spec.inputs[name].url
        return Path(url) if '://' not in url and Path(url).is_dir() else None

    def fetch(self, place: str, name: str, path: Path, given_up: Callable[[], bool]) -> None:
        if place == INPUTS:
            given = self.spec.inputs[name]
            content, (where, _, inside) = Content(given.sha256, given.bytes), given.url.rpartition('/')
            source = open_folder(where or '/') if not given.url.startswith(('http://', 'https://')) else None
        else:
            assert place == CHECKPOINT
            held = self.latest.checkpoint  # fetched before this attempt publishes one
            assert held is not None
            content, source, inside = held.files[name], self.folder, f'{held.folder}/{name}'
        try:
            if source is None:
                download(given.url, path, content, given_up)
                return
            with scratch_for() as scratch:
                partial = path.with_name(f'{path.name}.part')
                shutil.copyfile(source.fetch(inside, scratch), partial)
            take_over(partial, path, content)
        except WrongContent as error:
            raise JobInputError(f'{place}.{name}: {error}') from error
        except FileNotFoundError as error:
            raise JobInputError(f'{place}.{name}: there is no such file') from error
        except StorageRefusal as error:
            raise JobInputError(f'{place}.{name}: {error}') from error
        except StorageError as error:
            raise BackendUnavailable(str(error)) from error

    def publish(self, step: int, files: Mapping[str, HandedFile], given_up: Callable[[], bool]) -> None:
        with self._errors():
            self._confirm()
            self._put(f's{step}', files)
            self._replace(checkpoint=self._handed(f's{step}', step, {name: file.content for name, file in files.items()}))
            _remove_superseded(self.folder, self.latest)

    def put_results(self, files: Mapping[str, HandedFile], given_up: Callable[[], bool]) -> None:
        with self._errors():
            self._confirm()
            self._put('result', files)

    def end(self, outcome: AttemptEnd, given_up: Callable[[], bool]) -> None:
        if outcome.exit_code == FINISHED:
            with self._errors():
                self._replace(result=self._handed('result', outcome.step, outcome.results))

    def _handed(self, place: str, step: int, files: dict[str, Content]) -> HandedOver:
        return HandedOver(folder=f'e{self.latest.epoch}/{place}', step=step, files=files)

    def _put(self, place: str, files: Mapping[str, HandedFile]) -> None:
        for name, file in files.items():
            target = f'e{self.latest.epoch}/{place}/{name}'
            if isinstance(self.folder, RemoteFolder):
                self.folder.copy(file.path, target)
                continue
            with scratch_for(self.folder) as scratch:
                self.folder.put(Path(shutil.copyfile(file.path, scratch / 'file')), target)

    def _replace(self, **changes: HandedOver) -> None:
        """Raises LeaseLost: latest.json is another attempt's."""
        now = self.latest.model_copy(update=changes)
        if not self.folder.swap(LATEST, self.latest.to_json(), now.to_json()):
            self._fence()
        self.latest = now

    def _confirm(self) -> None:
        """Raises LeaseLost: latest.json is another attempt's, or gone."""
        if _read(self.folder, LATEST) != self.latest.to_json():
            self._fence()

    def _fence(self) -> None:
        self.fenced = True
        raise LeaseLost(f'{self.folder.url}: another attempt has begun')

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except StorageRefusal as error:
            raise UploadRejected(str(error)) from error
        except StorageError as error:
            raise BackendUnavailable(str(error)) from error


def _read(folder: Folder, name: str) -> bytes | None:
    try:
        return folder.read(name)
    except FileNotFoundError:
        return None


def _remove_superseded(folder: Folder, latest: LatestRecord) -> None:
    """Delete what this attempt and earlier ones have uploaded and latest.json does not name. Of later ones, which may have begun, nothing.

    What cannot be deleted is in nobody's way.
    """
    kept = latest.checkpoint.folder if latest.checkpoint else None
    with suppress(StorageError, OSError):
        for file in folder.files():
            epoch, place = file.partition('/')[0].removeprefix('e'), '/'.join(file.split('/')[:2])
            if file.count('/') >= 2 and epoch.isdigit() and int(epoch) <= latest.epoch and place != kept:
                folder.delete(file)
                if isinstance(folder, LocalFolder):
                    shutil.rmtree(Path(folder.url) / place, ignore_errors=True)


# `fleet run`: a whole attempt with storage of its own, for engines that have a queue already (Kubernetes, Slurm, SkyPilot).


def run_job(
    job: Path, work: Path, outputs: str, programs: Programs, stop: StopRequest, epoch: int | None = None, recipes: Path = RECIPES,
    keep_gb: float = 50.0,
) -> int:  # fmt: skip
    """Do the job, or what an earlier attempt has left of it; return an exit code of train.py.

    Args:
        job: its file.
        work: folder of this machine.
        outputs: where jobs have their folders.
        epoch: number of the attempt, as an engine counts it; None takes the next one.
        keep_gb: base models beyond it are deleted, the least recently used first.

    Raises:
        InputError, StorageError, OSError: before training; diffusion/contracts/errors.py has their exit codes.
    """
    spec = load_spec(job)
    checked = check_job(spec, str(job), recipes)
    name = spec.name or job.stem
    if not NAME.fullmatch(name):
        raise InputError(f'{job}: its name {name[:80]!r} may have letters, digits and . _ - alone; set `name` in it')
    out = open_folder(f'{outputs.rstrip("/") or "/"}/{name}')
    work = work.absolute()  # children run in folders of their own
    warm = open_work(work, keep_gb)
    try:
        latest = take_job(out, spec, epoch)
        if latest.result is not None:
            write_log(f'{name}: is done already: {out.url}/{latest.result.folder}')
            return FINISHED
        assignment = Assignment(
            job=name,
            name=name,
            epoch=latest.epoch,
            recipe=spec.recipe,
            overrides=spec.overrides,
            inputs={key: Content(given.sha256, given.bytes) for key, given in spec.inputs.items()},
            checkpoint=HeldCheckpoint(latest.checkpoint.step, latest.checkpoint.files) if latest.checkpoint else None,
            validation=spec.validation,
            draws=True,
        )
        steps = f' of {checked.num_steps:,} steps' if checked.num_steps else ''
        write_log(f'{name}: attempt {latest.epoch}{steps}, results to {out.url}')
        with attempt_folder(work, f'{name}-e{latest.epoch}-{os.getpid()}') as place:
            outcome = Attempt(assignment, DirectBackend(out, latest, spec), Workplace(place, warm, programs, recipes), stop, write_log).run()
    except LeaseLost as error:
        write_log(f'{name}: {error}: this one writes nothing more')
        return SUPERSEDED
    code = outcome.exit_code if outcome.exit_code is not None else STALLED
    ended = 'done' if code == FINISHED else 'stopped, run it again to resume' if code == PREEMPTED else outcome.message.strip() or 'failed'
    write_log(f'{name}: ended with exit code {code} at step {outcome.step:,}: {ended}')
    return code
