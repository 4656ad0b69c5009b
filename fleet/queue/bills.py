"""Costs of machines: by owner, by pool, by job, and what no attempt covers.

A provider bills a machine from the start of its stay to its last sign of life (`session`); an owner pays for attempts, each from its claim to its
last sign. The difference is time that a machine waited for a job. The start of an attempt, until its first step, is part of it and named as well.
"""

from datetime import datetime
from typing import Any

from fleet.queue.database import Connection

# Attempts and sessions of a period: what lies outside of it is cut off, so that the bills of two months add up to that of both.
PERIOD = """
    with period as (select coalesce(%(since)s::timestamptz, '-infinity') as since, coalesce(%(until)s::timestamptz, 'infinity') as until),
    tried as (
        select a.job, a.epoch, j.owner, n.pool, a.session, a.price_per_hour,
            extract(epoch from least(a.last_sign, period.until) - greatest(a.started, period.since))::float8 as sec,
            greatest(0, extract(epoch from least(a.progressed, a.last_sign, period.until) - greatest(a.started, period.since))::float8) as start_sec
        from attempt a join job j on j.id = a.job join node n on n.name = a.node cross join period
        where a.last_sign >= period.since and a.started < period.until and (%(owner)s::text is null or j.owner = %(owner)s)
    )
"""
SUMS = """
    count(*)::int as attempts, coalesce(sum(sec), 0) / 3600 as hours, coalesce(sum(sec * price_per_hour), 0) / 3600 as dollars,
    coalesce(sum(start_sec), 0) / 3600 as start_hours, coalesce(sum(start_sec * price_per_hour), 0) / 3600 as start_dollars
"""
# A session lasts to its last sign of life; the end of an attempt is one, although it may be written a moment after the machine's request was.
SESSIONS = """
    , stay as (
        select n.pool, s.price_per_hour, s.started, greatest(s.last_seen, own.last) as ended
        from session s join node n on n.name = s.node
        left join lateral (select max(last_sign) as last from attempt where attempt.session = s.id) own on true
    )
    select pool, count(*)::int as stays, sum(sec) / 3600 as hours, sum(sec * price_per_hour) / 3600 as dollars from (
        select pool, price_per_hour, extract(epoch from least(ended, period.until) - greatest(started, period.since))::float8 as sec
        from stay cross join period where ended >= period.since and started < period.until
    ) inside group by pool
"""
# Steps that were done twice: an attempt went further than the checkpoint from which the next one began, or will begin.
JOBS = f"""
    , sums as (select job, {SUMS} from tried group by job order by dollars desc, job limit %(limit)s),
    steps as (
        select job, sum(greatest(0, last_step - coalesce(next_step, case when state = 'queued' then step else last_step end)))::int as lost_steps,
            max(last_step) as reached
        from (
            select a.job, a.last_step, j.step, j.state, lead(a.first_step) over (partition by a.job order by a.epoch) as next_step
            from attempt a join job j on j.id = a.job where a.job in (select job from sums)
        ) of_job group by job
    )
    select j.id::text, j.number, j.name, j.owner, j.state, sums.attempts, sums.hours, sums.dollars, sums.start_hours, sums.start_dollars,
        steps.lost_steps, sums.dollars / nullif(steps.reached, 0) as dollars_per_step
    from sums join steps on steps.job = sums.job join job j on j.id = sums.job order by sums.dollars desc, j.number
"""


def bill(
    connection: Connection, owner: str | None = None, since: datetime | None = None, until: datetime | None = None, limit: int = 1000
) -> dict[str, Any]:
    """Sum up what machines cost.

    Args:
        owner: whose attempts; None: everyone's, and what no attempt covers.
        since, until: time that it covers; None: since the fleet's beginning, or until now.
        limit: jobs that are listed, the dearest first; the sums are of all.

    Returns:
        `total` and the lists `owners`, `pools` and `jobs`. Hours are of machines, dollars those of the price at enrolment. For everyone a pool
        also has `session_hours`, `session_dollars`, `idle_hours` and `idle_dollars`, and so has the total: the sum is what the provider bills.
    """
    values = {'since': since, 'until': until, 'owner': owner, 'limit': limit}

    def rows(query: str) -> list[dict[str, Any]]:
        return connection.execute(PERIOD + query, values).fetchall()

    (total,) = rows(f'select count(distinct job)::int as jobs, {SUMS} from tried')
    owners = rows(f'select owner, count(distinct job)::int as jobs, {SUMS} from tried group by owner order by dollars desc, owner')
    pools = {row['pool']: row for row in rows(f'select pool, {SUMS} from tried group by pool order by dollars desc, pool')}
    if owner is None:
        for stays in rows(SESSIONS):
            empty = {'pool': stays['pool'], 'attempts': 0, 'hours': 0.0, 'dollars': 0.0, 'start_hours': 0.0, 'start_dollars': 0.0}
            pool = pools.setdefault(stays['pool'], empty)
            pool |= {'stays': stays['stays'], 'session_hours': stays['hours'], 'session_dollars': stays['dollars']}
            pool |= {'idle_hours': stays['hours'] - pool['hours'], 'idle_dollars': stays['dollars'] - pool['dollars']}
        names = ('session_hours', 'session_dollars', 'idle_hours', 'idle_dollars')
        total |= {name: sum(pool.get(name, 0.0) for pool in pools.values()) for name in names}
    jobs = rows(JOBS)
    return {
        'since': since.isoformat() if since else None,
        'until': until.isoformat() if until else None,
        'total': total,
        'owners': owners,
        'pools': list(pools.values()),
        'jobs': jobs,
        'jobs_left_out': total['jobs'] - len(jobs),
    }
