"""When a machine is so slow that its job is better moved: below half the median speed of others with the same GPU at the same recipe.

Not by standard deviations: the slow ones themselves would widen them. Each machine has one voice, so that none can make the others look slow.
"""

from collections.abc import Iterable
from statistics import median

from diffusion.fleet.policies.rows import AttemptRow, JobRow

MIN_PEERS = 20
MIN_SHARE_OF_JOB = 0.1
MIN_SEC = 180.0
MIN_SHARE_OF_MEDIAN = 0.5


def reference_speed(attempt: AttemptRow, peers: Iterable[AttemptRow]) -> float | None:
    """Median steps/s of other machines with the same recipe and GPU, each by the median of its attempts; None if there are too few attempts.

    Args:
        peers: of any recipe and machine, ended or running; of thousands the newest few hundred are enough.
    """
    speeds: dict[str, list[float]] = {}
    for peer in peers:
        if peer.steps_per_sec is not None and peer.node != attempt.node and (peer.recipe, peer.gpu) == (attempt.recipe, attempt.gpu):
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
