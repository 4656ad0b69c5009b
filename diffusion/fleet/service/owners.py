"""What owners ask: submit, look, cancel, retry, fetch results. Of another owner's jobs there is no sign; an operator sees all."""

import hashlib
import json
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

from psycopg.types.json import Jsonb
from starlette.responses import JSONResponse, Response

from diffusion.common.files import parse_json_object
from diffusion.common.text import counted
from diffusion.fleet.jobs.checking import check_job, queue_mistakes
from diffusion.fleet.jobs.spec import LARGEST_INPUT_BYTES, SHA256, JobError, JobSpec, spec_of
from diffusion.fleet.policies.rows import Ending, JobState
from diffusion.fleet.queue.database import Connection, Database
from diffusion.fleet.queue.endings import close
from diffusion.fleet.queue.reading import why_job_waits
from diffusion.fleet.service.access import Account, Refused, owner_of
from diffusion.fleet.service.bucket import Bucket
from diffusion.fleet.service.http import Call
from diffusion.fleet.service.machines import place_of

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


class Owners:
    """The endpoints of owners.

    Args:
        recipes: folder of the recipes that jobs may name.
        may_be_http: whether notices may be sent without TLS, to networks that the service was told of.
    """

    def __init__(self, database: Database, bucket: Bucket, recipes: Path, may_be_http: bool = False):
        self.database, self.bucket, self.recipes, self.may_be_http = database, bucket, recipes, may_be_http
        self.endpoints: dict[tuple[str, str], Callable[[Call], Response]] = {
            ('POST', '/jobs'): self.submit,
            ('GET', '/jobs'): self.listed,
            ('GET', '/jobs/{job:uuid}'): self.job,
            ('DELETE', '/jobs/{job:uuid}'): self.cancel,
            ('POST', '/jobs/{job:uuid}/retry'): self.retry,
            ('GET', '/jobs/{job:uuid}/results'): self.results,
            ('POST', '/inputs'): self.upload,
        }
        self.checking, self.checking_lock = Counter[str](), threading.Lock()  # submissions by owner
        # A thousand jobs of one recipe differ in a few values at most: a check takes a tenth of a second.
        self.num_steps_of = lru_cache(maxsize=4096)(self._num_steps)

    def submit(self, asked: Call) -> Response:
        """Queue the jobs of a body, one JSON object a line: all of them, or none and every mistake. The same key again gives the same jobs."""
        with self.database.transaction() as connection:
            owner = owner_of(connection, asked.token)
        key = asked.headers.get('idempotency-key', '')
        if not 0 < len(key) <= MAX_KEY:
            raise Refused(400, f'Idempotency-Key: a text of 1 to {MAX_KEY} characters is wanted, another for each submission')
        body_sha256 = hashlib.sha256(asked.body).digest()
        with self.database.transaction() as connection:
            if (known := _submitted(connection, owner, key, body_sha256)) is not None:
                return JSONResponse({'jobs': known})
        with self._place(owner):
            checked = self._checked(owner, asked.body)
        with self.database.transaction() as connection:
            row = connection.execute('select max_queued, notice_key from owner where name = %s for update', [owner.name]).fetchone()
            assert row is not None
            if (known := _submitted(connection, owner, key, body_sha256)) is not None:  # by a request at the same time
                return JSONResponse({'jobs': known})
            queued = connection.execute("select count(*) as num from job where owner = %s and state = 'queued'", [owner.name]).fetchone()
            if queued is not None and queued['num'] + len(checked) > row['max_queued']:
                raise Refused(
                    422, f'{counted(queued["num"], "job")} of {owner.name} wait and {len(checked)} would come; at most {row["max_queued"]} may'
                )
            ids = [_insert(connection, owner.name, spec, num_steps) for spec, num_steps in checked]
            needs = connection.execute(
                "select count(*) as num from (select distinct gpu_gb, image, trusted from job where owner = %s and state = 'queued') different",
                [owner.name],
            ).fetchone()
            if needs is not None and needs['num'] > MAX_NEEDS:
                raise Refused(422, f'needs: {needs["num"]} different ones among the jobs of {owner.name} that wait; at most {MAX_NEEDS} may be')
            connection.execute(
                'insert into submission (owner, key, body_sha256, jobs) values (%s, %s, %s, %s::uuid[])', [owner.name, key, body_sha256, ids]
            )
        return JSONResponse({'jobs': ids})

    @contextmanager
    def _place(self, owner: Account) -> Iterator[None]:
        """Raises Refused: enough submissions are being checked already."""
        with self.checking_lock:
            if self.checking[owner.name] >= MAX_CHECKING_OF_OWNER or self.checking.total() >= MAX_CHECKING:
                raise Refused(503, f'{counted(self.checking.total(), "submission")} are being checked; try again in a few seconds')
            self.checking[owner.name] += 1
        try:
            yield
        finally:
            with self.checking_lock:
                self.checking[owner.name] -= 1

    def _checked(self, owner: Account, body: bytes) -> list[tuple[JobSpec, int]]:
        lines = [line for line in body.splitlines() if line.strip()]
        if not 0 < len(lines) <= MAX_JOBS:
            raise Refused(422, f'{len(lines)} jobs in a submission; 1 to {MAX_JOBS} may be, one JSON object a line')
        checked, errors = [], list[str]()
        for number, line in enumerate(lines, 1):
            source = f'line {number}'
            try:
                spec = spec_of(parse_json_object(line), source)
                self._own_inputs(owner, spec, source)
                checked.append((spec, self.num_steps_of(spec_key(spec))))
            except JobError as error:
                errors += [f'{source}: {mistake}' for mistake in error.errors]
            except ValueError as error:
                errors.append(f'{source}: {error}')
        if errors:
            raise Refused(422, f'{counted(len(errors), "mistake")}; no job was queued', errors)
        return checked

    def _num_steps(self, content: str) -> int:
        return check_job(spec_of(json.loads(content), 'job'), 'job', self.recipes).num_steps

    def _own_inputs(self, owner: Account, spec: JobSpec, source: str) -> None:
        """Raises JobError: an input lies where another owner's images are, or nowhere that can be signed."""
        allowed = (f'owners/{owner.name}/inputs/', f'{SHARED}/')
        errors = [
            f'inputs.{name}.url: {given.url[:200]} is not below {" or ".join(f"{self.bucket.url}/{folder}" for folder in allowed)}; '
            '`fleet submit` uploads folders there'
            for name, given in spec.inputs.items()
            if not INSIDE.fullmatch(inside := self.bucket.name_of(given.url) or '') or not inside.startswith(allowed)
        ]
        errors += queue_mistakes(spec, self.may_be_http)
        if errors:
            raise JobError(source, errors)

    def listed(self, asked: Call) -> Response:
        """Jobs in the order of their submission, 1,000 at most; the next ones come with `after`, the last number."""
        state, after = asked.query.get('state'), asked.whole_number('after', 0, MAX_NUMBER)
        if state is not None and state not in list(JobState):
            raise Refused(400, f'state: {state[:80]!r} is not one of {", ".join(JobState)}')
        with self.database.transaction() as connection:
            owner = owner_of(connection, asked.token)
            rows = connection.execute(
                f"""select {COLUMNS} from job j where j.number > %(after)s and (%(all)s or j.owner = %(owner)s)
                and (%(state)s::text is null or j.state = %(state)s) order by j.number limit {MAX_LISTED}""",
                {'after': after, 'all': owner.is_operator, 'owner': owner.name, 'state': state},
            ).fetchall()
        return JSONResponse({'jobs': rows})

    def job(self, asked: Call) -> Response:
        """One job with all its attempts, and why it waits."""
        with self.database.transaction() as connection:
            owner = owner_of(connection, asked.token)
            row = _own(connection, owner, asked, COLUMNS)
            attempts = connection.execute(
                """select epoch, node, gpu, first_step, last_step, ending, exit_code, message, price_per_hour, steps_per_sec,
                extract(epoch from started)::float8 as started, extract(epoch from last_sign)::float8 as last_sign,
                extract(epoch from ended)::float8 as ended from attempt where job = %s order by epoch""",
                [row['id']],
            ).fetchall()
            children = connection.execute('select id::text from job where parent = %s order by number', [row['id']]).fetchall()
            waits = why_job_waits(connection, row['id'])
        return JSONResponse({**row, 'waits': waits, 'attempts': attempts, 'children': [child['id'] for child in children]})

    def cancel(self, asked: Call) -> Response:
        """End a job; its machine learns of it with its next renewal. One that has ended stays as it is."""
        with self.database.transaction() as connection:
            owner = owner_of(connection, asked.token)
            row = _own(connection, owner, asked, 'j.id::text, j.state, j.epoch', 'for update of j')
            if row['state'] == JobState.LEASED:
                close(connection, row['id'], row['epoch'], Ending.CANCELLED, message=f'cancelled by {owner.name}')
            elif row['state'] == JobState.QUEUED:
                connection.execute("update job set state = 'cancelled', ended = now(), cause = %s where id = %s", [f'by {owner.name}', row['id']])
        return JSONResponse({'state': row['state'] if row['state'] not in (JobState.LEASED, JobState.QUEUED) else JobState.CANCELLED})

    def retry(self, asked: Call) -> Response:
        """Put a failed or cancelled job back into the queue; what its attempts did until now counts against it no more."""
        with self.database.transaction() as connection:
            owner = owner_of(connection, asked.token)
            row = _own(connection, owner, asked, 'j.id::text, j.state', 'for update of j')
            if row['state'] not in (JobState.FAILED, JobState.CANCELLED):
                raise Refused(409, f'this job is {row["state"]}; only failed and cancelled ones are tried again')
            connection.execute(
                """update job set state = 'queued', ended = null, cause = '', not_before = now(), counted_from = epoch where id = %s""", [row['id']]
            )
            connection.execute('delete from ban where job = %s', [row['id']])
        return JSONResponse({'state': JobState.QUEUED})

    def results(self, asked: Call) -> Response:
        """Signed GETs of a finished job's files."""
        with self.database.transaction() as connection:
            owner = owner_of(connection, asked.token)
            row = _own(connection, owner, asked, 'j.id::text, j.state, j.owner, j.results')
        if row['results'] is None:
            raise Refused(409, f'this job is {row["state"]} and has no results')
        folder = place_of(row['owner'], row['id'], row['results']['epoch'], None)
        files = {name: {'url': self.bucket.get_url(f'{folder}/{name}'), **content} for name, content in row['results']['files'].items()}
        return JSONResponse({'files': files})

    def upload(self, asked: Call) -> Response:
        """A signed PUT for an archive of the owner, unless it is there already."""
        with self.database.transaction() as connection:
            owner = owner_of(connection, asked.token)
        said = asked.json()
        sha256, num_bytes = str(said.get('sha256')), said.get('bytes')
        if not SHA256.fullmatch(sha256) or isinstance(num_bytes, bool) or not isinstance(num_bytes, int) or not 0 <= num_bytes <= LARGEST_INPUT_BYTES:
            raise Refused(400, f'sha256 in 64 hex digits and bytes up to {LARGEST_INPUT_BYTES:,} are wanted')
        name = f'owners/{owner.name}/inputs/{sha256}.tar'
        answer: dict[str, Any] = {'input': {'url': f'{self.bucket.url}/{name}', 'sha256': sha256, 'bytes': num_bytes}}
        found = self.bucket.look(name)
        if found is None or found.num_bytes != num_bytes:
            put = self.bucket.put_url(name, sha256, num_bytes)
            answer['put'] = {'url': put.url, 'headers': put.headers}
        return JSONResponse(answer)


def spec_key(spec: JobSpec) -> str:
    """What the recipe's judgement of a job depends on, as a job: by this text it is remembered."""
    inputs = {name: {'url': 's3://', 'sha256': '0' * 64, 'bytes': 0} for name in spec.inputs}
    return json.dumps({'recipe': spec.recipe, 'overrides': spec.overrides, 'inputs': inputs}, sort_keys=True)


def _insert(connection: Connection, owner: str, spec: JobSpec, num_steps: int) -> str:
    row = connection.execute(
        """insert into job (owner, name, recipe, spec, num_steps, gpu_gb, image, trusted, priority)
        values (%s, %s, %s, %s, %s, %s, %s, %s, %s) returning id::text""",
        [
            owner, spec.name, spec.recipe, Jsonb(json.loads(spec.to_json())), num_steps, spec.needs.gpu_gb, spec.needs.image, spec.needs.trusted,
            spec.priority,
        ],
    ).fetchone()  # fmt: skip
    assert row is not None
    return row['id']


def _submitted(connection: Connection, owner: Account, key: str, body_sha256: bytes) -> list[str] | None:
    """The jobs of an earlier submission with this key.

    Raises:
        Refused: it said something else.
    """
    row = connection.execute('select body_sha256, jobs::text[] as jobs from submission where owner = %s and key = %s', [owner.name, key]).fetchone()
    if row is None:
        return None
    if row['body_sha256'] != body_sha256:
        raise Refused(422, 'Idempotency-Key: another submission has this key already; take a new one')
    return row['jobs']


def _own(connection: Connection, owner: Account, asked: Call, columns: str, suffix: str = '') -> dict[str, Any]:
    """Raises Refused: there is no such job, or it is another owner's, which looks the same."""
    row = connection.execute(
        f'select {columns} from job j where j.id = %s and (%s or j.owner = %s) {suffix}', [asked.path['job'], owner.is_operator, owner.name]
    ).fetchone()
    if row is None:
        raise Refused(404, f'there is no job {asked.path["job"]}')
    return row
