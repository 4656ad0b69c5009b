"""What machines ask: enrol, claim, renew, upload, publish, end, leave. A machine learns of one job at a time, and only what its attempt needs."""

import hashlib
import re
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from starlette.responses import JSONResponse, Response

from diffusion.common.text import redacted
from diffusion.fleet.jobs.spec import LARGEST_INPUT_BYTES, MAX_PROMPTS, NAME, RESULT_SUFFIXES, SHA256
from diffusion.fleet.policies.endings import ending_of
from diffusion.fleet.policies.rows import Ending, NodeState
from diffusion.fleet.policies.spending import hours_left
from diffusion.fleet.queue import leases, reading
from diffusion.fleet.queue.database import Database, new_token
from diffusion.fleet.queue.leases import Held, Terms
from diffusion.fleet.service.access import Machine, Refused, digest, machine_of, pool_of
from diffusion.fleet.service.bucket import Bucket
from diffusion.fleet.service.http import Call

MAX_MESSAGE = 4000
MAX_FILES = 2 * MAX_PROMPTS  # a job that draws hands over an image for each prompt, and more
MAX_STEPS = 2**31 - 1
FILE_NAME = re.compile(r'[A-Za-z0-9][A-Za-z0-9._-]{0,99}(/[A-Za-z0-9][A-Za-z0-9._-]{0,99}){0,3}')
SAID = {Ending.RELEASED.value: Ending.RELEASED, Ending.NODE_FAULT.value: Ending.NODE_FAULT}  # what a machine may say beside an exit code


class Machines:
    """The endpoints of machines."""

    def __init__(self, database: Database, bucket: Bucket, terms: Terms):
        self.database, self.bucket, self.terms = database, bucket, terms
        self.endpoints: dict[tuple[str, str], Callable[[Call], Response]] = {
            ('POST', '/enroll'): self.enroll,
            ('POST', '/claim'): self.claim,
            ('POST', '/leave'): self.leave,
            ('POST', '/jobs/{job:uuid}/renew'): self.renew,
            ('POST', '/jobs/{job:uuid}/inputs'): self.inputs,
            ('POST', '/jobs/{job:uuid}/urls'): self.urls,
            ('POST', '/jobs/{job:uuid}/publish'): self.publish,
            ('POST', '/jobs/{job:uuid}/end'): self.end,
        }

    def enroll(self, asked: Call) -> Response:
        """A machine enters its pool and gets the token of its session; one of the same name that was there has left."""
        with self.database.transaction() as connection:
            pool = pool_of(connection, asked.token)
        said = asked.json()
        name, gpu, image = (str(said.get(key) or '') for key in ('machine', 'gpu', 'image'))
        if not NAME.fullmatch(name):
            raise Refused(400, f'machine: {name[:80]!r} may have letters, digits and . _ - alone, 64 at most')
        gpu_gb = _number(said, 'gpu_gb', 0, 10_000)
        num_gpus = _whole(said, 'gpus', 1, 1024, 1)
        token = new_token('node')
        with self.database.transaction() as connection:
            # The node's row comes first: it makes two enrolments under one name wait for each other.
            # Quarantine outlasts a restart: the machine is the same.
            row = connection.execute(
                """insert into node (name, pool, gpu, gpu_gb, num_gpus, image) values (%(name)s, %(pool)s, %(gpu)s, %(gpu_gb)s, %(gpus)s, %(image)s)
                on conflict (name) do update set gpu = excluded.gpu, gpu_gb = excluded.gpu_gb, num_gpus = excluded.num_gpus, image = excluded.image,
                    last_seen = now(), state = case when node.state = 'quarantined' then node.state else 'live' end,
                    reason = case when node.state = 'quarantined' then node.reason else '' end
                returning pool""",
                {'name': name, 'pool': pool, 'gpu': gpu[:80] or 'cpu', 'gpu_gb': gpu_gb, 'gpus': num_gpus, 'image': image[:200]},
            ).fetchone()
            if row is None or row['pool'] != pool:
                raise Refused(409, f'machine: {name} belongs to another pool; name this one otherwise')
            leases.take_back(connection, 'j.node = %s', name)
            connection.execute('update session set ended = now() where node = %s and ended is null', [name])
            connection.execute(
                'insert into session (node, token_hash, price_per_hour) select %s, %s, price_per_hour from pool where name = %s',
                [name, digest(token), pool],
            )
        return JSONResponse({'node': name, 'token': token, **asdict(self.terms)})

    def claim(self, asked: Call) -> Response:
        with self.database.transaction() as connection:
            machine = self._machine(connection, asked)
            row = leases.claim(connection, machine.node, machine.session, self.terms)
            if row is not None:
                return JSONResponse(self._lease(connection, row))
            node = reading.nodes(connection, 'n.name = %s', machine.node)[0]
        if node.state != NodeState.LIVE:
            raise Refused(410, f'this machine is {node.state}: it gets no more jobs')
        return Response(status_code=204, headers={'Retry-After': f'{self.terms.poll_sec:g}'})

    def leave(self, asked: Call) -> Response:
        with self.database.transaction() as connection:
            machine = self._machine(connection, asked)
            leases.take_back(connection, 'j.node = %s', machine.node)
            connection.execute('update session set ended = now() where id = %s', [machine.session])
            connection.execute("update node set state = 'gone' where name = %s and state in ('live', 'draining')", [machine.node])
        return JSONResponse({})

    def renew(self, asked: Call) -> Response:
        said = asked.json()
        pace = said.get('steps_per_sec')
        with self.database.transaction() as connection:
            held = self._held(connection, asked, said)
            step = _whole(said, 'step', 0, MAX_STEPS, 0)
            action, reason = leases.renew(connection, held, step, None if pace is None else _number(said, 'steps_per_sec', 0, 1e6), self.terms)
        return JSONResponse({'action': action, 'reason': reason})

    def inputs(self, asked: Call) -> Response:
        """Fresh URLs: those of the lease may have expired before gigabytes had arrived."""
        said = asked.json()
        with self.database.transaction() as connection:
            row = leases.hold(connection, self._held(connection, asked, said))
            return JSONResponse(self._sources(connection, row))

    def urls(self, asked: Call) -> Response:
        said = asked.json()
        step = None if said.get('step') is None else _whole(said, 'step', 0, MAX_STEPS)
        files = _files(said)
        with self.database.transaction() as connection:
            held = self._held(connection, asked, said)
            row = leases.hold(connection, held)
        folder = place_of(row['owner'], held.job, held.epoch, step)
        signed = {name: self.bucket.put_url(f'{folder}/{name}', content['sha256'], content['bytes']) for name, content in files.items()}
        return JSONResponse({'files': {name: {'url': put.url, 'headers': put.headers} for name, put in signed.items()}})

    def publish(self, asked: Call) -> Response:
        said = asked.json()
        step, files = _whole(said, 'step', 0, MAX_STEPS), _files(said)
        with self.database.transaction() as connection:
            held = self._held(connection, asked, said)
            row = leases.hold(connection, held)
        if 0 < row['num_steps'] < step:
            raise Refused(422, f'step: {step:,} of a job of {row["num_steps"]:,} steps')
        self._look(place_of(row['owner'], held.job, held.epoch, step), files)  # takes as long as the storage takes: not inside a transaction
        with self.database.transaction() as connection:
            leases.publish(connection, held, step, files)
        return JSONResponse({})

    def end(self, asked: Call) -> Response:
        said = asked.json()
        code, files = said.get('exit_code'), _files(said)
        code = None if code is None else _whole(said, 'exit_code', -255, 255)
        ending = _ending(code, said.get('ending'))
        with self.database.transaction() as connection:
            held = self._held(connection, asked, said)
            row = leases.hold(connection, held)
        if ending == Ending.DONE:
            if not files:
                raise Refused(422, 'files: a job that is done has results')
            # The next machine and the owner load them: a pickle would run there.
            if strange := [name for name in files if not name.endswith(RESULT_SUFFIXES)]:
                raise Refused(422, f'files: {strange[0]} is no result: only {", ".join(RESULT_SUFFIXES)} are')
            self._look(place_of(row['owner'], held.job, held.epoch, None), files)
        message = redacted(str(said.get('message') or ''))[-MAX_MESSAGE:].replace('\0', '').encode(errors='replace').decode()
        step = _whole(said, 'step', 0, MAX_STEPS, 0)
        with self.database.transaction() as connection:
            leases.end(connection, held, ending, step, code, message, files if ending == Ending.DONE else None)
        return JSONResponse({})

    def _machine(self, connection: Any, asked: Call) -> Machine:
        return machine_of(connection, asked.token, self.terms.lease_sec / 4)

    def _held(self, connection: Any, asked: Call, said: dict[str, Any]) -> Held:
        machine = self._machine(connection, asked)
        return Held(str(asked.path['job']), _whole(said, 'epoch', 1, MAX_STEPS), machine.node)

    def _lease(self, connection: Any, row: dict[str, Any]) -> dict[str, Any]:
        spec = row['spec']
        checkpoint = row['checkpoint']
        job = reading.jobs(connection, 'j.id = %s', row['id'])[0]
        own = reading.attempts(connection, 'a.job = %s', row['id'])
        price = next(attempt.price_per_hour for attempt in own if attempt.epoch == job.epoch)
        return {
            'job': str(row['id']),
            'epoch': row['epoch'],
            'name': row['name'],
            'owner_hash': hashlib.sha256(row['owner'].encode()).hexdigest()[:16],
            'kind': row['kind'],
            'recipe': row['recipe'],
            'overrides': spec['overrides'],
            'validation': spec['validation'],
            'hours_left': hours_left(job, own, price),
            'num_steps': row['num_steps'],
            'checkpoint': None if checkpoint is None else {'step': checkpoint['step'], 'epoch': checkpoint['epoch']},
            **self._sources(connection, row),
        }

    def _sources(self, connection: Any, row: dict[str, Any]) -> dict[str, Any]:
        """Signed GETs of everything that the attempt reads."""
        inputs = {}
        for name, given in row['spec']['inputs'].items():
            inside = self.bucket.name_of(given['url'])
            assert inside is not None  # refused at submission
            inputs[name] = {'url': self.bucket.get_url(inside), 'sha256': given['sha256'], 'bytes': given['bytes']}
        checkpoint, model = row['checkpoint'], None
        if row['parent'] is not None:
            parent = connection.execute('select owner, results from job where id = %s', [row['parent']]).fetchone()
            model = {
                'files': self._signed(place_of(parent['owner'], str(row['parent']), parent['results']['epoch'], None), parent['results']['files'])
            }
        if checkpoint is not None:
            folder = place_of(row['owner'], str(row['id']), checkpoint['epoch'], checkpoint['step'])
            checkpoint = {'step': checkpoint['step'], 'files': self._signed(folder, checkpoint['files'])}
        return {'inputs': inputs, 'checkpoint': checkpoint, 'model': model}

    def _signed(self, folder: str, files: dict[str, Any]) -> dict[str, Any]:
        return {name: {'url': self.bucket.get_url(f'{folder}/{name}'), **content} for name, content in files.items()}

    def _look(self, folder: str, files: dict[str, Any]) -> None:
        """Raises Refused: an object is missing, or is not what the machine says."""
        for name, content in files.items():
            found = self.bucket.look(f'{folder}/{name}')
            if found is None:
                raise Refused(422, f'{name}: is not in the storage; upload it again')
            if found.num_bytes != content['bytes'] or found.sha256 not in (None, content['sha256']):
                raise Refused(422, f'{name}: {found.num_bytes:,} bytes are in the storage and not those {content["bytes"]:,} that were announced')


def place_of(owner: str, job: str, epoch: int, step: int | None) -> str:
    """The folder of an attempt's checkpoint, or of its results: no two epochs share a key."""
    return f'owners/{owner}/jobs/{job}/e{epoch}/{"result" if step is None else f"s{step}"}'


def _ending(exit_code: int | None, said: object) -> Ending:
    """How an attempt ended, from train.py's exit code and what the machine says of itself.

    Raises:
        Refused: it says something that only the service may, or neither.
    """
    if said is not None:
        if not isinstance(said, str) or said not in SAID:
            raise Refused(400, f'ending: {str(said)[:80]!r} is not one of {", ".join(SAID)}')
        return SAID[said]
    if exit_code is None:
        raise Refused(400, 'exit_code or ending has to be said')
    return ending_of(exit_code)


def _files(said: dict[str, Any]) -> dict[str, dict[str, Any]]:
    files = said.get('files') or {}
    if not isinstance(files, dict) or len(files) > MAX_FILES:
        raise Refused(400, f'files: a mapping of at most {MAX_FILES} names to their sha256 and bytes is wanted')
    kept = {}
    for name, content in files.items():
        if not FILE_NAME.fullmatch(name):
            raise Refused(400, f'files: {name[:80]!r} is no name; letters, digits and . _ - are, in at most four folders')
        sha256 = content.get('sha256') if isinstance(content, dict) else None
        if not isinstance(sha256, str) or not SHA256.fullmatch(sha256):
            raise Refused(400, f'files: {name} needs its sha256 in 64 hex digits and its bytes')
        kept[name] = {'sha256': sha256, 'bytes': _whole(content, 'bytes', 0, LARGEST_INPUT_BYTES)}
    return kept


def _number(said: dict[str, Any], key: str, low: float, high: float, default: float | None = None) -> float:
    value = said.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise Refused(400, f'{key}: {str(value)[:80]!r} is not a number from {low:g} to {high:g}')
    return value


def _whole(said: dict[str, Any], key: str, low: int, high: int, default: int | None = None) -> int:
    value = _number(said, key, low, high, default)
    if not isinstance(value, int):
        raise Refused(400, f'{key}: {value:g} is not a whole number')
    return value
