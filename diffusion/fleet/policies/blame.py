"""What becomes of a job when an attempt at it has ended, and whose fault a failure was.

A machine may be broken and a job may be wrong, and one failure does not tell which. Therefore a crash or a stall
- counts against the job (`limits.attempts`) only if its machine is proven: it has finished some other job;
- is a loss like a machine that vanished (`limits.losses`) if its machine is quarantined, or says itself that it cannot work;
- counts neither way if its machine has finished nothing else yet. Later it may: all attempts are judged again each time. As nothing may run for
  ever, `UNPROVEN` times `limits.attempts` failures on machines that are not quarantined end the job too, proven or not.
Hours and dollars are a last limit. The job that failed on a machine, or was lost there twice at the same step, does not return to it for a day.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from diffusion.fleet.policies.endings import COUNTED, HOPELESS, describe, repeated_losses
from diffusion.fleet.policies.rows import AttemptRow, Ban, Ending, JobRow, JobState
from diffusion.fleet.policies.spending import beyond_limits

BAN_SEC = 24 * 3600.0
UNPROVEN = 3
FIRST_PAUSE_SEC, LONGEST_PAUSE_SEC = 30.0, 900.0

_SAY_NOTHING = (Ending.LOST, Ending.RELEASED)
_BANNED = COUNTED | {Ending.NON_FINITE, Ending.NODE_FAULT}


@dataclass(frozen=True)
class JobDecision:
    state: JobState
    cause: str  # for the owner: why the job failed, with all messages, or how the attempt ended
    not_before: float = 0.0  # of a job that is queued again
    bans: tuple[Ban, ...] = ()  # to add


def judge(job: JobRow, attempts: Sequence[AttemptRow], proven: Collection[str], quarantined: Collection[str], now: float) -> JobDecision:
    """Decide on a job whose newest attempt has just ended.

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
    if newest.ending in HOPELESS:
        return newest.message or describe(newest)
    if newest.ending is Ending.LIMIT:
        return beyond_limits(job, attempts) or newest.message or 'its hours or dollars are spent'
    if reason := beyond_limits(job, attempts):
        return _with_messages(reason, attempts)
    failed = [attempt for attempt in attempts if attempt.ending in COUNTED or attempt.ending is Ending.NON_FINITE]
    own = [attempt for attempt in failed if attempt.node not in quarantined]
    if newest.ending is Ending.NON_FINITE:
        nodes = {attempt.node for attempt in own if attempt.ending is Ending.NON_FINITE}
        if len(nodes) >= 2:
            return _with_messages(f'the loss stayed NaN or infinite on {len(nodes)} machines: look at learning rate and data', own)
    if newest in own:
        counted = [attempt for attempt in own if attempt.ending in COUNTED and attempt.node in proven]
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
    if attempts[-1].ending in _SAY_NOTHING:
        return 0.0
    attempts = [attempt for attempt in attempts if attempt.ending not in _SAY_NOTHING]
    idle = 0
    while idle < len(attempts) and attempts[-1 - idle].last_step <= attempts[-1 - idle].first_step:
        idle += 1
    return 0.0 if idle < 2 else min(LONGEST_PAUSE_SEC, FIRST_PAUSE_SEC * 2.0 ** min(idle - 2, 10))


def _ban(attempt: AttemptRow, now: float) -> Ban:
    return Ban(attempt.job, attempt.node, now, now + BAN_SEC, describe(attempt)[:200])


def _with_messages(reason: str, attempts: Iterable[AttemptRow]) -> str:
    return '\n'.join([reason, *(f'  {describe(attempt)}' for attempt in attempts)])
