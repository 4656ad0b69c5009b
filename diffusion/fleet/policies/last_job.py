"""A job that no machine may take any more because each has failed it: one more machine is asked for, and after a while one of them tries again.

Otherwise the last job of a run and the last machine, banned from it, would wait for a person.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from diffusion.fleet.policies.hand_out import fits
from diffusion.fleet.policies.rows import Ban, JobRow, JobState, NodeRow, NodeState

WAIT_SEC = 900.0


@dataclass(frozen=True)
class Stranded:
    job: JobRow
    lift: Ban | None  # the ban to remove; None: not yet


def stranded(jobs: Iterable[JobRow], nodes: Iterable[NodeRow], bans: Collection[Ban], now: float) -> list[Stranded]:
    """Queued jobs that every live machine is banned from; machines that a job does not fit are not counted.

    The oldest ban is lifted 15 min after the newest one, which closed the last machine to the job: by then the additional machine
    (scaling.py) could have come. Without a live machine there is no such job: an additional machine comes anyway.
    """
    by_job: dict[str, dict[str, Ban]] = {}
    for ban in bans:
        if ban.until > now:
            by_job.setdefault(ban.job, {})[ban.node] = ban
    live = [node for node in nodes if node.state is NodeState.LIVE] if by_job else []
    found = []
    for job in jobs:
        banned = by_job.get(job.id)
        if job.state is not JobState.QUEUED or not banned or any(node.name not in banned and fits(job, node) for node in live):
            continue
        own = [banned[node.name] for node in live if fits(job, node)]
        if own:
            oldest = min(own, key=lambda ban: (ban.since, ban.node))
            is_due = now >= max(ban.since for ban in own) + WAIT_SEC
            found.append(Stranded(job, oldest if is_due else None))
    return found
