"""The backend of `fleet run`: storage with credentials of its own, and no queue.

    JOB/latest.json            epoch of the newest attempt, and where the checkpoint is from which the next one resumes
    JOB/eEPOCH/sSTEP/...       a checkpoint and its manifest.json
    JOB/eEPOCH/result/...      the result files, and eEPOCH/result.json
    JOB/result.json            a copy of that, written last: the job is done

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
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from diffusion.checkpoints.manifest import Content
from diffusion.common.files import parse_json_object
from diffusion.common.storage import Folder, LocalFolder, RemoteFolder, StorageError, StorageRefusal, open_folder, scratch_for, write
from diffusion.contracts.errors import FINISHED, PREEMPTED, STALLED, SUPERSEDED, DataError, InputError
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

LATEST, RESULT, MANIFEST = 'latest.json', 'result.json', 'manifest.json'
KEPT_CHECKPOINTS = 2


@dataclass(frozen=True)
class LatestRecord:
    """Content of latest.json.

    Attributes:
        job_sha256: tells jobs apart that have one name.
        token: tells attempts apart that begin at the same instant.
        step, folder, manifest: of the checkpoint, if there is one: its folder below the job's, and the SHA-256 of its manifest.json.
        result: what becomes result.json, as soon as the job is done.
    """

    job_sha256: str
    epoch: int
    token: str
    step: int | None = None
    folder: str | None = None
    manifest: str | None = None
    result: str | None = None

    def to_json(self) -> bytes:
        return json.dumps(asdict(self), indent=1).encode() + b'\n'

    @classmethod
    def parse(cls, content: bytes, where: str) -> Self:
        try:
            fields = parse_json_object(content)
            found = cls(**{name: fields[name] for name in cls.__dataclass_fields__})
            if not isinstance(found.epoch, int) or not isinstance(found.folder, str | None) or not isinstance(found.step, int | None):
                raise TypeError
            return found
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f'{where}/{LATEST}: is damaged; restore it, or delete it to start the job from scratch') from error


def digest_of(spec: JobSpec) -> str:
    """SHA-256 of what decides the result of a job."""
    inputs = {name: given.sha256 for name, given in spec.inputs.items()}
    content = {'recipe': spec.recipe, 'overrides': spec.overrides, 'inputs': inputs}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def is_done(folder: Folder, spec: JobSpec) -> bool:
    """Whether the job has its result.

    Raises:
        InputError: another job of this name has.
        StorageError: the storage does not answer.
    """
    content = _read(folder, RESULT)
    if content is None:
        latest = _latest(folder)
        if latest is None or latest.result is None:
            return False
        _refuse_another(folder, latest.job_sha256, digest_of(spec))
        folder.swap(RESULT, None, folder.read(latest.result))  # its process was killed just before
        return True
    try:
        found = parse_json_object(content).get('job_sha256')
    except ValueError as error:
        raise InputError(f'{folder.url}/{RESULT}: is damaged; restore it, or delete it to do the job again') from error
    _refuse_another(folder, found, digest_of(spec))
    return True


def take_job(folder: Folder, spec: JobSpec, epoch: int | None) -> LatestRecord:
    """Begin an attempt: earlier ones may write nothing more.

    Args:
        epoch: that an engine counts; None takes the next one.

    Raises:
        LeaseLost: there is a later attempt, or the one of this number.
        InputError: the job of this name is another one.
        StorageError: the storage does not answer.
    """
    while True:
        content = _read(folder, LATEST)
        before = LatestRecord.parse(content, folder.url) if content is not None else LatestRecord(digest_of(spec), 0, '')
        _refuse_another(folder, before.job_sha256, digest_of(spec))
        if epoch is not None and epoch <= before.epoch:
            raise LeaseLost(f'{folder.url}: attempt {epoch} is late, attempt {before.epoch} has begun')
        taken = replace(before, epoch=epoch or before.epoch + 1, token=secrets.token_hex(8))
        if folder.swap(LATEST, content, taken.to_json()):
            _remove_what_is_left(folder, taken)
            return taken


def held_checkpoint(folder: Folder, latest: LatestRecord) -> HeldCheckpoint | None:
    """The checkpoint that latest.json names.

    Raises:
        JobInputError: it is damaged.
        StorageError: the storage does not answer.
    """
    if latest.step is None:
        return None
    content = _read(folder, f'{latest.folder}/{MANIFEST}')
    if content is None or hashlib.sha256(content).hexdigest() != latest.manifest:
        raise JobInputError(f'{folder.url}/{latest.folder}/{MANIFEST}: is missing or damaged; restore it, or delete {LATEST} to start from scratch')
    files = parse_json_object(content)['files']
    return HeldCheckpoint(latest.step, {name: Content(str(file['sha256']), int(file['bytes'])) for name, file in files.items()})


@dataclass
class DirectBackend:
    """Args:
    folder: of the job.
    latest: of this attempt.
    spec: of the job.
    held: the checkpoint to resume from.
    """

    folder: Folder
    latest: LatestRecord
    spec: JobSpec
    held: HeldCheckpoint | None
    fenced: bool = False
    _folders: list[str] = field(default_factory=list)  # of checkpoints, oldest first

    def __post_init__(self) -> None:
        self._folders += [self.latest.folder] if self.latest.folder else []

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
            assert self.held is not None
            content, source, inside = self.held.files[name], self.folder, f'{self.latest.folder}/{name}'
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
        where = f'e{self.latest.epoch}/s{step}'
        with self._errors():
            self._confirm()
            self._put(where, files)
            manifest = _manifest({'epoch': self.latest.epoch, 'step': step}, {name: file.content for name, file in files.items()})
            write(self.folder, f'{where}/{MANIFEST}', manifest)
            self._replace(replace(self.latest, step=step, folder=where, manifest=hashlib.sha256(manifest).hexdigest()))
            self._folders = [*(folder for folder in self._folders if folder != where), where]
            while len(self._folders) > KEPT_CHECKPOINTS:
                _remove(self.folder, self._folders.pop(0))

    def put_results(self, files: Mapping[str, HandedFile], given_up: Callable[[], bool]) -> None:
        with self._errors():
            self._confirm()
            self._put(f'e{self.latest.epoch}/result', files)

    def end(self, outcome: AttemptEnd, given_up: Callable[[], bool]) -> None:
        if outcome.exit_code != 0:
            return
        facts = {'job_sha256': self.latest.job_sha256, 'epoch': self.latest.epoch, 'step': outcome.step, 'folder': f'e{self.latest.epoch}/result'}
        content, name = _manifest(facts, outcome.results), f'e{self.latest.epoch}/{RESULT}'
        with self._errors():
            write(self.folder, name, content)
            self._replace(replace(self.latest, result=name))  # from here on the job is done
            self.folder.swap(RESULT, None, content)

    def _put(self, where: str, files: Mapping[str, HandedFile]) -> None:
        for name, file in files.items():
            if isinstance(self.folder, RemoteFolder):
                self.folder.copy(file.path, f'{where}/{name}')
                continue
            with scratch_for(self.folder) as scratch:
                self.folder.put(Path(shutil.copyfile(file.path, scratch / 'file')), f'{where}/{name}')

    def _replace(self, now: LatestRecord) -> None:
        """Raises LeaseLost: latest.json is another attempt's."""
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


def _manifest(facts: dict[str, Any], files: Mapping[str, Content]) -> bytes:
    return json.dumps({**facts, 'files': {name: asdict(content) for name, content in files.items()}}, indent=1).encode() + b'\n'


def _read(folder: Folder, name: str) -> bytes | None:
    try:
        return folder.read(name)
    except FileNotFoundError:
        return None


def _latest(folder: Folder) -> LatestRecord | None:
    content = _read(folder, LATEST)
    return None if content is None else LatestRecord.parse(content, folder.url)


def _refuse_another(folder: Folder, there: object, ours: str) -> None:
    if there != ours:
        raise InputError(f'{folder.url}: holds another job (recipe, overrides or inputs differ); give this one another name, or delete that one')


def _remove_what_is_left(folder: Folder, latest: LatestRecord) -> None:
    """Delete what earlier attempts have uploaded and not published. Of later ones, which may have begun, nothing."""
    with suppress(StorageError):
        names = {'/'.join(name.split('/')[:2]) for name in folder.files() if name.count('/') >= 2}
        for name in names:
            epoch = name.partition('/')[0].removeprefix('e')
            if epoch.isdigit() and int(epoch) < latest.epoch and name != latest.folder:
                _remove(folder, name)


def _remove(folder: Folder, name: str) -> None:
    """Delete a folder of the job; what is left of it is in nobody's way."""
    with suppress(StorageError, OSError):
        for file in folder.files(name):
            folder.delete(file)
        if isinstance(folder, LocalFolder):
            shutil.rmtree(Path(folder.url) / name, ignore_errors=True)


# `fleet run`: a whole attempt with storage of its own, for engines that have a queue already (Kubernetes, Slurm, SkyPilot).


@dataclass(frozen=True)
class RunOptions:
    """Options of `fleet run`.

    Attributes:
        job: file of the job.
        outputs: where jobs have their folders; None takes that of the job.
        epoch: number of the attempt, as an engine counts it; None takes the next one.
        keep_gb: base models beyond it are deleted, the least recently used first.
    """

    job: Path
    work: Path
    outputs: str | None = None
    epoch: int | None = None
    recipes: Path = RECIPES
    keep_gb: float = 50.0


def run_job(options: RunOptions, programs: Programs, stop: StopRequest) -> int:
    """Do the job, or what an earlier attempt has left of it; return an exit code of train.py.

    Raises:
        InputError, DataError, StorageError, OSError: before training; diffusion/contracts/errors.py has their exit codes.
    """
    spec = load_spec(options.job)
    checked = check_job(spec, str(options.job), options.recipes)
    name, folder = spec.name or options.job.stem, options.outputs or spec.outputs.prefix
    if not NAME.fullmatch(name):
        raise InputError(f'{options.job}: its name {name[:80]!r} may have letters, digits and . _ - alone; set `name` in it')
    if folder is None:
        raise InputError(f'{options.job}: says not where results go; set outputs.prefix in it, or --outputs')
    out = open_folder(f'{folder.rstrip("/") or "/"}/{name}')
    if is_done(out, spec):
        write_log(f'{name}: is done already: {out.url}/result.json')
        return FINISHED
    work = options.work.absolute()  # children run in folders of their own
    warm = open_work(work, options.keep_gb)
    try:
        latest = take_job(out, spec, options.epoch)
        held = held_checkpoint(out, latest)
        assignment = Assignment(
            job=name,
            name=name,
            epoch=latest.epoch,
            recipe=spec.recipe,
            overrides=spec.overrides,
            inputs={key: Content(given.sha256, given.bytes) for key, given in spec.inputs.items()},
            checkpoint=held,
            validation=spec.validation,
            draws=True,
        )
        steps = f' of {checked.num_steps:,} steps' if checked.num_steps else ''
        write_log(f'{name}: attempt {latest.epoch}{steps}, results to {out.url}')
        with attempt_folder(work, f'{name}-e{latest.epoch}-{os.getpid()}') as place:
            outcome = Attempt(
                assignment, DirectBackend(out, latest, spec, held), Workplace(place, warm, programs, options.recipes), stop, write_log
            ).run()
    except LeaseLost as error:
        write_log(f'{name}: {error}: this one writes nothing more')
        return SUPERSEDED
    except JobInputError as error:
        raise DataError(str(error)) from error
    code = outcome.exit_code if outcome.exit_code is not None else STALLED
    ended = 'done' if code == FINISHED else 'stopped, run it again to resume' if code == PREEMPTED else outcome.message.strip() or 'failed'
    write_log(f'{name}: ended with exit code {code} at step {outcome.step:,}: {ended}')
    return code
