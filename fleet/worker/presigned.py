"""HTTP to the service: one session, one token, errors that name no address."""

import re
import time
from collections.abc import Callable, Mapping, MutableSequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import requests
from pydantic import TypeAdapter, ValidationError

from diffusion.checkpoints.manifest import Content
from diffusion.common.files import parse_json_object
from diffusion.contracts.errors import InputError
from fleet.attempts.backend import (
    CHECKPOINT,
    INPUTS,
    MODEL,
    Assignment,
    AttemptEnd,
    BackendUnavailable,
    HandedFile,
    LeaseLost,
    MachineError,
    Order,
    UploadRejected,
)
from fleet.attempts.transfers import AddressExpired, WrongContent, download, no_auth, upload
from fleet.jobs.protocol import Enrolled, LeaseAnswer, ProtocolModel, SignedGet, SignedSources, UrlsAnswer

TIMEOUT_SEC = (5.0, 10.0)  # to connect, to answer: renewals wait for it, so it is short
MAX_ANSWER_BYTES = 8 << 20


class ServiceAway(Exception):
    """The service does not answer, or asks to come again later; `retry_sec` says when, if it does."""

    def __init__(self, message: str, retry_sec: float | None = None):
        super().__init__(message)
        self.retry_sec = retry_sec


@dataclass(frozen=True)
class ServiceAnswer:
    """Status, content and Retry-After in seconds."""

    status: int
    content: dict[str, Any]
    retry_sec: float | None = None

    @property
    def error(self) -> str:
        return str(self.content.get('error', f'status {self.status}'))[:500]


class ServiceClient:
    """Args:
        server: `https://host[:port]`; http only where somebody else encrypts, or on this machine.

    Raises:
        InputError: that is not its form.
    """

    def __init__(self, server: str):
        if not re.fullmatch(r'https?://[^/@\s?#]+(/[^@\s?#]*)?', server):
            raise InputError('--server: https://HOST is wanted, without user, password or query')
        self.server, self.token = server.rstrip('/'), ''
        self._session = requests.Session()

    def post(self, path: str, body: dict[str, Any]) -> ServiceAnswer:
        """Ask the service.

        Raises:
            ServiceAway.
        """
        headers = {'Authorization': f'Bearer {self.token}'}
        try:
            with self._session.post(
                f'{self.server}{path}', json=body, headers=headers, auth=no_auth, timeout=TIMEOUT_SEC, allow_redirects=False, stream=True
            ) as answer:
                content = answer.raw.read(MAX_ANSWER_BYTES + 1, decode_content=True)
                retry_sec = _seconds(answer.headers.get('Retry-After'))
                status = answer.status_code
        except (requests.RequestException, OSError) as error:
            raise ServiceAway(f'the service does not answer: {type(error).__name__}') from None
        except Exception as error:  # urllib3's own, while the body is read
            raise ServiceAway(f'the service broke off: {type(error).__name__}') from None
        if status == 429 or status >= 500:
            raise ServiceAway(f'the service answers with status {status}', retry_sec)
        try:
            parsed = parse_json_object(content) if content.strip() else {}
        except ValueError:
            raise ServiceAway(f'the service answers with status {status} and no JSON: is a proxy between?') from None
        return ServiceAnswer(status, parsed, retry_sec)

    def close(self) -> None:
        self._session.close()


def _seconds(text: str | None) -> float | None:
    return float(text) if text is not None and re.fullmatch(r'\d{1,6}', text.strip()) else None


# The backend of a leased job: the service's HTTP, and addresses that it has signed, each for one object and 15 minutes.

Answer = TypeVar('Answer', bound=ProtocolModel)
FENCED, UNKNOWN_TOKEN = 409, 401


def read_answer(shape: type[Answer], content: object) -> Answer:
    """Return an answer of the service; what is wrong with it is said without its values, among which are addresses.

    Raises:
        MachineError: it is not what this worker understands; its installation is another than the service's.
    """
    try:
        return shape.model_validate(content)
    except ValidationError as error:
        keys = '.'.join(map(str, error.errors()[0]['loc']))
        raise MachineError(f'the answer cannot be read ({keys[:80]}): is the worker of another version than the service?') from None


@dataclass
class PresignedBackend:
    """Args:
    client: to the service, of the thread that calls `heartbeat`.
    transfers: to the service, of the thread that transfers: a slow answer there does not delay a renewal.
    lease: as the service gave it; its addresses are secrets. Job and epoch are enough to say that the rest cannot be read.
    claimed_at: time.monotonic() before it was asked for.
    """

    client: ServiceClient
    transfers: ServiceClient
    lease: dict[str, Any]
    times: Enrolled
    claimed_at: float
    log: Callable[[str], None]
    fenced: str = ''  # why
    token_replaced: bool = False
    _renew_at: float = 0.0
    _away_since: float | None = None
    _ending: bool = False  # the end is on its way: a renewal that comes after it is refused, and that is no news

    def __post_init__(self) -> None:
        self.job, self.epoch = str(self.lease['job']), int(self.lease['epoch'])
        self.lease_until = self.claimed_at + self.times.lease_sec
        self._renew_at = self.claimed_at + self.times.renew_sec

    def assignment(self) -> Assignment:
        """Return what the lease says, without its addresses.

        Raises:
            MachineError: it cannot be read.
        """
        lease = read_answer(LeaseAnswer, self.lease)
        self.sources: SignedSources = lease
        said = {**lease.model_dump(), 'model': lease.model.model_dump()['files'] if lease.model else {}}
        return TypeAdapter(Assignment).validate_python({key: value for key, value in said.items() if value is not None})

    # --- the main thread

    def heartbeat(self, step: int, steps_per_sec: float | None, points: MutableSequence[Any]) -> Order:
        """Renew the lease when it is time; by this machine's monotonic clock alone, whatever its time of day is."""
        now = time.monotonic()
        if not self.fenced and now >= self._renew_at:
            self._renew_at = now + self.times.renew_sec
            order = self._renew(now, step, steps_per_sec, points)
            if order is not None:
                return order
        if not self.fenced and time.monotonic() >= self.lease_until + self.times.grace_sec:
            self.fenced = f'the lease ended {self.times.grace_sec:g} s ago and could not be renewed'
        if self.fenced:
            raise LeaseLost(self.fenced)
        return Order.CONTINUE

    def _renew(self, asked_at: float, step: int, steps_per_sec: float | None, points: MutableSequence[Any]) -> Order | None:
        said = {'epoch': self.epoch, 'step': step, 'steps_per_sec': steps_per_sec, 'curve': list(points)}
        try:
            answer = self.client.post(f'/jobs/{self.job}/renew', said)
        except ServiceAway as error:
            if self._away_since is None:
                self._away_since = asked_at
                self.log(f'{self.job}: not renewed: {error}; training continues for now')
            self._renew_at = min(self._renew_at, time.monotonic() + max(1.0, self.times.renew_sec / 6))
            return None
        if self._ending and answer.status == FENCED:
            return None
        if self._refused(answer):
            return None
        if answer.status != 200:
            self.log(f'{self.job}: not renewed: {answer.error}')
            return None
        if self._away_since is not None:
            self.log(f'{self.job}: renewed again after {asked_at - self._away_since:.0f} s')
            self._away_since = None
        self.lease_until = asked_at + self.times.lease_sec
        points.clear()
        action = answer.content.get('action')
        if action in (Order.RELEASE, Order.STOP):
            return Order(action)
        return Order.CONTINUE

    def _refused(self, answer: ServiceAnswer) -> bool:
        if answer.status == UNKNOWN_TOKEN:
            self.token_replaced = True
            self.fenced = 'another worker has enrolled as this machine, or the token was revoked'
        elif answer.status in (FENCED, 404, 410):
            self.fenced = f'the job is not leased to this machine any more: {answer.error}'
        return bool(self.fenced)

    # --- the thread that transfers

    def lent_folder(self, name: str) -> Path | None:
        return None

    def fetch(self, place: str, name: str, path: Path, given_up: Callable[[], bool]) -> None:
        for fresh in (False, True):
            if fresh:
                self.sources = read_answer(SignedSources, self._ask('inputs', {}))
            file = self._files(place)[name]
            try:
                download(file.url, path, Content(file.sha256, file.bytes), given_up)
                return
            except AddressExpired:
                if fresh:
                    raise
            except WrongContent as error:  # the service has compared it when it came: damaged on the way, or in storage
                raise BackendUnavailable(f'{place}.{name}: {error}') from error

    def _files(self, place: str) -> Mapping[str, SignedGet]:
        checkpoint, model = self.sources.checkpoint, self.sources.model
        found = {INPUTS: self.sources.inputs, CHECKPOINT: checkpoint.files if checkpoint else {}, MODEL: model.files if model else {}}
        return found[place]

    def publish(self, step: int, files: Mapping[str, HandedFile], given_up: Callable[[], bool]) -> None:
        self._put(step, files, given_up)
        self._ask('publish', {'step': step, 'files': _described(files)})

    def put_results(self, files: Mapping[str, HandedFile], given_up: Callable[[], bool]) -> None:
        self._put(None, files, given_up)

    def end(self, outcome: AttemptEnd, given_up: Callable[[], bool]) -> None:
        results = {name: asdict(content) for name, content in outcome.results.items()}
        body = {
            'exit_code': outcome.exit_code, 'ending': outcome.ending, 'step': outcome.step, 'message': outcome.message, 'files': results,
            'curve': list(outcome.curve),
        }  # fmt: skip
        self._ending = True
        self._ask('end', body, after_the_lease=True)

    def _put(self, step: int | None, files: Mapping[str, HandedFile], given_up: Callable[[], bool]) -> None:
        if not files:
            return
        signed = read_answer(UrlsAnswer, self._ask('urls', {'step': step, 'files': _described(files)})).files
        for name, file in files.items():
            if given_up():
                raise BackendUnavailable('given up')
            self._refuse_late()
            if name not in signed:
                raise UploadRejected(f'the service gave no address for {name}')
            upload(
                signed[name].url, signed[name].headers, file, given_up
            )  # what is there already is our own: the epoch is in its name; the service compares it

    def _ask(self, what: str, body: dict[str, Any], after_the_lease: bool = False) -> dict[str, Any]:
        """Ask the service about this job.

        Raises:
            BackendUnavailable: it does not answer.
            UploadRejected: 413 and 422, which the same question does not change.
            LeaseLost.
        """
        if not after_the_lease:
            self._refuse_late()
        if self.fenced:
            raise LeaseLost(self.fenced)
        try:
            answer = self.transfers.post(f'/jobs/{self.job}/{what}', {'epoch': self.epoch, **body})
        except ServiceAway as error:
            raise BackendUnavailable(str(error)) from None
        if self._refused(answer):
            raise LeaseLost(self.fenced)
        if answer.status in (400, 413, 422):
            raise UploadRejected(answer.error)
        if answer.status != 200:
            raise BackendUnavailable(answer.error)
        return answer.content

    def _refuse_late(self) -> None:
        """Raises BackendUnavailable: the lease has ended, so nothing is handed over until it is renewed."""
        if time.monotonic() >= self.lease_until:
            raise BackendUnavailable('the lease has ended; nothing is handed over until it is renewed')


def _described(files: Mapping[str, HandedFile]) -> dict[str, Any]:
    return {name: asdict(file.content) for name, file in files.items()}
