"""The right to work on a job: claim, renew, publish, end.

Each statement that a machine causes names job, epoch, node and the state `leased`: whoever has lost the lease, by whatever accident, changes
nothing and gets `LeaseEnded`. The epoch grows with every claim and is part of every key in object storage.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any, Literal

from psycopg.types.json import Jsonb

from diffusion.common.processes import failpoint
from fleet.policies.limits import reference_speed, why_slow, why_stopped
from fleet.policies.rows import AttemptRow, Ending, NodeState
from fleet.queue import reading
from fleet.queue.database import Connection
from fleet.queue.endings import close

CLAIMS = 0x666C6565  # advisory lock: one claim at a time, so that limits of owners hold exactly; a claim takes milliseconds
RenewAction = Literal['continue', 'stop', 'release']
MAX_PEERS, MAX_OF_PEER = 200, 10  # machines that are compared, and attempts of each
MAX_POINTS = 400  # of a job's curve
Curve = Sequence[Sequence[float | None]]

# policies/hand_out.py says the rules; tests/fleet/test_claim.py holds this query to the same in Python.
# A lane is the jobs of one owner with one recipe that need the same: few, however many jobs there are. The index job_queued leads from one lane to
# the next, and to the first job of each, so that 50,000 jobs which this machine cannot take cost it nothing.
PICK = """
    with recursive lane as (
        (select owner, recipe, gpu_gb, coalesce(image, '') as image, trusted from job where state = 'queued'
            order by owner, recipe, gpu_gb, coalesce(image, ''), trusted limit 1)
        union all
        select next.* from lane cross join lateral (
            select owner, recipe, gpu_gb, coalesce(image, '') as image, trusted from job where state = 'queued'
                and (owner, recipe, gpu_gb, coalesce(image, ''), trusted) > (lane.owner, lane.recipe, lane.gpu_gb, lane.image, lane.trusted)
            order by owner, recipe, gpu_gb, coalesce(image, ''), trusted limit 1
        ) next
    )
    select id from (select distinct on (lane.owner) chosen.*, running.num, o.last_leased from lane
    join owner o on o.name = lane.owner
    cross join lateral (
        select count(*) as num, coalesce(sum(a.dollars), 0) as dollars
        from job j join attempt a on a.job = j.id and a.epoch = j.epoch where j.owner = lane.owner and j.state = 'leased'
    ) running
    cross join lateral (
        select id, (epoch > 0) as begun, priority, number from job j
        where j.state = 'queued' and j.owner = lane.owner and j.recipe = lane.recipe and j.gpu_gb = lane.gpu_gb
            and coalesce(j.image, '') = lane.image and j.trusted = lane.trusted and j.not_before <= now()
            and not exists (select 1 from ban where ban.job = j.id and ban.node = %(name)s and ban.until > now())
        order by (epoch > 0) desc, priority desc, number limit 1
    ) chosen
    where lane.recipe = any(%(recipes)s) and lane.gpu_gb <= %(gpu_gb)s and lane.image in ('', %(image)s) and (%(trusted)s or not lane.trusted)
        and running.num < o.max_leased and o.budget_dollars - o.spent_dollars - running.dollars > 0
    order by lane.owner, chosen.begun desc, chosen.priority desc, chosen.number) first_of_owner
    order by begun desc, num, last_leased, number limit 1
"""
GUARD = "id = %(job)s and epoch = %(epoch)s and node = %(node)s and state = 'leased'"


class LeaseEnded(Exception):
    """The lease is another's, or the job has ended."""


@dataclass(frozen=True)
class LeaseSettings:
    """Times that every machine is told.

    Attributes:
        lease_sec: after so long without a sign of life a job is another's.
        renew_sec: between two renewals.
        poll_sec: between two questions of an idle machine.
        grace_sec: that training may outlast a lease that could not be renewed.
    """

    lease_sec: float = 120
    renew_sec: float = 30
    poll_sec: float = 15
    grace_sec: float = 60


@dataclass(frozen=True)
class Lease:
    """A lease, as its node names it."""

    job: str
    epoch: int
    node: str

    @property
    def values(self) -> dict[str, Any]:
        return {'job': self.job, 'epoch': self.epoch, 'node': self.node}


def claim(connection: Connection, node: str, session: int, terms: LeaseSettings) -> dict[str, Any] | None:
    """Give the best job that this node may take to it, and return the job's row; None if there is none.

    Leases that have lapsed are taken back first, and so is one that the node itself still holds: who asks has forgotten it.
    """
    if not _may_be_something(connection, node):  # so far nothing is locked or written
        return None
    connection.execute('select pg_advisory_xact_lock(%s)', [CLAIMS])
    take_back(connection, 'j.lease_until <= now() or j.node = %s', node)
    known = reading.nodes(connection, 'n.name = %s', node)[0]
    if known.state != NodeState.LIVE:
        return None
    wanted = {'name': node, 'recipes': known.recipes, 'gpu_gb': known.gpu_gb, 'image': known.image, 'trusted': known.trusted}
    picked = connection.execute(PICK, wanted).fetchone()
    if picked is None:
        return None
    failpoint('fleet.claim.picked')
    # By the clock, not the transaction's time: this one may have waited for other claims, and the attempt before may have ended meanwhile.
    row = connection.execute(
        """update job set state = 'leased', node = %s, epoch = epoch + 1, lease_until = clock_timestamp() + %s * interval '1 second'
        where id = %s and state = 'queued' returning *""",
        [node, terms.lease_sec, picked['id']],
    ).fetchone()
    if row is None:  # cancelled just now
        return None
    connection.execute(
        """insert into attempt (job, epoch, node, session, gpu, recipe, price_per_hour, started, last_sign, first_step, last_step)
        select %(id)s, %(epoch)s, %(node)s, s.id, n.gpu, %(recipe)s, s.price_per_hour, clock.now, clock.now, %(step)s, %(step)s
        from (select clock_timestamp() as now) clock, session s join node n on n.name = s.node where s.id = %(session)s""",
        {**row, 'session': session},
    )
    connection.execute('update owner set last_leased = now() where name = %s', [row['owner']])
    failpoint('fleet.claim.written')
    return row


def _may_be_something(connection: Connection, node: str) -> bool:
    row = connection.execute(
        """select exists (select 1 from job where state = 'queued') or exists (
            select 1 from job where state = 'leased' and (lease_until <= now() or node = %s)
        ) as found""",
        [node],
    ).fetchone()
    return row is not None and row['found']


def take_back(connection: Connection, condition: str, *values: Any) -> int:
    """End the leases of a condition as lost; returns how many. Their jobs go back to the queue, to its front, or are given up."""
    rows = connection.execute(f"select id::text, epoch, node from job j where j.state = 'leased' and ({condition}) for update skip locked", values)
    lost = [Lease(row['id'], row['epoch'], row['node']) for row in rows.fetchall()]
    for held in lost:
        close(connection, held.job, held.epoch, Ending.LOST, message='its lease lapsed: the machine or its network is gone')
    return len(lost)


def renew(
    connection: Connection, held: Lease, step: int, steps_per_sec: float | None, points: Curve, terms: LeaseSettings
) -> tuple[RenewAction, str]:
    """Prolong a lease; returns what the machine has to do now and why.

    `continue`; `stop`: save and give the job back, whose limits or whose owner's budget are spent; `release`: the same, and leave.

    Raises:
        LeaseEnded: it is not its lease any more.
    """
    row = hold(connection, held, 'for update')
    _sign_of_life(connection, held, step, steps_per_sec)
    _extend_curve(connection, row, points)
    job = reading.jobs(connection, 'j.id = %s', held.job)[0]
    own = reading.attempts(connection, 'a.job = %s', held.job)
    owner = reading.owners(connection, 'o.name = %s', job.owner)[0]
    attempt = next(one for one in own if one.epoch == held.epoch)
    if reason := why_stopped(job, own, owner):
        return 'stop', reason  # within what is left of the lease: who trains on loses it
    connection.execute("update job set lease_until = now() + %s * interval '1 second' where id = %s", [terms.lease_sec, held.job])
    node = reading.nodes(connection, 'n.name = %s', held.node)[0]
    if node.state != NodeState.LIVE:
        return 'release', f'this machine is {node.state}'
    if slow := why_slow(attempt, job, reference_speed(attempt, _peers(connection, attempt)), reading.now(connection)):
        connection.execute("update node set state = 'draining', reason = %s where name = %s and state = 'live'", [slow, held.node])
        return 'release', slow
    return 'continue', ''


def _peers(connection: Connection, attempt: AttemptRow) -> list[AttemptRow]:
    """The newest finished attempts of each other machine with the same recipe and GPU; few, as one may have thousands."""
    return reading.attempts(
        connection,
        """(a.job, a.epoch) in (
            select newest.job, newest.epoch from (select name from node where gpu = %s and name <> %s order by last_seen desc limit %s) other
            cross join lateral (
                select job, epoch from attempt where node = other.name and recipe = %s and gpu = %s and steps_per_sec is not null and ending = 'done'
                order by started desc limit %s
            ) newest
        )""",
        attempt.gpu, attempt.node, MAX_PEERS, attempt.recipe, attempt.gpu, MAX_OF_PEER,
    )  # fmt: skip


def hold(connection: Connection, held: Lease, suffix: str = '') -> dict[str, Any]:
    """The job's row of a lease that still holds.

    Args:
        suffix: `for update` keeps it so until the end of the transaction.

    Raises:
        LeaseEnded: it does not.
    """
    row = connection.execute(f'select * from job where {GUARD} {suffix}', held.values).fetchone()
    if row is None:
        raise LeaseEnded
    return row


def publish(connection: Connection, held: Lease, step: int, files: dict[str, Any]) -> None:
    """Make a checkpoint, whose objects are there, the job's. One that is no newer than the job's changes nothing. Renewals alone prolong the lease.

    Raises:
        LeaseEnded: it is not its lease any more.
    """
    hold(connection, held, 'for update')
    failpoint('fleet.publish.held')
    content = Jsonb({'epoch': held.epoch, 'step': step, 'files': files})
    connection.execute(
        f'update job set step = %(step)s, checkpoint = %(content)s where {GUARD} and step < %(step)s',
        {**held.values, 'step': step, 'content': content},
    )
    _sign_of_life(connection, held, step)
    failpoint('fleet.publish.written')


def end(
    connection: Connection, held: Lease, ending: Ending, step: int, exit_code: int | None, message: str, results: dict[str, Any] | None,
    points: Curve = (),
) -> None:  # fmt: skip
    """End an attempt as its machine says.

    Args:
        results: files of a finished job, which are there; {name: {sha256, bytes}}.

    Raises:
        LeaseEnded: it is not its lease any more.
    """
    row = hold(connection, held, 'for update')
    _sign_of_life(connection, held, step)
    _extend_curve(connection, row, points)
    if results is not None:
        connection.execute('update job set results = %s where id = %s', [Jsonb({'epoch': held.epoch, 'files': results}), held.job])
    failpoint('fleet.end.signed')
    close(connection, held.job, held.epoch, ending, exit_code, message)
    failpoint('fleet.end.written')


def _extend_curve(connection: Connection, row: dict[str, Any], points: Curve) -> None:
    if points:
        connection.execute('update job set curve = %s where id = %s', [Jsonb(extended(row['curve'], points, row['num_steps'])), row['id']])


def extended(curve: Curve, points: Curve, num_steps: int) -> Curve:
    """Return a job's curve with new points, at most about MAX_POINTS, evenly over its steps. Those from a resume on replace what is there.

    Args:
        curve, points: step, and what is known of it; steps outside the job are left out.
    """
    found, gap = list(curve), ceil(num_steps / MAX_POINTS)
    for point in points:
        step = point[0]
        if step is None or not 0 <= step <= num_steps:
            continue
        while found and (found[-1][0] or 0) >= step:
            found.pop()
        if not found or step - (found[-1][0] or 0) >= gap or step == num_steps:
            found.append([int(step), *point[1:]])
    return found


def _sign_of_life(connection: Connection, held: Lease, step: int, steps_per_sec: float | None = None) -> None:
    """Note what the machine says of itself. Neither time nor steps go back: the database's clock may be set, and a machine may say anything."""
    connection.execute(
        """update attempt a set last_sign = greatest(last_sign, now()), last_step = greatest(last_step, said.step),
        steps_per_sec = coalesce(%(pace)s, steps_per_sec),
        progressed = case when progressed is null and said.step > first_step then greatest(last_sign, now()) else progressed end
        from (select case when num_steps > 0 then least(%(step)s, num_steps) else %(step)s end as step from job where id = %(job)s) said
        where a.job = %(job)s and a.epoch = %(epoch)s""",
        {**held.values, 'step': step, 'pace': steps_per_sec},
    )
