"""Rows of the database as the policies know them (policies/rows.py). Times are seconds since 1970 by the database's clock."""

from typing import Any

from fleet.jobs.spec import JobLimits, MachineNeeds
from fleet.policies.hand_out import order_of_owner, why_waiting
from fleet.policies.rows import AttemptRow, Ban, Ending, JobRow, JobState, NodeRow, NodeState, OwnerRow
from fleet.queue.database import Connection

JOB = """
    j.id::text, j.owner, j.number, j.state, j.priority, extract(epoch from j.not_before)::float8 as not_before, j.epoch, j.node,
    extract(epoch from j.lease_until)::float8 as lease_until, j.step, j.num_steps, j.recipe, j.gpu_gb, j.image, j.trusted, 
    j.spec->'limits' as limits, j.counted_from as forgiven
"""
ATTEMPT = """
    a.job::text, a.epoch, a.node, a.gpu, a.recipe, extract(epoch from a.started)::float8 as started,
    extract(epoch from a.last_sign)::float8 as last_sign, a.first_step, a.last_step, a.price_per_hour,
    extract(epoch from a.ended)::float8 as ended, a.ending, a.exit_code, a.message, a.steps_per_sec, j.owner
    from attempt a join job j on j.id = a.job
"""
NODE = """
    n.name, n.state, n.gpu, n.gpu_gb, n.image, p.trusted, extract(epoch from n.last_seen)::float8 as last_seen,
    array(select r.name from recipe r where n.recipes ->> r.name = r.sha256) as recipes
    from node n join pool p on p.name = n.pool
"""
BAN = 'job::text, node, extract(epoch from since)::float8 as since, extract(epoch from until)::float8 as until, reason from ban'
# An owner's dollars are those of attempts that have ended and, so far, of those that run.
OWNER = """
    o.name, o.max_leased, coalesce(running.num, 0) as num_leased, o.budget_dollars - o.spent_dollars - coalesce(running.dollars, 0) as dollars_left,
    case when isfinite(o.last_leased) then extract(epoch from o.last_leased)::float8 else 0 end as last_leased
    from owner o left join lateral (
        select count(*) as num, sum(a.dollars) as dollars
        from job j join attempt a on a.job = j.id and a.epoch = j.epoch where j.owner = o.name and j.state = 'leased'
    ) running on true
"""


def now(connection: Connection) -> float:
    """The transaction's time."""
    return _one(connection, 'select extract(epoch from now())::float8 as now')['now']


def jobs(connection: Connection, condition: str, *values: Any) -> list[JobRow]:
    """The jobs `j` of a condition."""
    found = []
    for row in connection.execute(f'select {JOB} from job j where {condition}', values):
        needs = MachineNeeds(row.pop('gpu_gb'), row.pop('image'), row.pop('trusted'))
        found.append(JobRow(**{**row, 'state': JobState(row['state']), 'limits': JobLimits(**row['limits']), 'needs': needs}))
    return found


def attempts(connection: Connection, condition: str, *values: Any) -> list[AttemptRow]:
    """The attempts `a` at jobs `j` of a condition, in no order."""
    rows = connection.execute(f'select {ATTEMPT} where {condition}', values)
    return [AttemptRow(**{**row, 'ending': Ending(row['ending']) if row['ending'] else None}) for row in rows]


def nodes(connection: Connection, condition: str = 'true', *values: Any) -> list[NodeRow]:
    """The nodes `n` of a condition."""
    rows = connection.execute(f'select {NODE} where {condition} order by n.name', values)
    return [NodeRow(**{**row, 'state': NodeState(row['state'])}) for row in rows]


def bans(connection: Connection, condition: str = 'until > now()', *values: Any) -> list[Ban]:
    return [Ban(**row) for row in connection.execute(f'select {BAN} where {condition}', values)]


def owners(connection: Connection, condition: str = 'true', *values: Any) -> list[OwnerRow]:
    """The owners `o` of a condition."""
    return [OwnerRow(**row) for row in connection.execute(f'select {OWNER} where {condition}', values)]


def why_job_waits(connection: Connection, id: str) -> str:
    """Why a job waits (policies/hand_out.py); '' if it does not."""
    job = jobs(connection, 'j.id = %s', id)[0]
    if job.state is not JobState.QUEUED:
        return ''
    before = _one(
        connection,
        """select count(*) as num from job where owner = %s and state = 'queued' and not_before <= now()
        and (epoch = 0, -priority, number) < (%s, %s, %s)""",
        job.owner, *order_of_owner(job),
    )  # fmt: skip
    live = nodes(connection, 'n.state = %s', NodeState.LIVE)
    return why_waiting(job, owners(connection, 'o.name = %s', job.owner)[0], live, bans(connection, 'job = %s', id), before['num'], now(connection))


def _one(connection: Connection, query: str, *values: Any) -> dict[str, Any]:
    row = connection.execute(query, values).fetchone()
    assert row is not None
    return row
