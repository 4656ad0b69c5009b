"""Why a job waits, in words for its owner: the first reason that keeps it from every machine, else its place in the queue."""

from collections.abc import Collection, Iterable

from diffusion.common.text import counted
from diffusion.fleet.policies.hand_out import fits
from diffusion.fleet.policies.rows import Ban, JobRow, JobState, NodeRow, NodeState, OwnerRow


def why_waiting(job: JobRow, owner: OwnerRow, nodes: Iterable[NodeRow], bans: Collection[Ban], num_before: int, now: float) -> str:
    """A sentence, which names no machine: they may be of no concern to the owner. '' for a job that does not wait.

    Args:
        owner: of the job.
        bans: may be of other jobs and over.
        num_before: jobs of the owner that are handed out before this one (`hand_out.order_of_owner`).
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
    return '; '.join(wrong) or 'no machine here has all that it needs together (gpu_gb, image, trusted)'
