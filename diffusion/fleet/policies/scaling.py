"""How many machines the fleet wants, and which idle ones may leave."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import ceil

from diffusion.fleet.policies.hand_out import is_takeable
from diffusion.fleet.policies.rows import JobRow, NodeRow, NodeState, OwnerRow
from diffusion.fleet.policies.spending import may_lease


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
        num_stranded: jobs that every live machine is banned from (last_job.py): one machine more than there are has to come.
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
