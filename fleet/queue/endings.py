"""Consequences of the end of an attempt, in one transaction: its bill, the job's next state, bans, quarantine, the job that draws, the notice.

The policies decide; this file fetches the rows that they judge and writes what they say.
"""

import json

from fleet.jobs.spec import NAME_CHARS
from fleet.policies.blame import JobDecision, failures_since_success, judge, proven_nodes, reopened, why_quarantined
from fleet.policies.rows import FAILURES, RETURNED, AttemptRow, Ban, Ending, JobState, NodeState
from fleet.queue import reading
from fleet.queue.database import Connection

MAX_ELSEWHERE = 1000  # attempts by which a machine's failures are compared with others'
ELSEWHERE_HOURS = 12
MAX_REOPENED = 1000
OF_IMAGES = '-images'  # after the name of a job, for the one that draws with its result: a name is one job's


def close(connection: Connection, job: str, epoch: int, ending: Ending, exit_code: int | None = None, message: str = '') -> None:
    """End the running attempt at a leased job, whose row this transaction has locked. It is billed up to its last sign of life."""
    ended = connection.execute(
        """update attempt a set ended = last_sign, ending = %(ending)s, exit_code = %(code)s, message = %(message)s,
        steps_per_sec = case when %(ending)s = 'done' then least(steps_per_sec, (last_step - first_step)
            / greatest(1, extract(epoch from last_sign - coalesce(progressed, started))::float8)) else steps_per_sec end
        where job = %(job)s and epoch = %(epoch)s and ended is null returning a.node, a.dollars""",
        {'ending': ending, 'code': exit_code, 'message': message, 'job': job, 'epoch': epoch},
    ).fetchone()
    assert ended is not None
    connection.execute(
        'update owner set spent_dollars = spent_dollars + %s from job where job.id = %s and owner.name = job.owner', [ended['dollars'], job]
    )
    decision = _judged(connection, job)
    _write(connection, job, decision)
    if ending in FAILURES | RETURNED:
        _quarantine(connection, ended['node'])
    elif ending is Ending.DONE:
        _judge_again(connection, ended['node'])


def cancel_waiting(connection: Connection, job: str, cause: str) -> None:
    """End a queued job, whose row this transaction has locked, as cancelled."""
    _write(connection, job, JobDecision(JobState.CANCELLED, cause))


def _judge_again(connection: Connection, name: str) -> None:
    """Judge waiting jobs that a machine has failed which has now finished another, so that its failures count: each may wait for a machine that has
    not failed it, and there may be none."""
    waiting = connection.execute(
        """select id::text from job where state = 'queued' and id in (select job from ban where node = %s and until > now())
        order by number limit %s for update skip locked""",
        [name, MAX_REOPENED],
    ).fetchall()
    for job in waiting:
        decision = _judged(connection, job['id'])
        if decision.state is JobState.FAILED:
            _write(connection, job['id'], decision)


def _judged(connection: Connection, job: str) -> JobDecision:
    row = reading.jobs(connection, 'j.id = %s', job)[0]
    attempts = reading.attempts(connection, 'a.job = %s', job)
    names = list({attempt.node for attempt in attempts})
    return judge(row, attempts, proven_nodes(job, _finished(connection, names)), _quarantined(connection, names), reading.now(connection))


def _finished(connection: Connection, names: list[str]) -> list[AttemptRow]:
    """The newest two attempts of each machine that finished their jobs: one of them is at another job than the one that is asked about."""
    return reading.attempts(
        connection,
        """(a.job, a.epoch) in (
            select newest.job, newest.epoch from unnest(%s::text[]) as name cross join lateral (
                select job, epoch from attempt where node = name and ending = 'done' order by started desc limit 2
            ) newest
        )""",
        names,
    )


def _quarantined(connection: Connection, names: list[str]) -> set[str]:
    return {node.name for node in reading.nodes(connection, "n.name = any(%s) and n.state = 'quarantined'", names)}


def _write(connection: Connection, job: str, decision: JobDecision) -> None:
    is_over = decision.state not in (JobState.QUEUED, JobState.LEASED)
    row = connection.execute(
        """update job set state = %(state)s, cause = %(cause)s, node = null, lease_until = null, not_before = to_timestamp(%(not_before)s),
        ended = case when %(is_over)s then now() end where id = %(job)s returning *""",
        {'state': decision.state, 'cause': decision.cause, 'not_before': decision.not_before, 'is_over': is_over, 'job': job},
    ).fetchone()
    assert row is not None
    for ban in decision.bans:
        _ban(connection, ban)
    if decision.state is JobState.DONE and row['kind'] == 'train' and row['spec']['validation']['prompts']:
        connection.execute(
            """insert into job (owner, kind, parent, name, recipe, spec, gpu_gb, image, trusted, priority)
            select owner, 'sample', id, left(name, %s) || %s, recipe, spec, gpu_gb, image, trusted, priority from job where id = %s""",
            [NAME_CHARS - len(OF_IMAGES), OF_IMAGES, job],
        )
    if is_over and row['spec']['notify']['webhook']:
        _notify(connection, job)


def _ban(connection: Connection, ban: Ban) -> None:
    connection.execute(
        """insert into ban (job, node, since, until, reason) values (%s, %s, to_timestamp(%s), to_timestamp(%s), %s)
        on conflict (job, node) do update set since = excluded.since, until = excluded.until, reason = excluded.reason""",
        [ban.job, ban.node, ban.since, ban.until, ban.reason],
    )


def _quarantine(connection: Connection, name: str) -> None:
    """Take a machine out if its failures are its own, and put jobs back into the queue that failed by its fault."""
    node = reading.nodes(connection, 'n.name = %s', name)[0]
    if node.state is NodeState.QUARANTINED:
        return
    own = reading.attempts(
        connection,
        """a.node = %s and a.started >= greatest(
            (select judged_from from node where name = a.node),
            (select coalesce(max(started), '-infinity') from attempt where node = %s and ending = 'done')
        )""",
        name, name,
    )  # fmt: skip
    failures = failures_since_success(own)
    if not failures:
        return
    elsewhere = reading.attempts(
        connection,
        """(a.job, a.epoch) in (
            select a.job, a.epoch from attempt a join job j on j.id = a.job
            where j.owner = any(%s) and a.node <> %s and a.started > now() - %s * interval '1 hour' order by a.started desc limit %s
        )""",
        list({failure.owner for failure in failures}), name, ELSEWHERE_HOURS, MAX_ELSEWHERE,
    )  # fmt: skip
    reason = why_quarantined(name, own, elsewhere)
    if reason is None:
        return
    connection.execute("update node set state = 'quarantined', reason = %s where name = %s", [reason, name])
    failed = reading.jobs(
        connection,
        "j.state = 'failed' and j.id in (select job from attempt where node = %s) order by j.ended desc limit %s for update of j skip locked",
        name, MAX_REOPENED,
    )  # fmt: skip
    if not failed:
        return
    attempts = {job.id: reading.attempts(connection, 'a.job = %s', job.id) for job in failed}
    names = {job.id: list({attempt.node for attempt in attempts[job.id]}) for job in failed}
    every = list({other for some in names.values() for other in some})
    proven = {job.id: proven_nodes(job.id, _finished(connection, names[job.id])) for job in failed}
    for job, decision in reopened(name, failed, attempts, proven, _quarantined(connection, every), reading.now(connection)):
        _write(connection, job.id, decision)


def _notify(connection: Connection, job: str) -> None:
    """Leave a message for the owner's webhook; the service delivers it (service/background.py)."""
    row = connection.execute(
        """select j.id::text, j.name, j.state, j.cause, j.spec->'notify'->>'webhook' as url,
        (select sum(dollars) from attempt where job = j.id) as dollars
        from job j where j.id = %s""",
        [job],
    ).fetchone()
    assert row is not None
    body = {**{key: row[key] for key in ('id', 'name', 'state', 'cause', 'dollars')}, 'results': f'/jobs/{job}/results'}
    connection.execute('insert into notice (job, url, body) values (%s, %s, %s)', [job, row['url'], json.dumps(body)])
