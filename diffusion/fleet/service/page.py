"""`GET /`: how the fleet does, on a page: all of it for an operator, their own jobs for owners. It loads itself again and runs no script."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from starlette.responses import Response

from diffusion.common.pages import render_page
from diffusion.common.text import counted
from diffusion.fleet.policies.rows import JobState
from diffusion.fleet.queue.database import Connection, Database
from diffusion.fleet.service.access import Account, owner_of
from diffusion.fleet.service.http import Call

REFRESH_SEC = 30
MAX_JOBS, MAX_NODES, MAX_FAILURES, MAX_SLOW, MAX_OWNERS = 30, 30, 15, 5, 15
PACE_HOURS = 2.0  # of which the pace is the mean
ENOUGH_DONE = 3  # in that time, for a pace of whole jobs
SLOW_SHARE = 0.75  # of the median, below which a machine is shown as slow
ENOUGH_COMPARED = 3  # machines at one recipe and GPU, of which one can be the slowest
CHART_HOURS = 24
MAX_DONE = 1000  # the latest, of which the mean is taken
MINE = '(%(owner)s::text is null or j.owner = %(owner)s)'
HEADERS = {
    # Nothing is loaded and nothing runs, whatever a job is called.
    'Content-Security-Policy': "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'; form-action 'none'; base-uri 'none'",
    'Cache-Control': 'no-store',
    'Referrer-Policy': 'no-referrer',
    'X-Content-Type-Options': 'nosniff',
}


@dataclass(frozen=True)
class Outlook:
    """When the jobs will have ended, and how that is known.

    Attributes:
        jobs_per_hour: that ended well lately; None: too few.
        hours: from now; None: not known.
        how: a sentence.
    """

    jobs_per_hour: float | None
    hours: float | None
    how: str


class StatusPages:
    """The endpoint of the fleet's page."""

    def __init__(self, database: Database):
        self.database = database
        self.endpoints: dict[tuple[str, str], Callable[[Call], Response]] = {('GET', '/'): self.status}

    def status(self, asked: Call) -> Response:
        with self.database.transaction() as connection:
            owner = owner_of(connection, asked.token)
            values = overview(connection, owner)
        return Response(render_page('fleet.html', **values), media_type='text/html; charset=utf-8', headers=HEADERS)


def overview(connection: Connection, owner: Account) -> dict[str, Any]:
    """What the page shows, by name."""
    asked = {'owner': None if owner.is_operator else owner.name}

    def rows(query: str, **more: Any) -> list[dict[str, Any]]:
        return connection.execute(query, {**asked, **more}).fetchall()

    (moment,) = rows('select now() as now')
    now: datetime = moment['now'].astimezone(UTC)
    states = dict.fromkeys(JobState, 0)
    for row in rows(f'select state, count(*)::int as num from job j where {MINE} group by state'):
        states[JobState(row['state'])] = row['num']
    left = states[JobState.QUEUED] + states[JobState.LEASED]
    nodes, num_nodes = _nodes(rows)
    outlook = _outlook(rows, states)
    dollars = _dollars(rows)
    jobs = rows(
        f"""select j.id::text, j.name, j.number, j.owner, j.kind, j.state, j.node, j.epoch, j.num_steps,
        greatest(j.step, coalesce(a.last_step, 0)) as step,
        extract(epoch from coalesce(j.ended, now()) - j.created)::float8 as age_sec, {JOB_DOLLARS} as dollars
        from job j left join attempt a on a.job = j.id and a.epoch = j.epoch where {MINE}
        order by case j.state when 'leased' then 0 when 'queued' then 1 else 2 end, case when j.state = 'queued' then j.number end,
            j.ended desc, j.number
        limit {MAX_JOBS}"""
    )
    failures = rows(
        f"""select j.id::text, j.name, j.number, j.owner, j.cause, extract(epoch from now() - j.ended)::float8 as ago_sec
        from job j where j.state = 'failed' and {MINE} order by j.ended desc limit {MAX_FAILURES}"""
    )
    return {
        'title': 'Fleet',
        'refresh_sec': REFRESH_SEC,
        'owner': owner,
        'now': now,
        'states': {str(state): num for state, num in states.items()},
        'num_jobs': sum(states.values()),
        'left': left,
        'outlook': outlook,
        'ends': now + timedelta(hours=outlook.hours) if outlook.hours is not None else None,
        'dollars': dollars,
        'expected': _expected(rows, dollars, left),
        'nodes': nodes,
        'nodes_left_out': num_nodes - len(nodes),
        'node_states': rows('select state, count(*)::int as num from node group by state order by state') if owner.is_operator else [],
        'slowest': _slowest(rows),
        'failures': failures,
        'endings': rows(
            f'select a.ending, count(*)::int as num from attempt a join job j on j.id = a.job where a.ending is not null and {MINE} '
            'group by a.ending order by num desc, a.ending'
        ),
        'owners': _owners(rows) if owner.is_operator else [],
        'num_owners': rows('select count(*)::int as num from owner')[0]['num'] if owner.is_operator else 0,
        'budget': None if owner.is_operator else rows('select budget_dollars, max_leased from owner where name = %(owner)s')[0],
        'jobs': jobs,
        'chart': _chart(rows, now),
        'duration': duration,
        'title_of': title_of,
        'short_gpu': short_gpu,
    }


JOB_DOLLARS = 'coalesce((select sum(b.dollars) from attempt b where b.job = j.id), 0)'

Rows = Callable[..., list[dict[str, Any]]]


def _nodes(rows: Rows) -> tuple[list[dict[str, Any]], int]:
    """Machines that are here, those with a job first, and how many there are; of an owner, those that work for it."""
    query = """
        from node n left join job j on j.node = n.name and j.state = 'leased' left join attempt a on a.job = j.id and a.epoch = j.epoch
        left join session s on s.node = n.name and s.ended is null
        where (n.state <> 'gone' or j.id is not null) and (%(owner)s::text is null or j.owner = %(owner)s)
    """
    found = rows(
        f"""select n.name, n.state, n.reason, n.gpu, j.id::text as job, j.name as job_name, j.number, a.steps_per_sec,
        a.last_step as step, j.num_steps,
        extract(epoch from now() - greatest(n.last_seen, s.last_seen, a.last_sign))::float8 as silent_sec {query}
        order by n.state = 'live', j.id is null, n.name limit {MAX_NODES}"""
    )
    return found, rows(f'select count(*)::int as num {query}')[0]['num']


def _outlook(rows: Rows, states: dict[JobState, int]) -> Outlook:
    left = states[JobState.QUEUED] + states[JobState.LEASED]
    (done,) = rows(
        f"""select count(*)::int as num, least(%(hours)s, extract(epoch from now() - (
            select min(a.started) from attempt a join job j on j.id = a.job where {MINE} and a.last_sign > now() - %(hours)s * interval '1 hour'
        ))::float8 / 3600) as hours from job j where j.state = 'done' and {MINE} and j.ended > now() - %(hours)s * interval '1 hour'""",
        hours=PACE_HOURS,
    )
    rate = done['num'] / done['hours'] if done['num'] >= ENOUGH_DONE and done['hours'] else None
    if not left:
        return Outlook(rate, None, 'No job waits or runs.')
    if not states[JobState.LEASED]:
        return Outlook(rate, None, f'{counted(left, "job")} left, and no machine works at one.')
    if rate:
        pace = f'the pace of the last {duration(3600 * done["hours"])} ({counted(done["num"], "job")} done)'
        how = f'{counted(left, "job")} left at {rate:.1f} jobs/h, {pace}.'
        return Outlook(rate, left / rate, how)
    (steps,) = rows(
        f"""select sum(case when j.num_steps > 0 then j.num_steps - greatest(j.step, coalesce(a.last_step, 0)) end)::float8 as left,
        bool_and(j.num_steps > 0) as known, sum(a.steps_per_sec) filter (where j.state = 'leased') as pace,
        count(*) filter (where j.state = 'leased' and a.steps_per_sec > 0)::int as num
        from job j left join attempt a on a.job = j.id and a.epoch = j.epoch where j.state in ('queued', 'leased') and {MINE}"""
    )
    if steps['known'] and steps['pace']:
        machines = counted(steps['num'], 'machine')
        how = f'{steps["left"]:,.0f} steps left at {steps["pace"]:.3g} steps/s, what {machines} at work do now; starts come on top.'
        return Outlook(None, steps['left'] / steps['pace'] / 3600, how)
    return Outlook(
        None, None, f'{counted(left, "job")} left; the pace is known when {ENOUGH_DONE} are done, or machines have said how fast they are.'
    )


def _dollars(rows: Rows) -> float:
    query = 'select coalesce(sum(a.dollars), 0) as dollars'
    return rows(f'{query} from attempt a join job j on j.id = a.job where {MINE}')[0]['dollars']


def _expected(rows: Rows, dollars: float, left: int) -> float | None:
    """Dollars when all jobs have ended: those that are left cost what the latest did, less what they have cost already; None: none is done."""
    if not left:
        return dollars
    (done,) = rows(
        f"""select avg(dollars) as mean from (
            select {JOB_DOLLARS} as dollars from job j where j.state = 'done' and {MINE} order by j.ended desc limit {MAX_DONE}
        ) costs"""
    )
    if done['mean'] is None:
        return None
    (rest,) = rows(
        f"""select coalesce(sum(greatest(0, %(mean)s - dollars)), 0) as dollars from (
            select case when j.epoch > 0 then {JOB_DOLLARS} else 0 end as dollars from job j where j.state in ('queued', 'leased') and {MINE}
        ) costs""",
        mean=done['mean'],
    )
    return dollars + rest['dollars']


def _slowest(rows: Rows) -> list[dict[str, Any]]:
    """Slow machines at work with their share of the median steps/s at the same recipe and GPU, the slowest first."""
    return rows(
        f"""select a.node, a.gpu, j.id::text, j.name, j.number, a.steps_per_sec, a.steps_per_sec / pace.median as share from attempt a
        join job j on j.id = a.job and j.epoch = a.epoch and j.state = 'leased'
        join (
            select recipe, gpu, percentile_cont(0.5) within group (order by steps_per_sec) as median, count(*) as num
            from attempt where steps_per_sec > 0 and started > now() - interval '7 days' group by recipe, gpu
        ) pace on pace.recipe = a.recipe and pace.gpu = a.gpu
        where {MINE} and a.steps_per_sec > 0 and pace.num >= {ENOUGH_COMPARED} and a.steps_per_sec < {SLOW_SHARE} * pace.median
        order by share limit {MAX_SLOW}"""
    )


def _owners(rows: Rows) -> list[dict[str, Any]]:
    return rows(
        f"""select o.name, o.budget_dollars, o.max_leased, coalesce(paid.dollars, 0) as dollars, coalesce(own.num, 0) as num,
        coalesce(own.left, 0) as left from owner o left join (
            select owner, count(*)::int as num, (count(*) filter (where state in ('queued', 'leased')))::int as left from job group by owner
        ) own on own.owner = o.name left join (
            select j.owner, sum(a.dollars) as dollars
            from attempt a join job j on j.id = a.job group by j.owner
        ) paid on paid.owner = o.name order by dollars desc, o.name limit {MAX_OWNERS}"""
    )


def _chart(rows: Rows, now: datetime) -> list[dict[str, Any]]:
    """Jobs that ended in each of the last hours, the oldest first; empty if none did. `height` is the share of the largest."""
    ended = {
        row['hour']: row
        for row in rows(
            f"""select date_trunc('hour', j.ended) as hour, count(*) filter (where j.state = 'done')::int as done,
            count(*) filter (where j.state = 'failed')::int as failed from job j
            where {MINE} and j.ended > now() - %(hours)s * interval '1 hour' group by hour""",
            hours=CHART_HOURS,
        )
    }
    last = now.replace(minute=0, second=0, microsecond=0)
    hours = [last - timedelta(hours=before) for before in range(CHART_HOURS - 1, -1, -1)]
    found = [ended.get(hour, {'done': 0, 'failed': 0}) for hour in hours]
    most = max(row['done'] + row['failed'] for row in found)
    return (
        [{'hour': hour, 'done': row['done'], 'failed': row['failed'], 'most': most} for hour, row in zip(hours, found, strict=True)] if most else []
    )


def duration(sec: float | None) -> str:
    """`45 s`, `12 min`, `3.4 h`, `2.1 days`."""
    if sec is None:
        return ''
    sec = max(0.0, sec)
    if sec < 99.5:
        return f'{sec:.0f} s'
    if sec < 99.5 * 60:
        return f'{sec / 60:.0f} min'
    return f'{sec / 3600:.1f} h' if sec < 48 * 3600 else f'{sec / 86400:.1f} days'


def title_of(job: dict[str, Any]) -> str:
    """What a job is called: its name, or its number."""
    return job['name'] or f'job {job["number"]}'


def short_gpu(name: str) -> str:
    """A GPU without the name of its maker, which is the same for all."""
    return name.removeprefix('NVIDIA ').removeprefix('GeForce ')
