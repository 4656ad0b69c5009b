"""Judgement of a job when an attempt at it has ended, and of whose fault a failure was.

A machine may be broken and a job may be wrong, and one failure does not tell which. Also "the recipe is wrong" (64) and "the data are wrong" (65) may
be said by a machine of another installation: the service has judged the recipe when the job came. Therefore a crash, a stall, a 64 or a 65
- counts against the job (`limits.attempts`; of the same 64 or 65 two suffice) only if its machine is proven: it has finished some other job;
- is a loss like a machine that vanished (`limits.losses`) if its machine is quarantined, or says itself that it cannot work;
- counts neither way if its machine has finished nothing else yet. Later it may: all attempts are judged again each time. As nothing may run for
  ever, `UNPROVEN` times `limits.attempts` failures on machines that are not quarantined end the job too, proven or not.
Hours and dollars are a last limit. The job that failed on a machine, or was lost or given back there twice at the same step, does not return to it
for a day.
"""

from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from diffusion.common.text import counted
from fleet.policies.limits import beyond_limits
from fleet.policies.rows import (
    COUNTED,
    FAILURES,
    REFUSED,
    RETURNED,
    AttemptRow,
    Ban,
    Ending,
    JobRow,
    JobState,
    describe,
    repeated_losses,
)

BAN_SEC = 24 * 3600.0
UNPROVEN = 3
ENOUGH_REFUSALS = 2  # by two machines, as the first gets the job again only if for 15 minutes no other has come
FIRST_PAUSE_SEC, LONGEST_PAUSE_SEC = 30.0, 900.0

_AT_ONCE = RETURNED - {Ending.STOPPED}
_BANNED = COUNTED | REFUSED | {Ending.NON_FINITE, Ending.NODE_FAULT}


@dataclass(frozen=True)
class JobDecision:
    state: JobState
    cause: str  # for the owner: why the job failed, with all messages, or how the attempt ended
    not_before: float = 0.0  # of a job that is queued again
    bans: tuple[Ban, ...] = ()  # to add


def judge(job: JobRow, attempts: Sequence[AttemptRow], proven: Collection[str], quarantined: Collection[str], now: float) -> JobDecision:
    """Decide on a job of which no attempt runs: its newest one has just ended, or a machine that has failed it has just proven itself.

    Args:
        attempts: all of the job, in any order.
        proven: those of the attempts' machines that have finished another job (`proven_nodes`).
        quarantined: those of the attempts' machines that are or were quarantined.
    """
    attempts = sorted(attempts, key=lambda attempt: attempt.epoch)
    newest = attempts[-1]
    attempts = [attempt for attempt in attempts if attempt.epoch > job.forgiven or attempt is newest]
    if newest.ending is None:
        raise ValueError(f'job {job.id}: attempt {newest.epoch} has not ended')
    if newest.ending is Ending.DONE:
        return JobDecision(JobState.DONE, '')
    if newest.ending is Ending.CANCELLED:
        return JobDecision(JobState.CANCELLED, 'cancelled by its owner')
    is_banned = newest.ending in _BANNED or (newest.job, newest.epoch) in repeated_losses(attempts)
    bans = (_ban(newest, now),) if is_banned else ()
    if cause := _why_failed(job, attempts, newest, proven, quarantined):
        return JobDecision(JobState.FAILED, cause, bans=bans)
    return JobDecision(JobState.QUEUED, describe(newest), now + _pause_sec(attempts), bans)


def _why_failed(job: JobRow, attempts: list[AttemptRow], newest: AttemptRow, proven: Collection[str], quarantined: Collection[str]) -> str | None:
    """The cause of a job that ends as failed; None: it is tried again."""
    if newest.ending is Ending.LIMIT:
        return beyond_limits(job, attempts) or newest.message or 'its hours or dollars are spent'
    if reason := beyond_limits(job, attempts):
        return _with_messages(reason, attempts)
    failed = [attempt for attempt in attempts if attempt.ending in COUNTED | REFUSED or attempt.ending is Ending.NON_FINITE]
    own = [attempt for attempt in failed if attempt.node not in quarantined]
    if newest.ending is Ending.NON_FINITE:
        nodes = {attempt.node for attempt in own if attempt.ending is Ending.NON_FINITE}
        if len(nodes) >= 2:
            return _with_messages(f'the loss stayed NaN or infinite on {len(nodes)} machines: look at learning rate and data', own)
    if newest in own:
        on_proven = [attempt for attempt in own if attempt.node in proven]
        for ending, what in ((Ending.RECIPE, 'recipe is'), (Ending.DATA, 'data are')):
            refusals = [attempt for attempt in on_proven if attempt.ending is ending]
            if len(refusals) >= ENOUGH_REFUSALS:
                return _with_messages(f'its {what} wrong: {len(refusals)} machines say so that have finished other jobs', refusals)
        counted = [attempt for attempt in on_proven if attempt.ending in COUNTED]
        if len(counted) >= job.limits.attempts:
            return _with_messages(
                f'failed {len(counted)} times on machines that have finished other jobs, limits.attempts is {job.limits.attempts}', counted
            )
        if len(own) >= UNPROVEN * job.limits.attempts:
            return _with_messages(f'failed {len(own)} times, {UNPROVEN} x limits.attempts, on machines that have not finished other jobs either', own)
    if newest not in own and newest.ending not in (Ending.STOPPED, Ending.RELEASED):
        losses = [a for a in attempts if a.ending in (Ending.LOST, Ending.NODE_FAULT) or (a in failed and a not in own)]
        if len(losses) > job.limits.losses:
            return _with_messages(f'{len(losses)} machines vanished or broke down with it, limits.losses is {job.limits.losses}', losses)
    return None


def reopened(
    node: str, failed: Iterable[JobRow], attempts: Mapping[str, Sequence[AttemptRow]], proven: Mapping[str, Collection[str]],
    quarantined: Collection[str], now: float,
) -> list[tuple[JobRow, JobDecision]]:  # fmt: skip
    """Jobs that failed, and would not have without `node`, which has just been quarantined: they return to the queue, as decided.

    Args:
        failed: jobs in state failed that `node` has tried; others are left alone.
        attempts, proven: as of `judge`, by job.
        quarantined: machines, with or without `node`.
    """
    found = []
    for job in failed:
        if job.state is JobState.FAILED and any(attempt.node == node for attempt in attempts[job.id]):
            decision = judge(job, attempts[job.id], proven[job.id], {*quarantined, node}, now)
            if decision.state is JobState.QUEUED:
                cause = f'{node} is quarantined: what failed there counts no more'
                found.append((job, JobDecision(JobState.QUEUED, cause, now)))
    return found


def proven_nodes(job: str, attempts: Iterable[AttemptRow]) -> set[str]:
    """Machines that have finished a job other than this one."""
    return {attempt.node for attempt in attempts if attempt.ending is Ending.DONE and attempt.job != job}


def _pause_sec(attempts: list[AttemptRow]) -> float:
    """A job whose attempts end without a step waits, longer each time; the first retry, which is on another machine, is at once.

    Machines that vanish or are to leave say nothing about the job: it returns to the queue at once.
    """
    if attempts[-1].ending in _AT_ONCE:
        return 0.0
    attempts = [attempt for attempt in attempts if attempt.ending not in _AT_ONCE]
    idle = 0
    while idle < len(attempts) and attempts[-1 - idle].last_step <= attempts[-1 - idle].first_step:
        idle += 1
    return 0.0 if idle < 2 else min(LONGEST_PAUSE_SEC, FIRST_PAUSE_SEC * 2.0 ** min(idle - 2, 10))


def _ban(attempt: AttemptRow, now: float) -> Ban:
    return Ban(attempt.job, attempt.node, now, now + BAN_SEC, describe(attempt)[:200])


def _with_messages(reason: str, attempts: Iterable[AttemptRow]) -> str:
    return '\n'.join([reason, *(f'  {describe(attempt)}' for attempt in attempts)])


# When a machine gets no more jobs: three jobs have failed on it since it last finished one.
#
# A failure is a crash, a stall, a recipe or data that it calls wrong, what it says of itself, or a job that was lost or given back there twice at the
# same step (rows.py).
# A failure there does not count if it is rather the job's, and this is what was seen of the job elsewhere:
# 1. it has done better elsewhere (finished, or runs beyond the step where it failed here): the failure is the machine's;
# 2. else it has failed elsewhere too: the job's;
# 3. else it was not tried elsewhere yet. Other machines that tried jobs of the same owner then vote: one is a witness for the owner if a job of it
#    finished there, or lasted longer than this failure did; otherwise against, if one failed there. More against than for: the job's.
#    Else, also without any witness, the machine's; of data that it calls wrong the job's, as owners do hand in photos that nobody can read.
# So one owner's thousand crashing jobs cost the machine that meets them before all others, and no second; a broken machine among healthy ones goes
# after three failures; and several broken ones among more healthy ones too. What is missing: if most machines are broken in the same hour, such as by
# an image that does not start, they are taken for healthy ones until the jobs do better elsewhere.

MIN_FAILED_JOBS = 3
MAX_LINE = 200  # characters of a failure's message in the reason

_SUSPICIOUS = COUNTED | REFUSED | {Ending.NODE_FAULT}


def failures_since_success(attempts: Iterable[AttemptRow]) -> list[AttemptRow]:
    """Failures of a machine since it last finished a job, the newest of each job; [] if they are of too few jobs to look any further.

    Args:
        attempts: of one machine, in any order; those since its newest success are enough.
    """
    failures: dict[str, AttemptRow] = {}
    attempts = [one for one in attempts if one.ended is not None]
    lost = repeated_losses(attempts)
    for attempt in sorted(attempts, key=lambda one: one.ended or 0.0):
        if attempt.ending is Ending.DONE:
            failures.clear()
        elif attempt.ending in _SUSPICIOUS or (attempt.job, attempt.epoch) in lost:
            failures[attempt.job] = attempt
    return list(failures.values()) if len(failures) >= MIN_FAILED_JOBS else []


def why_quarantined(node: str, attempts: Iterable[AttemptRow], elsewhere: Iterable[AttemptRow]) -> str | None:
    """Why a machine is quarantined, as text for its operator; None: it is not. To be asked when an attempt has failed on it, and by the sweeper.

    Args:
        attempts: of this machine, as of `failures_since_success`, which tells whether `elsewhere` is needed at all.
        elsewhere: attempts, running ones too, of the owners of these failures on other machines, quarantined ones too. Those of the last hours are
            enough, and of 1,000 the newest.
    """
    failures = failures_since_success(attempts)
    if not failures:
        return None
    seen = Elsewhere(node, elsewhere)
    own = [failure for failure in failures if seen.is_the_nodes(failure)]
    if len(own) < MIN_FAILED_JOBS:
        return None
    return '\n'.join([f'{counted(len(own), "job")} failed on {node} since it last finished one', *(f'  {describe(_brief(one))}' for one in own)])


def _brief(failure: AttemptRow) -> AttemptRow:
    """With the last line of its message alone: the reason is read in a list of machines, and a traceback says in its last line what happened."""
    lines = [line for line in failure.message.splitlines() if any(map(str.isalnum, line))]  # a cut traceback may end with ^^^^^^
    return replace(failure, message=lines[-1].strip()[:MAX_LINE] if lines else '')


class Elsewhere:
    """Sightings of jobs and their owners on other machines than `node`."""

    def __init__(self, node: str, attempts: Iterable[AttemptRow]):
        self._by_job: dict[str, list[AttemptRow]] = {}
        lasted: dict[str, dict[str, float]] = {}  # longest attempt without a failure, seconds, by owner and machine; infinite: finished
        failed: dict[str, set[str]] = {}  # machines by owner
        attempts = list(attempts)
        self._lost = repeated_losses(attempts)
        for attempt in attempts:
            if attempt.node == node:
                continue
            self._by_job.setdefault(attempt.job, []).append(attempt)
            if self._is_failure(attempt):
                failed.setdefault(attempt.owner, set()).add(attempt.node)
            else:
                of_owner = lasted.setdefault(attempt.owner, {})
                seconds = float('inf') if attempt.ending is Ending.DONE else attempt.billed_sec
                of_owner[attempt.node] = max(seconds, of_owner.get(attempt.node, 0.0))
        self._lasted = {owner: sorted(of_owner.values()) for owner, of_owner in lasted.items()}
        self._failed = {owner: sorted(lasted.get(owner, {}).get(name, 0.0) for name in names) for owner, names in failed.items()}

    def is_the_nodes(self, failure: AttemptRow) -> bool:
        """Whether a failure counts against its machine, as the top of this file says."""
        same_job = self._by_job.get(failure.job, [])
        if any(self._did_better(attempt, failure) for attempt in same_job):
            return True
        if any(self._is_failure(attempt) for attempt in same_job):
            return False
        lasted = self._lasted.get(failure.owner, [])
        num_for = len(lasted) - bisect_right(lasted, failure.billed_sec)
        num_against = bisect_right(self._failed.get(failure.owner, []), failure.billed_sec)
        return num_against < num_for or (num_against == num_for and (num_for > 0 or failure.ending is not Ending.DATA))

    def _is_failure(self, attempt: AttemptRow) -> bool:
        return attempt.ending in FAILURES or (attempt.job, attempt.epoch) in self._lost

    def _did_better(self, attempt: AttemptRow, failure: AttemptRow) -> bool:
        if attempt.ending is Ending.DONE:
            return True
        return not self._is_failure(attempt) and attempt.last_step > failure.last_step
