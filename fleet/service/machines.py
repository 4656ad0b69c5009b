"""Endpoints of machines: enrol, claim, renew, upload, publish, end, leave. A machine learns of one job at a time, and only what its attempt needs."""

import hashlib
from dataclasses import asdict
from typing import Any
from uuid import UUID

from fastapi import APIRouter, Request, Response
from psycopg.types.json import Jsonb

from diffusion.common.text import counted
from fleet.jobs.protocol import (
    Done,
    EndRequest,
    Enrolled,
    EnrollRequest,
    FileContent,
    LeaseAnswer,
    LeaseRequest,
    PublishRequest,
    RenewAnswer,
    RenewRequest,
    SignedSources,
    UrlsAnswer,
    UrlsRequest,
)
from fleet.jobs.spec import RESULT_SUFFIXES
from fleet.policies.limits import hours_left
from fleet.policies.rows import Ending, NodeState, ending_of
from fleet.queue import leases, reading
from fleet.queue.database import Connection, new_token
from fleet.queue.leases import Lease
from fleet.service.bucket import Bucket
from fleet.service.gate import Account, FleetService, GatedRoute, Machine, Newcomer, RequestRejected, Service, digest

router = APIRouter(route_class=GatedRoute, tags=['asked by a machine'])

ENROLMENTS = 0x656E72  # advisory locks, by name of the machine
# A machine of a name, its newest session, and how long until that has been silent for a lease.
KNOWN = """
    select n.pool, s.id as session, coalesce(case when s.ended is null then extract(epoch from greatest(
        greatest(s.last_seen, n.last_seen) + %(lease_sec)s * interval '1 second', j.lease_until
    ) - now()) end, 0)::float8 as wait_sec
    from node n left join lateral (select * from session where node = n.name order by id desc limit 1) s on true
    left join job j on j.node = n.name and j.state = 'leased'
    where n.name = %(name)s for update of n
"""
# Quarantine outlasts a restart: the machine is the same.
ENROLLED = """
    insert into node (name, pool, gpu, gpu_gb, num_gpus, image, version, recipes)
    values (%(machine)s, %(pool)s, %(gpu)s, %(gpu_gb)s, %(gpus)s, %(image)s, %(version)s, %(recipes)s)
    on conflict (name) do update set gpu = excluded.gpu, gpu_gb = excluded.gpu_gb, num_gpus = excluded.num_gpus, image = excluded.image,
        version = excluded.version, recipes = excluded.recipes, last_seen = now(),
        state = case when node.state = 'quarantined' then node.state else 'live' end,
        reason = case when node.state = 'quarantined' then node.reason else '' end
    returning array(select name from recipe r where node.recipes ->> r.name is distinct from r.sha256 order by name) as other_recipes
"""


@router.post('/enroll')
def enroll(said: EnrollRequest, newcomer: Newcomer, request: Request, service: Service) -> Enrolled:
    """Enter a pool, with its token, an enrolment token of it, or the last token of a machine of this name, and get a token for this session.

    With its last token a machine comes again at once. With another it is 409, with Retry-After, until the one of its name that is here has been
    silent for as long as a lease lasts: a name alone takes no machine's place.
    """
    token, address = new_token('node'), request.client.host if request.client else ''
    with service.database.transaction() as connection:
        connection.execute('select pg_advisory_xact_lock(%s, hashtext(%s))', [ENROLMENTS, said.machine])  # also of a name that has no row yet
        known = connection.execute(KNOWN, {'name': said.machine, 'lease_sec': service.leases.lease_sec}).fetchone()
        name = _pool_of(connection, newcomer, said.machine, known)
        pool = connection.execute('select * from pool where name = %s for no key update', [name]).fetchone()  # its limits hold exactly
        assert pool is not None
        if newcomer.kind == 'pool' and pool['one_use']:
            raise RequestRejected(401, f'machines of {name} enrol with a token each; an operator makes them: pools {name} --tokens N')
        if known is not None and known['pool'] != pool['name']:
            raise RequestRejected(409, f'machine: {said.machine} belongs to another pool; name this one otherwise')
        if known is not None and newcomer.session is None and known['wait_sec'] > 0:
            raise RequestRejected(
                409, f'machine: {said.machine} is here; it enrols again with its last token, or when it is silent', retry_sec=known['wait_sec']
            )
        _refuse_crowds(connection, pool, said.machine, address)
        row = connection.execute(ENROLLED, {**said.model_dump(exclude={'recipes'}), 'recipes': Jsonb(said.recipes), 'pool': pool['name']}).fetchone()
        assert row is not None
        leases.take_back(connection, 'j.node = %s', said.machine)
        connection.execute('update session set ended = now() where node = %s and ended is null', [said.machine])
        connection.execute(
            'insert into session (node, token_hash, price_per_hour, address) values (%s, %s, %s, %s)',
            [said.machine, digest(token), pool['price_per_hour'], address],
        )
    return Enrolled(node=said.machine, token=token, other_recipes=row['other_recipes'], **asdict(service.leases))


def _pool_of(connection: Connection, newcomer: Account, machine: str, known: dict[str, Any] | None) -> str:
    """Return the pool that a token lets this machine into; one that may be used once is used now.

    Raises:
        RequestRejected: it does not let it in.
    """
    if newcomer.kind == 'pool':
        return newcomer.name
    if newcomer.kind == 'enrolment':
        used = connection.execute('update enrolment set used = now() where token_hash = %s and used is null returning pool', [newcomer.token_hash])
        if used.fetchone() is None:
            raise RequestRejected(401, 'this enrolment token has just let in another machine')
        return newcomer.name
    if machine != newcomer.name or known is None or known['session'] != newcomer.session:
        raise RequestRejected(401, f'machine: this token is not the last one of {machine}')
    pool: str = known['pool']
    return pool


def _refuse_crowds(connection: Connection, pool: dict[str, Any], machine: str, address: str) -> None:
    """Raises RequestRejected: as many machines as may be are here, in all or from this address."""
    here = connection.execute(
        """select count(*) filter (where s.ended is null) as num, count(distinct n.name) filter (where s.address = %s) as num_of_address
        from session s join node n on n.name = s.node where n.pool = %s and n.name <> %s
        and (s.ended is null or (n.state = 'quarantined' and s.address = %s and s.started > now() - interval '1 day'))""",
        [address, pool['name'], machine, address],
    ).fetchone()
    assert here is not None
    if here['num'] >= pool['max_machines']:
        what = f'{counted(here["num"], "machine")} of the pool {pool["name"]} are here'
        raise RequestRejected(409, f'{what}, and no more may be; an operator may allow more: pools {pool["name"]} --max-machines N', retry_sec=60)
    if here['num_of_address'] >= pool['max_per_address'] and not pool['trusted']:
        what = f'{counted(here["num_of_address"], "machine")} from {address} are here or in quarantine'
        raise RequestRejected(409, f'{what}, and no more may be; an operator may allow more: pools {pool["name"]} --max-per-address N', retry_sec=60)


@router.post('/claim', response_model=LeaseAnswer, responses={204: {'description': 'No job now; Retry-After says when to ask again.'}})
def claim(machine: Machine, service: Service) -> Any:
    """Get a job, with all that its attempt needs."""
    with service.database.transaction() as connection:
        assert machine.session is not None
        row = leases.claim(connection, machine.name, machine.session, service.leases)
        if row is not None:
            return _lease(connection, service.bucket, row)
        node = reading.nodes(connection, 'n.name = %s', machine.name)[0]
    if node.state != NodeState.LIVE:
        raise RequestRejected(410, f'this machine is {node.state}: it gets no more jobs')
    return Response(status_code=204, headers={'Retry-After': f'{service.leases.poll_sec:g}'})


@router.post('/leave')
def leave(machine: Machine, service: Service) -> Done:
    """End the session; a job that is still leased goes back to the queue."""
    with service.database.transaction() as connection:
        leases.take_back(connection, 'j.node = %s', machine.name)
        connection.execute('update session set ended = now() where id = %s', [machine.session])
        connection.execute("update node set state = 'gone' where name = %s and state in ('live', 'draining')", [machine.name])
    return Done()


@router.post('/jobs/{job:uuid}/renew')
def renew(job: UUID, said: RenewRequest, machine: Machine, service: Service) -> RenewAnswer:
    """Prolong the lease. `stop`: save, hand over, end; `release`: the same, and leave."""
    with service.database.transaction() as connection:
        lease = Lease(str(job), said.epoch, machine.name)
        action, reason = leases.renew(connection, lease, said.step, said.steps_per_sec, said.curve, service.leases)
    return RenewAnswer(action=action, reason=reason)


@router.post('/jobs/{job:uuid}/inputs')
def inputs(job: UUID, said: LeaseRequest, machine: Machine, service: Service) -> SignedSources:
    """Sign again what the attempt reads: the URLs of the lease may have expired before gigabytes had arrived."""
    with service.database.transaction() as connection:
        row = leases.hold(connection, Lease(str(job), said.epoch, machine.name))
        return SignedSources(**_sources(connection, service.bucket, row))


@router.post('/jobs/{job:uuid}/urls')
def urls(job: UUID, said: UrlsRequest, machine: Machine, service: Service) -> UrlsAnswer:
    """Sign PUTs of the files of a checkpoint, or of the results."""
    folder = _folder_of_lease(service, Lease(str(job), said.epoch, machine.name), said.step)[0]
    return UrlsAnswer(files={name: service.bucket.put_url(f'{folder}/{name}', file.sha256, file.bytes) for name, file in said.files.items()})


@router.post('/jobs/{job:uuid}/publish')
def publish(job: UUID, said: PublishRequest, machine: Machine, service: Service) -> Done:
    """Make what was uploaded the job's checkpoint, after a look at it. Only renewals prolong the lease."""
    lease = Lease(str(job), said.epoch, machine.name)
    folder, row = _folder_of_lease(service, lease, said.step)
    if not said.files:
        raise RequestRejected(422, 'files: a checkpoint has files; the next machine could not resume from none')
    if 0 < row['num_steps'] < said.step:
        raise RequestRejected(422, f'step: {said.step:,} of a job of {row["num_steps"]:,} steps')
    _confirm_uploads(service.bucket, folder, said.files)  # takes as long as the storage takes: not inside a transaction
    with service.database.transaction() as connection:
        leases.publish(connection, lease, said.step, _stored(said.files))
    return Done()


@router.post('/jobs/{job:uuid}/end')
def end(job: UUID, said: EndRequest, machine: Machine, service: Service) -> Done:
    """End the attempt: by the exit code of train.py, or by `ending` where the machine cannot do it or gives it back."""
    if said.ending is not None:
        ending = Ending(said.ending)
    elif said.exit_code is not None:
        ending = ending_of(said.exit_code)
    else:
        raise RequestRejected(422, 'exit_code or ending has to be said')
    lease = Lease(str(job), said.epoch, machine.name)
    folder, _ = _folder_of_lease(service, lease, None)
    if ending == Ending.DONE:
        if not said.files:
            raise RequestRejected(422, 'files: a job that is done has results')
        # The next machine and the owner load them: a pickle would run there.
        if strange := [name for name in said.files if not name.endswith(RESULT_SUFFIXES)]:
            raise RequestRejected(422, f'files: {strange[0]} is no result: only {", ".join(RESULT_SUFFIXES)} are')
        _confirm_uploads(service.bucket, folder, said.files)
    with service.database.transaction() as connection:
        results = _stored(said.files) if ending == Ending.DONE else None
        leases.end(connection, lease, ending, said.step, said.exit_code, said.message, results, said.curve)
    return Done()


def result_folder(owner: str, job: str, epoch: int) -> str:
    """Return the folder of a job's results; no two epochs share a key."""
    return f'owners/{owner}/jobs/{job}/e{epoch}/result'


def _checkpoint_folder(owner: str, job: str, epoch: int, step: int) -> str:
    return f'owners/{owner}/jobs/{job}/e{epoch}/s{step}'


def _folder_of_lease(service: FleetService, lease: Lease, step: int | None) -> tuple[str, dict[str, Any]]:
    """Return where an attempt uploads a checkpoint, or its results, and the job's row.

    Raises:
        LeaseEnded: it is not its lease any more.
    """
    with service.database.transaction() as connection:
        row = leases.hold(connection, lease)
    place = row['owner'], lease.job, lease.epoch
    return result_folder(*place) if step is None else _checkpoint_folder(*place, step), row


def _lease(connection: Connection, bucket: Bucket, row: dict[str, Any]) -> LeaseAnswer:
    job = reading.jobs(connection, 'j.id = %s', row['id'])[0]
    own = reading.attempts(connection, 'a.job = %s', row['id'])
    price = next(attempt.price_per_hour for attempt in own if attempt.epoch == job.epoch)
    return LeaseAnswer(
        job=job.id,
        epoch=job.epoch,
        name=row['name'],
        owner_hash=hashlib.sha256(job.owner.encode()).hexdigest()[:16],
        kind=row['kind'],
        recipe=job.recipe,
        overrides=row['spec']['overrides'],
        validation=row['spec']['validation'],
        hours_left=hours_left(job, own, price),
        num_steps=job.num_steps,
        **_sources(connection, bucket, row),
    )


def _sources(connection: Connection, bucket: Bucket, row: dict[str, Any]) -> dict[str, Any]:
    """Return signed GETs of everything that the attempt reads."""
    inputs = {}
    for name, given in row['spec']['inputs'].items():
        inside = bucket.name_of(given['url'])
        assert inside is not None  # refused at submission
        inputs[name] = {'url': bucket.get_url(inside), 'sha256': given['sha256'], 'bytes': given['bytes']}
    checkpoint, model = row['checkpoint'], None
    if row['parent'] is not None:
        parent = connection.execute('select owner, results from job where id = %s', [row['parent']]).fetchone()
        assert parent is not None
        folder = result_folder(parent['owner'], str(row['parent']), parent['results']['epoch'])
        model = {'files': bucket.get_urls(folder, parent['results']['files'])}
    if checkpoint is not None:
        folder = _checkpoint_folder(row['owner'], str(row['id']), checkpoint['epoch'], checkpoint['step'])
        checkpoint = {'step': checkpoint['step'], 'files': bucket.get_urls(folder, checkpoint['files'])}
    return {'inputs': inputs, 'checkpoint': checkpoint, 'model': model}


def _confirm_uploads(bucket: Bucket, folder: str, files: dict[str, FileContent]) -> None:
    """Raises RequestRejected: an object is missing, or is not what the machine says."""
    for name, content in files.items():
        found = bucket.look(f'{folder}/{name}')
        if found is None:
            raise RequestRejected(422, f'{name}: is not in the storage; upload it again')
        if found.num_bytes == content.bytes:
            is_told = bucket.checks_digests and found.sha256 is not None  # else nobody has compared them
            sha256 = found.sha256 if is_told else bucket.sha256_of(f'{folder}/{name}')
            if sha256 == content.sha256:
                continue
        found_text = f'{found.num_bytes:,} bytes are in the storage, {content.bytes:,} were announced'
        raise RequestRejected(422, f'{name}: {found_text}, or their SHA-256 differ; upload it again')


def _stored(files: dict[str, FileContent]) -> dict[str, Any]:
    return {name: file.model_dump() for name, file in files.items()}
