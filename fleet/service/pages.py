"""Pages of the fleet, which load themselves again and run no script: `GET /`, all of it for an operator and their own jobs for owners, and
`GET /jobs/ID/page`, one job's way over the machines, a bar each, and how far it came on them.
"""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any
from uuid import UUID

import yaml
from fastapi import APIRouter
from fastapi.responses import HTMLResponse

from diffusion.common.pages import SERIES, render_page
from diffusion.common.text import counted, redacted
from fleet.policies.rows import Ending, JobState
from fleet.queue.database import Connection
from fleet.queue.reading import why_job_waits
from fleet.service.gate import Account, GatedRoute, Owner, RequestRejected, Service

REFRESH_SEC = 30
MAX_JOBS, MAX_NODES, MAX_FAILURES, MAX_SLOW, MAX_OWNERS = 30, 30, 15, 5, 15
PACE_HOURS = 2.0  # of which the pace is the mean
MAX_HOURS_LEFT = 24 * 365 * 100.0  # a hundred years: no date is named beyond
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
JOB_DOLLARS = 'coalesce((select sum(b.dollars) from attempt b where b.job = j.id), 0)'
MAX_ATTEMPTS = 100  # that are shown, the latest
MAX_COMPARED = 60  # jobs of a group, the latest
DASHES = ('none', '8 6', '1 6')  # of a group's lines, when the colours are used up
CURVES = ('loss', 'learning rate', 'steps/s')  # places 1 to 3 of a point
WIDTH = 1000.0  # of a bar, in its own units
# Class of the style sheet: endings. The machine vanished; it gave the job back; the job or the machine failed.
COLOURS = {
    'of-done': (Ending.DONE,),
    'of-lost': (Ending.LOST,),
    'of-handed': (Ending.STOPPED, Ending.RELEASED),
    'of-cancelled': (Ending.CANCELLED,),
}
LEGEND = (
    ('running', 'of-leased'), ('done', 'of-done'), ('machine lost', 'of-lost'), ('given back', 'of-handed'), ('failed', 'of-failed'),
    ('cancelled', 'of-cancelled'),
)  # fmt: skip

router = APIRouter(route_class=GatedRoute, tags=['pages'])
Rows = Callable[..., list[dict[str, Any]]]


@router.get('/', response_class=HTMLResponse)
def fleet_page(owner: Owner, service: Service) -> HTMLResponse:
    """Show how the fleet does."""
    with service.database.transaction() as connection:
        values = overview(connection, owner)
    return HTMLResponse(render_page('fleet.html', **values), headers=HEADERS)


@router.get('/jobs/{job:uuid}/page', response_class=HTMLResponse)
def job_page(job: UUID, owner: Owner, service: Service) -> HTMLResponse:
    """Show one job's way over the machines."""
    with service.database.transaction() as connection:
        values = of_job(connection, owner, str(job))
    return HTMLResponse(render_page('fleet_job.html', **values), headers=HEADERS)


@router.get('/groups/{name}/page', response_class=HTMLResponse)
def group_page(name: str, owner: Owner, service: Service) -> HTMLResponse:
    """Compare the jobs of a group: what each changes, how far it is, its loss and its dollars."""
    with service.database.transaction() as connection:
        values = of_group(connection, owner, name)
    return HTMLResponse(render_page('fleet_group.html', **values), headers=HEADERS)


def overview(connection: Connection, owner: Account) -> dict[str, Any]:
    """Return what the page shows, by name."""
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
    rate, hours, how = _outlook(rows, states)
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
        'jobs_per_hour': rate,
        'hours_left': hours,
        'outlook': how,
        'ends': now + timedelta(hours=hours) if hours is not None else None,
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


def _outlook(rows: Rows, states: dict[JobState, int]) -> tuple[float | None, float | None, str]:
    """Jobs per hour that ended well lately (None: too few), hours until all will have ended (None: not known), and a sentence that says how that is
    known."""
    left = states[JobState.QUEUED] + states[JobState.LEASED]
    (done,) = rows(
        f"""select count(*)::int as num, least(%(hours)s, extract(epoch from now() - (
            select min(a.started) from attempt a join job j on j.id = a.job where {MINE} and a.last_sign > now() - %(hours)s * interval '1 hour'
        ))::float8 / 3600) as hours from job j where j.state = 'done' and {MINE} and j.ended > now() - %(hours)s * interval '1 hour'""",
        hours=PACE_HOURS,
    )
    rate = done['num'] / done['hours'] if done['num'] >= ENOUGH_DONE and done['hours'] else None
    if not left:
        return rate, None, 'No job waits or runs.'
    if not states[JobState.LEASED]:
        return rate, None, f'{counted(left, "job")} left, and no machine works at one.'
    if rate:
        pace = f'the pace of the last {duration(3600 * done["hours"])} ({counted(done["num"], "job")} done)'
        how = f'{counted(left, "job")} left at {rate:.1f} jobs/h, {pace}.'
        return rate, left / rate, how
    (steps,) = rows(
        f"""select sum(case when j.num_steps > 0 then j.num_steps - greatest(j.step, coalesce(a.last_step, 0)) end)::float8 as left,
        bool_and(j.num_steps > 0) as known, sum(a.steps_per_sec) filter (where j.state = 'leased') as pace,
        count(*) filter (where j.state = 'leased' and a.steps_per_sec > 0)::int as num
        from job j left join attempt a on a.job = j.id and a.epoch = j.epoch where j.state in ('queued', 'leased') and {MINE}"""
    )
    if steps['known'] and steps['pace']:
        machines = counted(steps['num'], 'machine')
        how = f'{steps["left"]:,.0f} steps left at {steps["pace"]:.3g} steps/s, what {machines} at work do now; starts come on top.'
        hours = steps['left'] / steps['pace'] / 3600  # a machine may say 1e-300 steps/s
        return None, hours if hours < MAX_HOURS_LEFT else None, how
    return None, None, f'{counted(left, "job")} left; the pace is known when {ENOUGH_DONE} are done, or machines have said how fast they are.'


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


def of_job(connection: Connection, owner: Account, job: str) -> dict[str, Any]:
    """Return what the page shows, by name.

    Raises:
        RequestRejected: there is no such job, or it is another owner's.
    """
    row = connection.execute(
        """select id::text, name, number, owner, kind, recipe, state, cause, node, epoch, step, num_steps, spec, parent::text, created, ended,
        now() as now, results is not null as has_results, curve from job where id = %s and (%s or owner = %s)""",
        [job, owner.is_operator, owner.name],
    ).fetchone()
    if row is None:
        raise RequestRejected(404, f'there is no job {job}')
    attempts = connection.execute(
        """select epoch, node, gpu, started, last_sign, progressed, ended, ending, exit_code, message, first_step, last_step, steps_per_sec,
        extract(epoch from last_sign - started)::float8 as sec, dollars
        from attempt where job = %s order by epoch""",
        [job],
    ).fetchall()
    children = connection.execute('select id::text, name, number, state from job where parent = %s order by number limit 10', [job]).fetchall()
    shown = attempts[-MAX_ATTEMPTS:]
    begin = shown[0]['started'] if shown else row['created']
    end = max([attempt['last_sign'] for attempt in shown] + ([row['now']] if row['state'] == JobState.LEASED else [begin]))
    for attempt in shown:
        attempt['class'] = colour_of(attempt['ending'])
        attempt['from_x'], attempt['to_x'] = (_x(attempt[key], begin, end) for key in ('started', 'last_sign'))
    spec = {key: value for key, value in row['spec'].items() if value not in (None, {}, [])}
    return {
        'title': title_of(row),
        'refresh_sec': REFRESH_SEC if row['state'] in (JobState.QUEUED, JobState.LEASED) else None,
        'owner': owner,
        'job': row,
        'waits': why_job_waits(connection, job),
        'now': row['now'].astimezone(UTC),
        'begin': begin.astimezone(UTC),
        'end': end.astimezone(UTC),
        'attempts': shown,
        'attempts_left_out': len(attempts) - len(shown),
        'lanes': lanes(shown),
        'lines': step_lines(shown, max(row['num_steps'], *(attempt['last_step'] for attempt in shown)) if shown else 0),
        'legend': [(name, kind, any(attempt['class'] == kind for attempt in shown)) for name, kind in LEGEND],
        'dollars': sum(attempt['dollars'] for attempt in attempts),
        'hours': sum(attempt['sec'] for attempt in attempts) / 3600,
        'lost_steps': sum(max(0, earlier['last_step'] - later['first_step']) for earlier, later in pairwise(attempts)),
        'step': max([row['step'], *(attempt['last_step'] for attempt in attempts[-1:])]),
        'children': children,
        'curves': [found for place, what in enumerate(CURVES, 1) if (found := drawn_curve(row['curve'], place, what, row['num_steps']))],
        'group': row['spec'].get('group'),
        'spec': redacted(yaml.safe_dump(spec, sort_keys=False, allow_unicode=True, width=100)),
        'duration': duration,
        'title_of': title_of,
        'short_gpu': short_gpu,
    }


def of_group(connection: Connection, owner: Account, name: str) -> dict[str, Any]:
    """Return what the page of a group shows, by name.

    Raises:
        RequestRejected: there is no job in it, or they are another owner's.
    """
    jobs = connection.execute(
        f"""select id::text, name, number, owner, state, num_steps, curve, spec->'overrides' as overrides, {JOB_DOLLARS} as dollars, now() as now,
        greatest(step, coalesce((select last_step from attempt a where a.job = j.id and a.epoch = j.epoch), 0)) as step
        from job j where spec->>'group' = %(group)s and kind = 'train' and {MINE} order by number desc limit {MAX_COMPARED}""",
        {'group': name, 'owner': None if owner.is_operator else owner.name},
    ).fetchall()[::-1]
    if not jobs:
        raise RequestRejected(404, f'there is no job of the group {name[:80]}')
    keys = sorted({key for job in jobs for key in job['overrides']})
    changed = [key for key in keys if len({str(job['overrides'].get(key)) for job in jobs}) > 1]
    num_steps = max(job['num_steps'] for job in jobs)
    curves = [smooth(job['curve'], 1) for job in jobs]
    losses = [loss for curve in curves for _, loss in curve]
    low, high = min(losses, default=None), max(losses, default=None)
    for number, (job, curve) in enumerate(zip(jobs, curves, strict=True)):
        job['changes'] = [job['overrides'].get(key) for key in changed]
        job['loss'] = curve[-1][1] if curve else None
        job['colour'], job['dashes'] = SERIES[number % len(SERIES)], DASHES[number // len(SERIES) % len(DASHES)]
        job['points'] = points_of(curve, low or 0.0, high or 0.0, num_steps)
    return {
        'title': name,
        'refresh_sec': REFRESH_SEC if any(job['state'] in (JobState.QUEUED, JobState.LEASED) for job in jobs) else None,
        'owner': owner,
        'now': jobs[0]['now'].astimezone(UTC),
        'jobs': jobs,
        'changed': changed,
        'low': low,
        'high': high,
        'num_steps': num_steps,
        'title_of': title_of,
    }


def drawn_curve(curve: list[list[float | None]], place: int, what: str, num_steps: int) -> dict[str, Any] | None:
    """A curve of a job as a line of the page, with its least and greatest value and the last one; None: nothing is known of it."""
    known = smooth(curve, place)
    if not known:
        return None
    values = [value for _, value in known]
    return {
        'name': what,
        'low': min(values),
        'high': max(values),
        'last': values[-1],
        'points': points_of(known, min(values), max(values), num_steps),
    }


def smooth(curve: list[list[float | None]], place: int) -> list[tuple[float, float]]:
    """(step, value) of one of the CURVES; of the loss the mean of the twentieth of all points before, as that of one batch says little."""
    known = [(point[0], point[place]) for point in curve if point[0] is not None and point[place] is not None]
    width = max(1, len(known) // 20) if place == 1 else 1
    return [
        (step, sum(value for _, value in known[max(0, at + 1 - width) : at + 1]) / min(width, at + 1))  # type: ignore[misc]  # none is None
        for at, (step, _) in enumerate(known)
    ]  # type: ignore[return-value]


def points_of(known: list[tuple[float, float]], low: float, high: float, num_steps: int) -> str:
    """The `points` of a line that is WIDTH wide for `num_steps` steps and 100 high from `low` to `high`."""
    height = high - low or 1.0
    return ' '.join(f'{WIDTH * step / max(1, num_steps):.1f},{98 - 96 * (value - low) / height:.1f}' for step, value in known)


def colour_of(ending: str | None) -> str:
    """The class of the style sheet for an ending; of an attempt that runs for None."""
    if ending is None:
        return 'of-leased'
    return next((name for name, endings in COLOURS.items() if ending in endings), 'of-failed')


def lanes(attempts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Machines in the order in which they first had the job, each with its attempts."""
    by_node: dict[str, list[dict[str, Any]]] = {}
    for attempt in attempts:
        by_node.setdefault(attempt['node'], []).append(attempt)
    return [{'node': node, 'gpu': own[-1]['gpu'], 'attempts': own} for node, own in by_node.items()]


def step_lines(attempts: list[dict[str, Any]], most: int) -> list[dict[str, Any]]:
    """A line of steps over time for each attempt: `points` of a drawing that is WIDTH wide and 100 high, `most` steps at its top."""
    if not most:
        return []
    found = []
    for attempt in attempts:
        low, high = (100 - 96 * attempt[key] / most for key in ('first_step', 'last_step'))
        found.append({'class': attempt['class'], 'points': f'{attempt["from_x"]:.1f},{low:.1f} {attempt["to_x"]:.1f},{high:.1f}'})
    return found


def _x(time: datetime, begin: datetime, end: datetime) -> float:
    whole = (end - begin).total_seconds()
    return WIDTH * (time - begin).total_seconds() / whole if whole > 0 else 0.0


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
    """Return what a job is called: its name, or its number."""
    return job['name'] or f'job {job["number"]}'


def short_gpu(name: str) -> str:
    """A GPU without the name of its maker, which is the same for all."""
    return name.removeprefix('NVIDIA ').removeprefix('GeForce ')
