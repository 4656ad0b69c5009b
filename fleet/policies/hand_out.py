"""Which job a machine gets when it asks for one. The claim (queue/leases.py) says it in SQL, tests/fleet/reference.py in Python.

Of each owner one job is looked at, the first that the machine may take: those that have begun, then by priority, then as submitted. Among the
owners' jobs one that has begun goes first (a machine's death costs no more than the lease), then the owner with the fewest leases, then the one
that has waited longest for a lease, then the job that was submitted first. So neither priority nor thousands of jobs are of use against other owners.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from math import ceil

from diffusion.common.text import counted
from fleet.policies.limits import may_lease
from fleet.policies.rows import Ban, JobRow, JobState, NodeRow, NodeState, OwnerRow


def order_of_owner(job: JobRow) -> tuple[bool, int, int]:
    """Sorts the jobs of one owner: the first is handed out first."""
    return job.epoch == 0, -job.priority, job.number


def is_takeable(job: JobRow, node: NodeRow, now: float) -> bool:
    """Whether the job waits and fits the machine; bans and the owner's limits are not asked here."""
    return job.state is JobState.QUEUED and job.not_before <= now and fits(job, node)


def fits(job: JobRow, node: NodeRow) -> bool:
    """Whether the machine has what the job needs."""
    needs = job.needs
    is_like = needs.gpu_gb <= node.gpu_gb and needs.image in (None, node.image) and (node.trusted or not needs.trusted)
    return is_like and (node.recipes is None or job.recipe in node.recipes)


# A job that no machine may take any more because each has failed it: one more machine is asked for, and after a while one of them tries again.
#
# Otherwise the last job of a run and the last machine, banned from it, would wait for a person.

WAIT_SEC = 900.0


@dataclass(frozen=True)
class Stranded:
    job: JobRow
    lift: Ban | None  # the ban to remove; None: not yet


def stranded(jobs: Iterable[JobRow], nodes: Iterable[NodeRow], bans: Collection[Ban], now: float) -> list[Stranded]:
    """Queued jobs that every live machine is banned from; machines that a job does not fit are not counted.

    The oldest ban is lifted 15 min after the newest one, which closed the last machine to the job: by then the additional machine
    (below) could have come. Without a live machine there is no such job: an additional machine comes anyway.
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


# Why a job waits, in words for its owner: the first reason that keeps it from every machine, else its place in the queue.


def why_waiting(job: JobRow, owner: OwnerRow, nodes: Iterable[NodeRow], bans: Collection[Ban], num_before: int, now: float) -> str:
    """A sentence, which names no machine: they may be of no concern to the owner. '' for a job that does not wait.

    Args:
        owner: of the job.
        bans: may be of other jobs and over.
        num_before: jobs of the owner that are handed out before this one (`order_of_owner`).
    """
    if job.state is not JobState.QUEUED:
        return ''
    if owner.dollars_left <= 0:
        beyond = f' ({-owner.dollars_left:,.4f} dollars beyond it)' if owner.dollars_left < 0 else ''
        return f'the budget of {owner.name} is spent{beyond}; an operator raises it: owners {owner.name} --budget-dollars X'
    if owner.num_leased >= owner.max_leased:
        return f'{counted(owner.num_leased, "job")} of {owner.name} on machines, at most {owner.max_leased:,} may be: it waits for one of them to end'
    live = [node for node in nodes if node.state is NodeState.LIVE]
    if not live:
        return 'no machine is here that takes jobs'
    fitting = [node for node in live if fits(job, node)]
    if not fitting:
        return _misfit(job, live)
    banned = {ban.node: ban for ban in bans if ban.job == job.id and ban.until > now}
    if all(node.name in banned for node in fitting):
        return f'each machine that it fits has failed it ({counted(len(fitting), "machine")}); it waits for another, or for the end of a ban'
    if job.not_before > now:
        return f'it was given back and is handed out again in {job.not_before - now:,.0f} s'
    if num_before:
        return f'{counted(num_before, "job")} of {owner.name} before it'
    return f'it is the next one of {owner.name}, for the next machine that asks'


def _misfit(job: JobRow, live: list[NodeRow]) -> str:
    """Which of its needs no machine meets."""
    needs, wrong = job.needs, list[str]()
    largest_gb = max(node.gpu_gb for node in live)
    if needs.gpu_gb > largest_gb:
        wrong.append(f'needs.gpu_gb is {needs.gpu_gb:g}, the largest GPU here has {largest_gb:g}')
    if needs.image is not None and all(node.image != needs.image for node in live):
        wrong.append(f'no machine here has the image {needs.image} (needs.image)')
    if needs.trusted and not any(node.trusted for node in live):
        wrong.append('no machine here is trusted (needs.trusted)')
    if all(node.recipes is not None and job.recipe not in node.recipes for node in live):
        wrong.append(f'no machine here has the recipe {job.recipe} as the service has it; the operator brings both to one version')
    return '; '.join(wrong) or 'no machine here has all that it needs together (gpu_gb, image, trusted, recipe)'


# How many machines the fleet wants, and which idle ones may leave.


@dataclass(frozen=True)
class ScalingLimits:
    max_nodes: int
    wanted_hours: float | None = None  # until the queue is empty; None: as soon as possible
    idle_sec: float = 600.0  # a machine that has nothing to do stays for so long


def num_takeable(jobs: Iterable[JobRow], new_node: NodeRow, owners: Mapping[str, OwnerRow], now: float, enough: int) -> int:
    """Queued jobs that a machine which has just come could take, within the leases that their owners may still get; counted up to `enough`.

    Args:
        new_node: what a machine of the fleet would be. A job that needs more than that calls for none.
    """
    num_free = {name: owner.max_leased - owner.num_leased for name, owner in owners.items() if may_lease(owner)}
    num = 0
    for job in jobs:
        if num >= enough:
            break
        if num_free.get(job.owner, 0) > 0 and is_takeable(job, new_node, now):
            num_free[job.owner] -= 1
            num += 1
    return num


def wanted_nodes(num_leased: int, num_takeable: int, num_stranded: int, num_live: int, remaining_hours: float | None, limits: ScalingLimits) -> int:
    """Machines wanted: one for each job that is leased or could be, and no more than the work or the limit allows.

    Args:
        num_stranded: jobs that every live machine is banned from: one machine more than there are has to come.
        remaining_hours: of all jobs, on machines; None: not known.
    """
    wanted = num_leased + num_takeable
    if remaining_hours is not None and limits.wanted_hours is not None:
        wanted = min(wanted, ceil(remaining_hours / limits.wanted_hours))
    if num_stranded:
        wanted = max(wanted, num_live + 1)
    return min(wanted, limits.max_nodes)


def nodes_to_drain(nodes: Iterable[NodeRow], idle_since: Mapping[str, float], wanted: int, now: float, limits: ScalingLimits) -> list[str]:
    """Names of live machines that are too many: idle ones alone, the longest idle first; down to none when the queue is empty.

    Args:
        idle_since: of machines without a lease, by name.
    """
    live = [node.name for node in nodes if node.state is NodeState.LIVE]
    idle = sorted((idle_since[name], name) for name in live if name in idle_since and now - idle_since[name] >= limits.idle_sec)
    return [name for _, name in idle[: max(0, len(live) - wanted)]]
