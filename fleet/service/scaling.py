"""Number of machines that the fleet wants, and which idle ones may leave: rows of the database for policies/hand_out.py."""

from dataclasses import replace
from typing import Any

from diffusion.common.text import counted
from fleet.policies.hand_out import ScalingLimits, nodes_to_drain, num_takeable, stranded, wanted_nodes
from fleet.policies.rows import JobRow, NodeRow, NodeState
from fleet.queue import reading
from fleet.queue.database import Connection

# The first of each owner that wait, and those that a machine is banned from.
QUEUED = """
    j.id in (
        select chosen.id from owner o cross join lateral (
            select id from job where owner = o.name and state = 'queued' and not_before <= now()
            order by (epoch > 0) desc, priority desc, number limit %s
        ) chosen
        union all select job from ban where until > now()
    ) and j.state = 'queued'
"""
# Hours on machines that a job of each recipe took in all, of those that ended well lately.
MEAN_HOURS = """
    select recipe, avg(hours) as hours from (
        select j.recipe, (select sum(extract(epoch from a.last_sign - a.started)::float8) / 3600 from attempt a where a.job = j.id) as hours
        from job j where j.state = 'done' order by j.ended desc limit 2000
    ) done group by recipe
"""
# Since when a live machine has nothing to do: since it came, or its last attempt ended.
IDLE = """
    select s.node, extract(epoch from greatest(s.started, (select max(a.ended) from attempt a where a.session = s.id)))::float8 as since
    from session s join node n on n.name = s.node
    where s.ended is null and n.state = 'live' and not exists (select 1 from job j where j.node = s.node and j.state = 'leased')
"""


def proposal(connection: Connection, limits: ScalingLimits) -> dict[str, Any]:
    """Return what to do about the number of machines: {replicas, wanted, drain, leased, takeable, stranded, live, remaining_hours, why}.

    `replicas` is never below the machines that work or have been idle for a short time only: those are not taken away.
    """
    now = reading.now(connection)
    queued = reading.jobs(connection, QUEUED, limits.max_nodes)
    nodes = reading.nodes(connection, "n.state = 'live'")
    owners = {owner.name: owner for owner in reading.owners(connection)}
    leased = connection.execute("select count(*)::int as num from job where state = 'leased'").fetchone()
    assert leased is not None
    takeable = num_takeable(map(_for_any_image, queued), _new_node(connection), owners, now, limits.max_nodes)
    lost = stranded(queued, nodes, reading.bans(connection), now)
    hours = remaining_hours(connection)
    wanted = wanted_nodes(leased['num'], takeable, len(lost), len(nodes), hours, limits)
    idle_since = {row['node']: row['since'] for row in connection.execute(IDLE)}
    drain = nodes_to_drain(nodes, idle_since, wanted, now, limits)
    replicas = max(wanted, len(nodes) - len(drain))
    why = [f'{counted(leased["num"], "job")} on machines', f'{takeable} could begin']
    why += [f'{hours:.1f} machine-hours left'] if hours is not None else []
    why += [f'{counted(len(lost), "job")} without a machine that may take it'] if lost else []
    why += [f'{counted(len(drain), "machine")} idle for too long'] if drain else []
    return {
        'replicas': replicas,
        'wanted': wanted,
        'drain': drain,
        'leased': leased['num'],
        'takeable': takeable,
        'stranded': len(lost),
        'live': len(nodes),
        'remaining_hours': hours,
        'why': ', '.join(why),
    }


def remaining_hours(connection: Connection) -> float | None:
    """Machine-hours until all jobs have ended, if each takes what its recipe took before, less the share of its checkpoint; None: not known."""
    mean = {row['recipe']: row['hours'] for row in connection.execute(MEAN_HOURS)}
    rows = connection.execute(
        """select recipe, sum(case when num_steps > 0 then greatest(0, 1 - step::float8 / num_steps) else 1 end) as shares
        from job where state in ('queued', 'leased') group by recipe"""
    ).fetchall()
    if any(row['recipe'] not in mean for row in rows):
        return None
    return sum(row['shares'] * mean[row['recipe']] for row in rows)


def _new_node(connection: Connection) -> NodeRow:
    """Return what a machine that comes is like: as large and as trusted as the largest that came lately; without any, whatever a job wants."""
    row = connection.execute(
        """select max(n.gpu_gb) as gpu_gb, bool_or(p.trusted) as trusted
        from (select * from node order by last_seen desc limit 100) n join pool p on p.name = n.pool"""
    ).fetchone()
    if row is None or row['gpu_gb'] is None:
        return NodeRow('', NodeState.LIVE, '', float('inf'), trusted=True)
    return NodeRow('', NodeState.LIVE, '', row['gpu_gb'], trusted=row['trusted'])


def _for_any_image(job: JobRow) -> JobRow:
    """Machines that come run the image that the operator deploys then, which no machine may have yet."""
    return replace(job, needs=replace(job.needs, image=None))
