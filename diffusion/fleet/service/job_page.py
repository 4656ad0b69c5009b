"""`GET /jobs/ID/page`: one job's way over the machines, a bar each, and how far it came on them."""

from collections.abc import Callable
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

import yaml
from starlette.responses import Response

from diffusion.common.pages import render_page
from diffusion.common.text import redacted
from diffusion.fleet.policies.rows import Ending, JobState
from diffusion.fleet.queue.database import Connection, Database
from diffusion.fleet.queue.reading import why_job_waits
from diffusion.fleet.service.access import Account, Refused, owner_of
from diffusion.fleet.service.http import Call
from diffusion.fleet.service.page import HEADERS, REFRESH_SEC, duration, short_gpu, title_of

MAX_ATTEMPTS = 100  # that are shown, the latest
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


class JobPages:
    """The endpoint of a job's page."""

    def __init__(self, database: Database):
        self.database = database
        self.endpoints: dict[tuple[str, str], Callable[[Call], Response]] = {('GET', '/jobs/{job:uuid}/page'): self.page}

    def page(self, asked: Call) -> Response:
        with self.database.transaction() as connection:
            owner = owner_of(connection, asked.token)
            values = of_job(connection, owner, str(asked.path['job']))
        return Response(render_page('fleet_job.html', **values), media_type='text/html; charset=utf-8', headers=HEADERS)


def of_job(connection: Connection, owner: Account, job: str) -> dict[str, Any]:
    """What the page shows, by name.

    Raises:
        Refused: there is no such job, or it is another owner's.
    """
    row = connection.execute(
        """select id::text, name, number, owner, kind, recipe, state, cause, node, epoch, step, num_steps, spec, parent::text, created, ended,
        now() as now, results is not null as has_results from job where id = %s and (%s or owner = %s)""",
        [job, owner.is_operator, owner.name],
    ).fetchone()
    if row is None:
        raise Refused(404, f'there is no job {job}')
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
        'spec': redacted(yaml.safe_dump(spec, sort_keys=False, allow_unicode=True, width=100)),
        'duration': duration,
        'title_of': title_of,
        'short_gpu': short_gpu,
    }


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
