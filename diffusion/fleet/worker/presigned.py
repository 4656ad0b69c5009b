"""The desk of a leased job: the service's HTTP, and addresses that it has signed, each for one object and 15 minutes."""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from diffusion.checkpoints.manifest import Content
from diffusion.fleet.attempts.desk import (
    CHECKPOINT,
    INPUTS,
    MODEL,
    Assignment,
    AttemptEnd,
    DeskOutage,
    Fenced,
    HandedFile,
    HandoverRefused,
    HeldCheckpoint,
    NodeFault,
    Order,
)
from diffusion.fleet.attempts.transfers import AddressExpired, WrongContent, download, upload
from diffusion.fleet.jobs.spec import JobValidation
from diffusion.fleet.worker.client import ServiceAnswer, ServiceAway, ServiceClient

FENCED, UNKNOWN_TOKEN = 409, 401


@dataclass(frozen=True)
class LeaseTimes:
    """Seconds that the service says at enrolment."""

    lease_sec: float
    renew_sec: float
    poll_sec: float
    grace_sec: float


def assignment_of(lease: Mapping[str, Any]) -> Assignment:
    """What a lease says, without its addresses.

    Raises:
        NodeFault: it is not what this worker understands; its installation is another than the service's.
    """
    try:
        checkpoint, model = lease.get('checkpoint'), lease.get('model') or {}
        known = JobValidation.__dataclass_fields__
        validation = {name: value for name, value in (lease.get('validation') or {}).items() if name in known and value is not None}
        return Assignment(
            job=str(lease['job']),
            epoch=int(lease['epoch']),
            name=str(lease.get('name') or ''),
            kind=str(lease['kind']),
            recipe=str(lease['recipe']),
            overrides=dict(lease.get('overrides') or {}),
            validation=JobValidation(**validation),
            inputs=_contents(lease.get('inputs') or {}),
            model=_contents(_files(model)),
            checkpoint=HeldCheckpoint(int(checkpoint['step']), _contents(checkpoint['files'])) if checkpoint else None,
            hours_left=None if lease.get('hours_left') is None else float(lease['hours_left']),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise NodeFault(f'the lease cannot be read ({type(error).__name__}): is the worker of another version than the service?') from None


def _files(model: Mapping[str, Any]) -> Mapping[str, Any]:
    return model.get('files', model)


def _contents(files: Mapping[str, Any]) -> dict[str, Content]:
    return {str(name): Content(str(file['sha256']), int(file['bytes'])) for name, file in files.items()}


@dataclass
class PresignedDesk:
    """Args:
    client: to the service, of the thread that calls `beat`.
    transfers: to the service, of the thread that transfers: a slow answer there does not delay a renewal.
    lease: as the service gave it; its addresses are secrets.
    claimed_at: time.monotonic() before it was asked for.
    """

    client: ServiceClient
    transfers: ServiceClient
    lease: dict[str, Any]
    times: LeaseTimes
    claimed_at: float
    log: Callable[[str], None]
    fenced: str = ''  # why
    token_replaced: bool = False
    _renew_at: float = 0.0
    _away_since: float | None = None
    _ending: bool = False  # the end is on its way: a renewal that comes after it is refused, and that is no news
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.job, self.epoch = str(self.lease['job']), int(self.lease['epoch'])
        self.lease_until = self.claimed_at + self.times.lease_sec
        self._renew_at = self.claimed_at + self.times.renew_sec

    # --- the main thread

    def beat(self, step: int, steps_per_sec: float | None) -> Order:
        """Renew the lease when it is time; by this machine's monotonic clock alone, whatever its time of day is."""
        now = time.monotonic()
        if not self.fenced and now >= self._renew_at:
            self._renew_at = now + self.times.renew_sec
            order = self._renew(now, step, steps_per_sec)
            if order is not None:
                return order
        if not self.fenced and time.monotonic() >= self.lease_until + self.times.grace_sec:
            self.fenced = f'the lease ended {self.times.grace_sec:g} s ago and could not be renewed'
        if self.fenced:
            raise Fenced(self.fenced)
        return Order.CONTINUE

    def _renew(self, asked_at: float, step: int, steps_per_sec: float | None) -> Order | None:
        try:
            answer = self.client.post(f'/jobs/{self.job}/renew', {'epoch': self.epoch, 'step': step, 'steps_per_sec': steps_per_sec})
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
                self._fresh_addresses()
            file = self._place(place)[name]
            try:
                download(str(file['url']), path, Content(str(file['sha256']), int(file['bytes'])), given_up)
                return
            except AddressExpired:
                if fresh:
                    raise
            except WrongContent as error:  # the service has compared it when it came: damaged on the way, or in storage
                raise DeskOutage(f'{place}.{name}: {error}') from error

    def _place(self, place: str) -> Mapping[str, Any]:
        with self._lock:
            found = {
                INPUTS: self.lease.get('inputs') or {},
                CHECKPOINT: (self.lease.get('checkpoint') or {}).get('files') or {},
                MODEL: _files(self.lease.get('model') or {}),
            }
        return found[place]

    def _fresh_addresses(self) -> None:
        answer = self._ask('inputs', {})
        with self._lock:
            for key in ('inputs', 'checkpoint', 'model'):
                if answer.get(key):
                    self.lease[key] = answer[key]

    def publish(self, step: int, files: Mapping[str, HandedFile], given_up: Callable[[], bool]) -> None:
        self._put(step, files, given_up)
        self._ask('publish', {'step': step, 'files': _described(files)})

    def put_results(self, files: Mapping[str, HandedFile], given_up: Callable[[], bool]) -> None:
        self._put(None, files, given_up)

    def end(self, outcome: AttemptEnd, given_up: Callable[[], bool]) -> None:
        results = {name: asdict(content) for name, content in outcome.results.items()}
        body = {'exit_code': outcome.exit_code, 'ending': outcome.ending, 'step': outcome.step, 'message': outcome.message, 'files': results}
        self._ending = True
        self._ask('end', body, after_the_lease=True)

    def _put(self, step: int | None, files: Mapping[str, HandedFile], given_up: Callable[[], bool]) -> None:
        if not files:
            return
        addresses = self._ask('urls', {'step': step, 'files': _described(files)}).get('files') or {}
        for name, file in files.items():
            if given_up():
                raise DeskOutage('given up')
            self._refuse_late()
            try:
                url, headers = str(addresses[name]['url']), dict(addresses[name]['headers'])
            except (KeyError, TypeError):
                raise HandoverRefused(f'the service gave no address for {name}') from None
            upload(url, headers, file, given_up)  # what is there already is our own: the epoch is in its name; the service compares it

    def _ask(self, what: str, body: dict[str, Any], after_the_lease: bool = False) -> dict[str, Any]:
        """Ask the service about this job.

        Raises:
            DeskOutage: it does not answer.
            HandoverRefused: 413 and 422, which the same question does not change.
            Fenced.
        """
        if not after_the_lease:
            self._refuse_late()
        if self.fenced:
            raise Fenced(self.fenced)
        try:
            answer = self.transfers.post(f'/jobs/{self.job}/{what}', {'epoch': self.epoch, **body})
        except ServiceAway as error:
            raise DeskOutage(str(error)) from None
        if self._refused(answer):
            raise Fenced(self.fenced)
        if answer.status in (400, 413, 422):
            raise HandoverRefused(answer.error)
        if answer.status != 200:
            raise DeskOutage(answer.error)
        return answer.content

    def _refuse_late(self) -> None:
        """Raises DeskOutage: the lease has ended, so nothing is handed over until it is renewed."""
        if time.monotonic() >= self.lease_until:
            raise DeskOutage('the lease has ended; nothing is handed over until it is renewed')


def _described(files: Mapping[str, HandedFile]) -> dict[str, Any]:
    return {name: asdict(file.content) for name, file in files.items()}
