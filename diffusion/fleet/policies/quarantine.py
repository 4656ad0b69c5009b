"""When a machine gets no more jobs: three jobs have failed on it since it last finished one.

A failure is a crash, a stall, what the machine says of itself, or a job that was lost there twice at the same step (endings.py).
A failure there does not count if it is rather the job's, and this is what was seen of the job elsewhere:
1. it has done better elsewhere (finished, or runs beyond the step where it failed here): the failure is the machine's;
2. else it has failed elsewhere too: the job's;
3. else it was not tried elsewhere yet. Other machines that tried jobs of the same owner then vote: one is a witness for the owner if a job of it
   finished there, or lasted longer than this failure did; otherwise against, if one failed there. More against than for: the job's.
   Else, also without any witness, the machine's.
So one owner's thousand crashing jobs cost the machine that meets them before all others, and no second; a broken machine among healthy ones goes
after three failures; and several broken ones among more healthy ones too. What is missing: if most machines are broken in the same hour, such as by
an image that does not start, they are taken for healthy ones until the jobs do better elsewhere.
"""

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import replace

from diffusion.common.text import counted
from diffusion.fleet.policies.endings import COUNTED, FAILURES, describe, repeated_losses
from diffusion.fleet.policies.rows import AttemptRow, Ending

MIN_FAILED_JOBS = 3
MAX_LINE = 200  # characters of a failure's message in the reason

_SUSPICIOUS = COUNTED | {Ending.NODE_FAULT}


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
    lines = failure.message.strip().splitlines()
    return replace(failure, message=lines[-1].strip()[:MAX_LINE] if lines else '')


class Elsewhere:
    """What was seen of jobs and their owners on other machines than `node`."""

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
        return num_against <= num_for

    def _is_failure(self, attempt: AttemptRow) -> bool:
        return attempt.ending in FAILURES or (attempt.job, attempt.epoch) in self._lost

    def _did_better(self, attempt: AttemptRow, failure: AttemptRow) -> bool:
        if attempt.ending is Ending.DONE:
            return True
        return not self._is_failure(attempt) and attempt.last_step > failure.last_step
