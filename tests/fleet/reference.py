"""The claim in Python, from the rules in policies/hand_out.py alone: what PICK in queue/leases.py is held to."""

from fleet.policies.hand_out import is_takeable, order_of_owner
from fleet.policies.limits import may_lease
from fleet.policies.rows import NodeState


def choose(node, jobs, bans, owners, now):
    """The job that `node` gets; None: none of them. Owners are by name; bans may be of other jobs and machines too."""
    if node.state is not NodeState.LIVE:
        return None
    banned = {ban.job for ban in bans if ban.node == node.name and ban.until > now}
    firsts = {}
    for job in sorted(jobs, key=order_of_owner):
        if may_lease(owners[job.owner]) and job.id not in banned and is_takeable(job, node, now):
            firsts.setdefault(job.owner, job)

    def order(job):
        return job.epoch == 0, owners[job.owner].num_leased, owners[job.owner].last_leased, job.number

    return min(firsts.values(), key=order, default=None)
