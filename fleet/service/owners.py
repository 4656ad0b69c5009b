"""Endpoints of owners: submit, look, cancel, retry, fetch results. Of another owner's jobs there is no sign; an operator sees all."""

import hashlib
import json
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit
from uuid import UUID

from anyio import from_thread
from fastapi import APIRouter, Header, Query, Request
from psycopg.types.json import Jsonb
from starlette.requests import ClientDisconnect

from data_prep.crawling.addresses import is_allowed
from diffusion.common.files import parse_json_object
from diffusion.common.text import counted
from fleet.jobs.checking import check_job, judgement_key, queue_mistakes
from fleet.jobs.protocol import FileContent, SignedFiles, SignedGet, StateAnswer, SubmitAnswer, UploadAnswer
from fleet.jobs.spec import JobError, JobSpec, spec_of
from fleet.policies.rows import Ending, JobState
from fleet.queue.database import Connection
from fleet.queue.endings import cancel_waiting, close
from fleet.queue.reading import why_job_waits
from fleet.service.gate import Account, Body, FleetService, GatedRoute, Owner, RequestRejected, Service
from fleet.service.machines import result_folder

MAX_JOBS = 500  # a submission
MAX_LISTED = 1000
# Submissions that one process checks at a time, of one owner and of all: each may take a minute of a thread, and machines need threads too.
MAX_CHECKING_OF_OWNER, MAX_CHECKING = 2, 6
MAX_NEEDS = 100  # different ones among the jobs of an owner that wait: each is a step of every claim
INSIDE = re.compile(r'[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)*')  # nothing that HTTP clients rewrite, such as ..
MAX_KEY = 200
MAX_NUMBER = 10**18 - 1  # of a job
SHARED = 'shared'  # folder of the bucket whose objects any owner may name as inputs: base models
COLUMNS = """
    j.id::text, j.number, j.owner, j.kind, j.name, j.recipe, j.state, j.node, j.epoch, j.step, j.num_steps, j.priority, j.cause, j.parent::text,
    extract(epoch from j.created)::float8 as created, extract(epoch from j.ended)::float8 as ended,
    coalesce((
        select sum(a.dollars) from attempt a where a.job = j.id
    ), 0) as dollars
"""

router = APIRouter(route_class=GatedRoute, tags=['asked by an owner'])

_checking, _checking_lock = Counter[str](), threading.Lock()  # submissions by owner


@router.post('/jobs', openapi_extra={'requestBody': {'required': True, 'content': {'application/x-ndjson': {'schema': {'type': 'string'}}}}})
def submit(
    request: Request, owner: Owner, body: Body, service: Service, idempotency_key: Annotated[str, Header(min_length=1, max_length=MAX_KEY)]
) -> SubmitAnswer:
    """Queue the jobs of a body, one JSON object a line: all of them, or none and every mistake. The same key again gives the same jobs."""
    body_sha256 = hashlib.sha256(body).digest()
    with service.database.transaction() as connection:
        if (known := _submitted(connection, owner, idempotency_key, body_sha256)) is not None:
            return SubmitAnswer(jobs=known)
    with _turn(owner):
        checked = _checked(service, owner, body, lambda: from_thread.run(request.is_disconnected))
    with service.database.transaction() as connection:
        row = connection.execute('select max_queued, notice_key from owner where name = %s for update', [owner.name]).fetchone()
        assert row is not None
        if (known := _submitted(connection, owner, idempotency_key, body_sha256)) is not None:  # by a request at the same time
            return SubmitAnswer(jobs=known)
        queued = connection.execute("select count(*) as num from job where owner = %s and state = 'queued'", [owner.name]).fetchone()
        if queued is not None and queued['num'] + len(checked) > row['max_queued']:
            raise RequestRejected(
                422, f'{counted(queued["num"], "job")} of {owner.name} wait and {len(checked)} would come; at most {row["max_queued"]} may'
            )
        ids = [_insert(connection, owner.name, spec, num_steps) for spec, num_steps in checked]
        needs = connection.execute(
            "select count(*) as num from (select distinct recipe, gpu_gb, image, trusted from job where owner = %s and state = 'queued') different",
            [owner.name],
        ).fetchone()
        if needs is not None and needs['num'] > MAX_NEEDS:
            raise RequestRejected(
                422, f'needs: {needs["num"]} different ones, with recipes, among the jobs of {owner.name} that wait; at most {MAX_NEEDS} may be'
            )
        connection.execute(
            'insert into submission (owner, key, body_sha256, jobs) values (%s, %s, %s, %s::uuid[])', [owner.name, idempotency_key, body_sha256, ids]
        )
    return SubmitAnswer(jobs=ids)


@contextmanager
def _turn(owner: Account) -> Iterator[None]:
    """Raises RequestRejected: enough submissions are being checked already."""
    with _checking_lock:
        if _checking[owner.name] >= MAX_CHECKING_OF_OWNER or _checking.total() >= MAX_CHECKING:
            raise RequestRejected(503, f'{counted(_checking.total(), "submission")} are being checked; try again in a few seconds')
        _checking[owner.name] += 1
    try:
        yield
    finally:
        with _checking_lock:
            _checking[owner.name] -= 1


def _checked(service: FleetService, owner: Account, body: bytes, has_gone: Callable[[], bool]) -> list[tuple[JobSpec, int]]:
    lines = [line for line in body.splitlines() if line.strip()]
    if not 0 < len(lines) <= MAX_JOBS:
        raise RequestRejected(422, f'{len(lines)} jobs in a submission; 1 to {MAX_JOBS} may be, one JSON object a line')
    checked, errors = [], list[str]()
    for number, line in enumerate(lines, 1):
        source = f'line {number}'
        if has_gone():
            raise ClientDisconnect
        try:
            spec = spec_of(parse_json_object(line), source)
            _refuse_inputs_of_others(service, owner, spec, source)
            checked.append((spec, _num_steps(service.recipes, judgement_key(spec))))
        except JobError as error:
            errors += [f'{source}: {mistake}' for mistake in error.errors]
        except ValueError as error:
            errors.append(f'{source}: {error}')
    if errors:
        raise RequestRejected(422, f'{counted(len(errors), "mistake")}; no job was queued', errors)
    return checked


@lru_cache(maxsize=4096)  # a thousand jobs of one recipe differ in a few values at most: a check takes a tenth of a second
def _num_steps(recipes: Path, content: str) -> int:
    return check_job(spec_of(json.loads(content), 'job'), 'job', recipes).num_steps


def _refuse_inputs_of_others(service: FleetService, owner: Account, spec: JobSpec, source: str) -> None:
    """Raises JobError: an input lies where another owner's images are or nowhere that can be signed, or no queue takes the job."""
    allowed = (f'owners/{owner.name}/inputs/', f'{SHARED}/')
    errors = [
        f'inputs.{name}.url: {given.url[:200]} is not below {" or ".join(f"{service.bucket.url}/{folder}" for folder in allowed)}; '
        '`fleet submit` uploads folders there'
        for name, given in spec.inputs.items()
        if not INSIDE.fullmatch(inside := service.bucket.name_of(given.url) or '') or not inside.startswith(allowed)
    ]
    errors += queue_mistakes(spec, may_be_http=bool(service.notices_to))
    host = urlsplit(spec.notify.webhook or '').hostname
    with suppress(ValueError):  # names are looked up when they are told
        if host is not None and not is_allowed(str(ip_address(host)), service.notices_to):
            errors.append(f'notify.webhook: {host} is no address of the public internet, nor in a network of --allow-notices-to')
    if errors:
        raise JobError(source, errors)


@router.get('/jobs')
def listed(owner: Owner, service: Service, state: JobState | None = None, after: Annotated[int, Query(ge=0, le=MAX_NUMBER)] = 0) -> dict[str, Any]:
    """List jobs in the order of their submission, 1,000 at most; the next ones come with `after`, the last number. An operator sees all."""
    with service.database.transaction() as connection:
        rows = connection.execute(
            f"""select {COLUMNS} from job j where j.number > %(after)s and (%(all)s or j.owner = %(owner)s)
            and (%(state)s::text is null or j.state = %(state)s) order by j.number limit {MAX_LISTED}""",
            {'after': after, 'all': owner.is_operator, 'owner': owner.name, 'state': state},
        ).fetchall()
    return {'jobs': rows}


@router.get('/jobs/{job:uuid}')
def one_job(job: UUID, owner: Owner, service: Service) -> dict[str, Any]:
    """Show a job with its attempts, its curve ([step, loss, learning rate, steps/s], as its machines said), and why it waits."""
    with service.database.transaction() as connection:
        row = _job_of_owner(connection, owner, job, f"{COLUMNS}, j.curve, j.spec->>'group' as group")
        attempts = connection.execute(
            """select epoch, node, gpu, first_step, last_step, ending, exit_code, message, price_per_hour, steps_per_sec,
            extract(epoch from started)::float8 as started, extract(epoch from last_sign)::float8 as last_sign,
            extract(epoch from ended)::float8 as ended from attempt where job = %s order by epoch""",
            [job],
        ).fetchall()
        children = connection.execute('select id::text from job where parent = %s order by number', [job]).fetchall()
        waits = why_job_waits(connection, row['id'])
    return {**row, 'waits': waits, 'attempts': attempts, 'children': [child['id'] for child in children]}


@router.delete('/jobs/{job:uuid}')
def cancel(job: UUID, owner: Owner, service: Service) -> StateAnswer:
    """End a job; its machine learns of it with its next renewal. One that has ended stays as it is."""
    with service.database.transaction() as connection:
        row = _job_of_owner(connection, owner, job, 'j.id::text, j.state, j.epoch', 'for update of j')
        if row['state'] == JobState.LEASED:
            close(connection, row['id'], row['epoch'], Ending.CANCELLED, message=f'cancelled by {owner.name}')
        elif row['state'] == JobState.QUEUED:
            cancel_waiting(connection, row['id'], f'by {owner.name}')
    return StateAnswer(state=row['state'] if row['state'] not in (JobState.LEASED, JobState.QUEUED) else JobState.CANCELLED)


@router.post('/jobs/{job:uuid}/retry')
def retry(job: UUID, owner: Owner, service: Service) -> StateAnswer:
    """Put a failed or cancelled job back into the queue; what its attempts did until now counts against it no more."""
    with service.database.transaction() as connection:
        row = _job_of_owner(connection, owner, job, 'j.id::text, j.state', 'for update of j')
        if row['state'] not in (JobState.FAILED, JobState.CANCELLED):
            raise RequestRejected(409, f'this job is {row["state"]}; only failed and cancelled ones are tried again')
        connection.execute("update job set state = 'queued', ended = null, cause = '', not_before = now(), counted_from = epoch where id = %s", [job])
        connection.execute('delete from ban where job = %s', [job])
    return StateAnswer(state=JobState.QUEUED)


@router.get('/jobs/{job:uuid}/results')
def results(job: UUID, owner: Owner, service: Service) -> SignedFiles:
    """Sign GETs of a finished job's files."""
    with service.database.transaction() as connection:
        row = _job_of_owner(connection, owner, job, 'j.id::text, j.state, j.owner, j.results')
    if row['results'] is None:
        raise RequestRejected(409, f'this job is {row["state"]} and has no results')
    folder = result_folder(row['owner'], row['id'], row['results']['epoch'])
    return SignedFiles(files=service.bucket.get_urls(folder, row['results']['files']))


@router.post('/inputs', response_model_exclude_none=True)
def upload(said: FileContent, owner: Owner, service: Service) -> UploadAnswer:
    """Sign a PUT for an archive of the owner, unless it is there already."""
    name = f'owners/{owner.name}/inputs/{said.sha256}.tar'
    found = service.bucket.look(name)
    is_there = found is not None and found.num_bytes == said.bytes
    return UploadAnswer(
        input=SignedGet(url=f'{service.bucket.url}/{name}', **said.model_dump()),
        put=None if is_there else service.bucket.put_url(name, said.sha256, said.bytes),
    )


def _insert(connection: Connection, owner: str, spec: JobSpec, num_steps: int) -> str:
    row = connection.execute(
        """insert into job (owner, name, recipe, spec, num_steps, gpu_gb, image, trusted, priority)
        values (%s, %s, %s, %s, %s, %s, %s, %s, %s) returning id::text""",
        [
            owner, spec.name, spec.recipe.removeprefix('yamls/'), Jsonb(json.loads(spec.to_json())), num_steps, spec.needs.gpu_gb, spec.needs.image,
            spec.needs.trusted, spec.priority,
        ],
    ).fetchone()  # fmt: skip
    assert row is not None
    return row['id']


def _submitted(connection: Connection, owner: Account, key: str, body_sha256: bytes) -> list[str] | None:
    """The jobs of an earlier submission with this key.

    Raises:
        RequestRejected: it said something else.
    """
    row = connection.execute('select body_sha256, jobs::text[] as jobs from submission where owner = %s and key = %s', [owner.name, key]).fetchone()
    if row is None:
        return None
    if row['body_sha256'] != body_sha256:
        raise RequestRejected(422, 'Idempotency-Key: another submission has this key already; take a new one')
    return row['jobs']


def _job_of_owner(connection: Connection, owner: Account, job: UUID, columns: str, suffix: str = '') -> dict[str, Any]:
    """Raises RequestRejected: there is no such job, or it is another owner's, which looks the same."""
    row = connection.execute(
        f'select {columns} from job j where j.id = %s and (%s or j.owner = %s) {suffix}', [job, owner.is_operator, owner.name]
    ).fetchone()
    if row is None:
        raise RequestRejected(404, f'there is no job {job}')
    return row
