"""The rows that policies judge: what the queue remembers of jobs, attempts and nodes. Times are seconds of one clock, the database's."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import StrEnum

from diffusion.contracts.errors import BAD_DATA, BAD_RECIPE, FINISHED, NON_FINITE, PREEMPTED, STALLED, SUPERSEDED
from fleet.jobs.spec import JobLimits, MachineNeeds


class JobState(StrEnum):
    QUEUED = 'queued'
    LEASED = 'leased'
    DONE = 'done'
    FAILED = 'failed'
    CANCELLED = 'cancelled'


class NodeState(StrEnum):
    LIVE = 'live'
    DRAINING = 'draining'  # gets no more jobs, gives its own back, and leaves
    QUARANTINED = 'quarantined'  # too many failures of its own: gets no more jobs, and leaves
    GONE = 'gone'


class Ending(StrEnum):
    """How an attempt ended."""

    DONE = 'done'
    RECIPE = 'recipe'  # exit code 64
    DATA = 'data'  # 65, with inputs whose digests were right
    CRASHED = 'crashed'  # 70, a signal, out of memory, any other code
    STALLED = 'stalled'  # 76
    NON_FINITE = 'non_finite'  # 77
    STOPPED = 'stopped'  # 75: saved on request of the machine
    RELEASED = 'released'  # given back by a node that is slow or is to leave
    LOST = 'lost'  # its lease lapsed, or another process took its checkpoints (73)
    NODE_FAULT = 'node_fault'  # the worker says itself that its machine cannot
    CANCELLED = 'cancelled'
    LIMIT = 'limit'  # the job's hours or dollars were spent


@dataclass(frozen=True)
class JobRow:
    id: str
    owner: str
    number: int  # order of submission
    state: JobState
    limits: JobLimits
    needs: MachineNeeds
    priority: int = 0  # among the jobs of its owner
    not_before: float = 0.0
    epoch: int = 0  # of its newest attempt; 0: none yet
    node: str | None = None  # that holds its lease
    lease_until: float | None = None
    step: int = 0  # of its published checkpoint
    num_steps: int = 0  # of the whole job; 0: not known
    recipe: str = ''
    forgiven: int = 0  # attempts up to this epoch count no more, nor do their hours and dollars: its owner asked for another try


@dataclass(frozen=True)
class AttemptRow:
    job: str
    epoch: int
    node: str
    gpu: str
    recipe: str
    started: float
    last_sign: float  # renewal, publication or end
    first_step: int
    last_step: int
    price_per_hour: float
    ended: float | None = None
    ending: Ending | None = None  # None: still running
    exit_code: int | None = None
    message: str = ''
    steps_per_sec: float | None = None  # as its node last said
    owner: str = ''  # of the job

    @property
    def billed_sec(self) -> float:
        return self.last_sign - self.started

    @property
    def dollars(self) -> float:
        return self.billed_sec / 3600 * self.price_per_hour


@dataclass(frozen=True)
class NodeRow:
    name: str
    state: NodeState
    gpu: str
    gpu_gb: float
    image: str = ''
    trusted: bool = False
    last_seen: float = 0.0
    recipes: Collection[str] | None = None  # that it has as the service has them; None: all


@dataclass(frozen=True)
class OwnerRow:
    name: str
    max_leased: int
    num_leased: int
    dollars_left: float  # of the budget, less all attempts; running ones up to their last sign
    last_leased: float = 0.0  # when it last got a lease


@dataclass(frozen=True)
class Ban:
    """A node may not take a job until then."""

    job: str
    node: str
    since: float
    until: float
    reason: str


# Which ending a process's exit code means, and which endings are failures.

# 143 and 129 are a SIGTERM and a SIGHUP that came before train.py could act on them.
ENDINGS = {
    FINISHED: Ending.DONE,
    BAD_RECIPE: Ending.RECIPE,
    BAD_DATA: Ending.DATA,
    SUPERSEDED: Ending.LOST,
    PREEMPTED: Ending.STOPPED,
    STALLED: Ending.STALLED,
    NON_FINITE: Ending.NON_FINITE,
    143: Ending.STOPPED,
    129: Ending.STOPPED,
}

COUNTED = frozenset({Ending.CRASHED, Ending.STALLED})  # against the job or the machine: blame.py says which
REFUSED = frozenset({Ending.RECIPE, Ending.DATA})  # the same on every machine, if it is the job that is wrong
FAILURES = COUNTED | REFUSED | {Ending.NON_FINITE, Ending.NODE_FAULT}  # the machine was there to the end, and the job did not get through
RETURNED = frozenset({Ending.LOST, Ending.RELEASED, Ending.STOPPED})  # says nothing about the job, and nobody reported a failure


def ending_of(exit_code: int) -> Ending:
    """The ending that an exit code of train.py means; signals (negative, or 128 + signal) and all other codes are crashes."""
    return ENDINGS.get(exit_code, Ending.CRASHED)


def repeated_losses(attempts: Iterable[AttemptRow]) -> set[tuple[str, int]]:
    """(job, epoch) of attempts that were lost or given back where the same machine had done so with the same job before, and no checkpoint had come
    of it.

    Once is a machine that vanished, or had to go. Twice is one that came back and vanished again: its container is killed whole, such as by its
    memory limit, or it claims and forgets, or claims and gives back. Nobody reports a failure, so this is one.
    """
    seen, found = set(), set()
    for attempt in sorted(attempts, key=lambda attempt: attempt.epoch):
        if attempt.ending in RETURNED:
            loss = attempt.job, attempt.node, attempt.first_step
            if loss in seen:
                found.add((attempt.job, attempt.epoch))
            seen.add(loss)
    return found


def describe(attempt: AttemptRow) -> str:
    """`attempt 2 on gpu-7: crashed, exit code 70, after step 300: MESSAGE`."""
    ending = str(attempt.ending or 'running').replace('_', ' ')
    code = '' if attempt.exit_code is None else f', exit code {attempt.exit_code}'
    return (
        f'attempt {attempt.epoch} on {attempt.node}: {ending}{code}, after step {attempt.last_step}{": " if attempt.message else ""}{attempt.message}'
    )
