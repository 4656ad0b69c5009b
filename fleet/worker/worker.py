"""A machine that does the jobs of a queue; first what it is: the kind of its GPUs and their memory, as the driver says."""

import platform
import re
import subprocess
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from diffusion import __version__
from diffusion.common.files import try_lock, write_text
from diffusion.common.object_storage import JITTER
from diffusion.common.text import counted, first_line
from diffusion.contracts.errors import BAD_DATA, BAD_INPUT, FINISHED, NON_FINITE, PREEMPTED, STALLED, SUPERSEDED, InputError
from fleet.attempts.attempt import Attempt, Programs, Workplace
from fleet.attempts.backend import AttemptEnd, LeaseLost, MachineError, Order
from fleet.attempts.workplace import StopRequest, attempt_folder, growing_pauses, open_work
from fleet.jobs.checking import RECIPES, recipe_digests
from fleet.jobs.protocol import Enrolled
from fleet.worker.presigned import PresignedBackend, ServiceAnswer, ServiceAway, ServiceClient, read_answer

NVIDIA_SMI_SEC = 30.0


@dataclass(frozen=True)
class MachineFacts:
    """Facts that a worker tells of its machine.

    Attributes:
        gpu: kind, such as `rtx-4090`; `cpu` where there is none.
        gpu_gb: memory of one GPU, in GB (10^9 bytes).
        num_gpus: that one job gets.
    """

    name: str
    gpu: str = 'cpu'
    gpu_gb: float = 0.0
    num_gpus: int = 1
    image: str = ''


def gpu_of_driver() -> tuple[str, float]:
    """Kind and GB of the smallest GPU; `cpu` and 0 without a driver or GPU."""
    query = ['nvidia-smi', '--query-gpu=name,memory.total', '--format=csv,noheader,nounits']
    try:
        lines = subprocess.run(query, capture_output=True, text=True, check=True, timeout=NVIDIA_SMI_SEC).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return 'cpu', 0.0
    found = [(name, float(mib)) for name, _, mib in (line.rpartition(', ') for line in lines) if re.fullmatch(r'[\d.]+', mib.strip())]
    if not found:
        return 'cpu', 0.0
    name, mib = min(found, key=lambda gpu: gpu[1])
    return kind_of(name), round(mib * 2**20 / 1e9, 1)


def kind_of(name: str) -> str:
    """`NVIDIA GeForce RTX 4090` as people and price lists write it: `rtx-4090`."""
    plain = re.sub(r'\b(nvidia|geforce|tesla)\b', '', name.lower())
    return '-'.join(re.findall(r'[a-z0-9.]+', plain)) or 'gpu'


def host_name() -> str:
    """This machine's name, of letters, digits and . _ - alone."""
    return re.sub(r'[^A-Za-z0-9._-]', '-', platform.node())[:64].lstrip('._-') or 'machine'


# The loop of a machine: enrol, then claim, attempt, end; until there is nothing to do, or somebody says leave.

FAILURES_IN_A_ROW = 3
SESSION_FILE = 'session'  # in the folder of the machine, for its user alone: the last token, with which it enrols again at once
LEAVING_SEC = 20.0  # for the last words to a service that may be away
BLAMELESS = (FINISHED, BAD_DATA, SUPERSEDED, PREEMPTED, NON_FINITE)  # not 64: the service has judged the recipe


@dataclass
class FleetWorker:
    """Args:
    server: address of the service.
    pool_token: with which machines enrol.
    work: folder of this machine.
    stop: a request to save, hand over and leave.
    log: gets a line for each event.
    idle_sec: without a job after which the worker leaves.
    keep_gb: base models beyond it are deleted, the least recently used first.
    """

    server: str
    pool_token: str
    machine: MachineFacts
    work: Path
    programs: Programs
    stop: StopRequest
    log: Callable[[str], None]
    idle_sec: float = 900.0
    keep_gb: float = 50.0
    recipes: Path = RECIPES
    failures: int = 0  # in a row
    _leaving: str = ''  # why
    _code: int = FINISHED
    _enrolled: bool = False
    _asked_at: float = 0.0  # time.monotonic() before the last request
    _known: bool = True  # whether the service takes our token

    def run(self) -> int:
        """Work; return an exit code: 0 after leaving in order, 2 where the token is wrong, 76 after FAILURES_IN_A_ROW failures of this machine's own.

        Raises:
            InputError: the server's address is none, or another worker uses the folder.
            OSError: the folder of this machine cannot be used.
        """
        self._work_folder = self.work.absolute()  # children run in folders of their own
        self.client, self.transfers = ServiceClient(self.server), ServiceClient(self.server)
        self.warm = open_work(self._work_folder, self.keep_gb)
        try:
            with (self._work_folder / 'worker.lock').open('a') as file:
                if not try_lock(file):
                    raise InputError(f'--work: another worker runs in {self._work_folder}; name a folder of its own for this one')
                if self._enrol():
                    self._work()
                    self._leave()
        finally:
            self.client.close()
            self.transfers.close()
        return self._code

    def _enrol(self) -> bool:
        facts = self.machine
        body = {
            'machine': facts.name, 'gpu': facts.gpu, 'gpu_gb': facts.gpu_gb, 'image': facts.image, 'gpus': facts.num_gpus,
            'version': __version__, 'recipes': recipe_digests(self.recipes),
        }  # fmt: skip
        file = self._work_folder / SESSION_FILE
        answer = None
        for token in [*_kept_token(file, facts.name), self.pool_token]:
            self.client.token = token
            answer = self._insist('/enroll', body)
            if answer is None:
                return False
            if answer.status != 401:
                break
        assert answer is not None
        if answer.status != 200:
            self.log(f'not enrolled: {answer.error}')
            self._code = BAD_INPUT
            return False
        try:
            self.times = read_answer(Enrolled, answer.content)
        except MachineError:
            raise InputError('--server: answers otherwise than the service of a fleet does; is it of another version?') from None
        self.client.token = self.transfers.token = self.times.token
        write_text(file, f'{facts.name} {self.times.token}')
        self._enrolled = True
        self._replaced = f'another worker has enrolled as {self.times.node}, or the token was revoked'
        self.log(f'enrolled as {self.times.node}: {facts.gpu}, {facts.gpu_gb:g} GB')
        if other := self.times.other_recipes:
            names = ', '.join(other[:5]) + (', ...' if len(other) > 5 else '')
            self.log(f'{counted(len(other), "recipe")} of the service missing here, or other than there: {names}; this machine gets no job of them')
        return True

    def _insist(self, path: str, body: dict[str, object]) -> ServiceAnswer | None:
        """Ask until the service answers, and not that the same may be asked again later; None: a request to stop, or idle for too long."""
        since, said = time.monotonic(), False
        for pause_sec in growing_pauses():
            self._asked_at = time.monotonic()
            try:
                answer = self.client.post(path, body)
                if answer.status != 409 or answer.retry_sec is None:
                    return answer
                reason, retry_sec = answer.error, answer.retry_sec
            except ServiceAway as error:
                reason, retry_sec = str(error), error.retry_sec or 0.0
            if not said:
                self.log(f'{reason}; trying again')
                said = True
            pause_sec = max(pause_sec, retry_sec)
            if self.stop.wait(min(pause_sec, self.idle_sec)) or time.monotonic() - since >= self.idle_sec:
                self._code = self._code if self.stop.asked or self._enrolled else STALLED
                return None
        return None

    def _work(self) -> None:
        idle_since = time.monotonic()
        while not self._leaving:
            if self.stop.asked:
                self._leaving = 'asked to'
            elif time.monotonic() - idle_since >= self.idle_sec:
                self._leaving = f'no job for {self.idle_sec / 60:g} minutes'
            elif self.failures >= FAILURES_IN_A_ROW:
                self._leaving, self._code = f'{self.failures} failures in a row', STALLED
            elif self._claim(idle_since):
                idle_since = time.monotonic()

    def _claim(self, idle_since: float) -> bool:
        """Ask for a job and do it; whether there was one."""
        answer = self._insist('/claim', {})
        if answer is None:  # a stop, or idle: the loop looks
            return False
        if answer.status == 200:
            self._attempt(answer)
            return True
        if answer.status in (401, 410):
            self._leaving, self._known = (answer.error, True) if answer.status == 410 else (self._replaced, False)
            return False
        if answer.status != 204:
            self.log(f'no job: {answer.error}')
        pause_sec = answer.retry_sec if answer.retry_sec is not None else self.times.poll_sec
        left = self.idle_sec - (time.monotonic() - idle_since)
        self.stop.wait(max(0.0, min(pause_sec * JITTER.uniform(0.9, 1.1), left)))
        return False

    def _attempt(self, answer: ServiceAnswer) -> None:
        backend: PresignedBackend | None = None
        began = time.monotonic()
        try:
            backend = PresignedBackend(self.client, self.transfers, answer.content, self.times, self._asked_at, self.log)
            assignment = backend.assignment()
            step = f', from step {assignment.checkpoint.step:,}' if assignment.checkpoint else ''
            left = f', {assignment.hours_left:.1f} h left' if assignment.hours_left is not None else ''
            self.log(f'claimed {assignment.title}, attempt {assignment.epoch}{step}{left}')
            with attempt_folder(self._work_folder, f'{_plain(assignment.job)}-e{assignment.epoch}') as folder:
                place = Workplace(folder, self.warm, self.programs, self.recipes)
                attempt = Attempt(assignment, backend, place, self.stop, self.log)
                outcome = attempt.run()
        except LeaseLost as error:
            self.log(f'{backend.job if backend else "a job"}: dropped: {error}')
            if backend is not None and backend.token_replaced:
                self._leaving, self._known = self._replaced, False
            return
        except Exception as error:  # also our own mistakes: the other jobs need this machine
            self.log(f'a job could not be done: {first_line(error, with_type=True)}')
            if not isinstance(error, MachineError | OSError):
                self.log(traceback.format_exc())
            self.failures += 1
            if backend is not None:
                self._report(backend, AttemptEnd(None, 0, 'node_fault', first_line(error, with_type=True)))
            return
        self._count(outcome)
        ended = outcome.ending or f'exit code {outcome.exit_code}'
        reason = f': {outcome.message.splitlines()[0]}' if outcome.ending == 'node_fault' and outcome.message else ''
        self.log(f'{assignment.title}: ended ({ended}) at step {outcome.step:,} after {(time.monotonic() - began) / 60:.1f} min{reason}')
        if attempt.order == Order.RELEASE:
            self._leaving = 'asked to give the job back'

    def _report(self, backend: PresignedBackend, outcome: AttemptEnd) -> None:
        try:
            backend.end(outcome, lambda: False)
        except Exception as error:  # the lease ends by itself
            self.log(f'{backend.job}: the end was not reported: {first_line(error)}')

    def _count(self, outcome: AttemptEnd) -> None:
        """Failures that are perhaps the machine's own."""
        if outcome.exit_code == FINISHED:
            self.failures = 0
        elif outcome.ending == 'node_fault' or (outcome.exit_code is not None and outcome.exit_code not in BLAMELESS):
            self.failures += 1

    def _leave(self) -> None:
        self.log(f'leaving: {self._leaving}')
        if not self._known:
            return
        deadline = time.monotonic() + LEAVING_SEC
        for pause_sec in growing_pauses():
            try:
                self.client.post('/leave', {})
                return
            except ServiceAway:
                if time.monotonic() + pause_sec > deadline:
                    return  # the session ends by itself when nothing comes
            threading.Event().wait(pause_sec)


def _kept_token(file: Path, machine: str) -> list[str]:
    """Return the token that this machine had last; [] if it had another name, or none."""
    try:
        name, _, token = file.read_text().partition(' ')
    except (OSError, UnicodeDecodeError):
        return []
    return [token] if name == machine and token.isascii() and token.isprintable() else []


def _plain(text: str) -> str:
    return ''.join(character if character.isalnum() or character in '-_' else '-' for character in text)[:80]
