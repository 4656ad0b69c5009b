"""Which job a machine gets when it asks for one. The claim of the queue says the same in SQL.

Of each owner one job is looked at, the first that the machine may take: those that have begun, then by priority, then as submitted. Among the
owners' jobs one that has begun goes first (a machine's death costs no more than the lease), then the owner with the fewest leases, then the one
that has waited longest for a lease, then the job that was submitted first. So neither priority nor thousands of jobs are of use against other owners.
"""

from collections.abc import Collection, Iterable, Mapping

from diffusion.fleet.policies.rows import Ban, JobRow, JobState, NodeRow, NodeState, OwnerRow
from diffusion.fleet.policies.spending import may_lease


def choose(node: NodeRow, jobs: Iterable[JobRow], bans: Collection[Ban], owners: Mapping[str, OwnerRow], now: float) -> JobRow | None:
    """The job that `node` gets; None: none of them.

    Args:
        jobs: in any order and state.
        bans: may be of other jobs and machines too.
        owners: by name, all owners of the jobs.
    """
    queues: dict[str, list[JobRow]] = {}
    for job in jobs:
        queues.setdefault(job.owner, []).append(job)
    for queue in queues.values():
        queue.sort(key=order_of_owner)
    return choose_sorted(node, queues, bans, owners, now)


def choose_sorted(
    node: NodeRow, queues: Mapping[str, Iterable[JobRow]], bans: Collection[Ban], owners: Mapping[str, OwnerRow], now: float
) -> JobRow | None:
    """`choose` from the jobs of each owner, sorted by `order_of_owner` already: no more than the first of each that may be taken are looked at."""
    if node.state is not NodeState.LIVE:
        return None
    banned = {ban.job for ban in bans if ban.node == node.name and ban.until > now}
    firsts = [
        next((job for job in queue if job.id not in banned and is_takeable(job, node, now)), None)
        for name, queue in queues.items() if may_lease(owners[name])
    ]  # fmt: skip
    return min((job for job in firsts if job), key=lambda job: _order_of_owners(job, owners[job.owner]), default=None)


def order_of_owner(job: JobRow) -> tuple[bool, int, int]:
    """Sorts the jobs of one owner: the first is handed out first."""
    return job.epoch == 0, -job.priority, job.number


def is_takeable(job: JobRow, node: NodeRow, now: float) -> bool:
    """Whether the job waits and fits the machine; bans and the owner's limits are not asked here."""
    return job.state is JobState.QUEUED and job.not_before <= now and fits(job, node)


def fits(job: JobRow, node: NodeRow) -> bool:
    """Whether the machine has what the job needs."""
    needs = job.needs
    return needs.gpu_gb <= node.gpu_gb and needs.image in (None, node.image) and (node.trusted or not needs.trusted)


def _order_of_owners(job: JobRow, owner: OwnerRow) -> tuple[bool, int, float, int]:
    return job.epoch == 0, owner.num_leased, owner.last_leased, job.number
