"""Limits of jobs and owners: hours and dollars of machines, and leases at the same time."""

from collections.abc import Iterable
from statistics import median

from fleet.policies.rows import AttemptRow, Ending, JobRow, OwnerRow


def why_stopped(job: JobRow, attempts: Iterable[AttemptRow], owner: OwnerRow) -> str | None:
    """Why the job's running attempt must stop, for its owner; None: it goes on. Asked at each renewal.

    A job beyond its own limits is given up when it has; one whose owner has no money waits in the queue for more.

    Args:
        attempts: all of the job, the running one up to its last sign.
    """
    if reason := beyond_limits(job, attempts):
        return reason
    if owner.dollars_left <= 0:
        return f'the budget of {owner.name} is spent ({-owner.dollars_left:.2f} dollars beyond it): the job waits until it is raised'
    return None


def beyond_limits(job: JobRow, attempts: Iterable[AttemptRow]) -> str | None:
    """Why the job may cost no more; None: it may."""
    hours, dollars = spent(job, attempts)
    if hours >= job.limits.hours:
        return f'{hours:.2f} hours on machines, limits.hours is {job.limits.hours:g}: raise it and retry the job'
    if dollars >= job.limits.dollars:
        return f'{dollars:.4f} dollars for machines, limits.dollars is {job.limits.dollars:g}: raise it and retry the job'
    return None


def hours_left(job: JobRow, attempts: Iterable[AttemptRow], price_per_hour: float) -> float:
    """Hours that the job may still run at this price before one of its limits is reached."""
    hours, dollars = spent(job, attempts)
    of_money = (job.limits.dollars - dollars) / price_per_hour if price_per_hour > 0 else float('inf')
    return max(0.0, min(job.limits.hours - hours, of_money))


def spent(job: JobRow, attempts: Iterable[AttemptRow]) -> tuple[float, float]:
    """(hours, dollars) of the job's attempts that count."""
    counted = [attempt for attempt in attempts if attempt.epoch > job.forgiven]
    return sum(attempt.billed_sec for attempt in counted) / 3600, sum(attempt.dollars for attempt in counted)


def may_lease(owner: OwnerRow) -> bool:
    """Whether the owner may get one more lease."""
    return owner.num_leased < owner.max_leased and owner.dollars_left > 0


# When a machine is so slow that its job is better moved: below half the median speed of others with the same GPU at the same recipe.
#
# Not by standard deviations: the slow ones themselves would widen them. Each machine has one voice, so that none can make the others look slow.

MIN_PEERS = 20
MIN_SHARE_OF_JOB = 0.1
MIN_SEC = 180.0
MIN_SHARE_OF_MEDIAN = 0.5


def reference_speed(attempt: AttemptRow, peers: Iterable[AttemptRow]) -> float | None:
    """Median steps/s of other machines with the same recipe and GPU, each by the median of its attempts; None if there are too few attempts.

    Args:
        peers: of any recipe and machine; what a machine says of its speed counts if it has finished that job. Of thousands the newest few hundred are
            enough.
    """
    speeds: dict[str, list[float]] = {}
    for peer in peers:
        is_comparable = peer.node != attempt.node and (peer.recipe, peer.gpu) == (attempt.recipe, attempt.gpu)
        if peer.steps_per_sec is not None and peer.ending is Ending.DONE and is_comparable:
            speeds.setdefault(peer.node, []).append(peer.steps_per_sec)
    return median(map(median, speeds.values())) if sum(map(len, speeds.values())) >= MIN_PEERS else None


def why_slow(attempt: AttemptRow, job: JobRow, reference: float | None, now: float) -> str | None:
    """Why a running attempt is to be released and its machine drained, as text; None: it goes on. Asked at each renewal.

    Args:
        reference: `reference_speed`, steps/s.
    """
    if reference is None or attempt.steps_per_sec is None:
        return None
    num_done = attempt.last_step - attempt.first_step
    is_long_enough = now - attempt.started >= MIN_SEC or (job.num_steps > 0 and num_done >= MIN_SHARE_OF_JOB * job.num_steps)
    if not is_long_enough or attempt.steps_per_sec >= MIN_SHARE_OF_MEDIAN * reference:
        return None
    return f'{attempt.node} makes {attempt.steps_per_sec:.3g} steps/s, others with {attempt.gpu} {reference:.3g}: below {MIN_SHARE_OF_MEDIAN:g} of it'
