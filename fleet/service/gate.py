"""Gate that every request passes before its endpoint: who asks, how often, a body that is small and comes in time; and errors become answers."""

import asyncio
import base64
import hashlib
import json
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import psycopg
from fastapi import Depends, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from prometheus_client import CollectorRegistry, Counter
from psycopg_pool import PoolTimeout
from pydantic_core import ErrorDetails
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from data_prep.crawling.addresses import Network
from diffusion.common.command_line import describe_mistake
from diffusion.common.text import first_line, print_message, redacted
from fleet.jobs.checking import RECIPES
from fleet.queue.database import Database
from fleet.queue.leases import LeaseEnded, LeaseSettings
from fleet.service.bucket import Bucket, StorageAway

MAX_BODY_BYTES = 1 << 20
BODY_SEC = 30.0  # from the end of the headers to that of the body
REQUESTS_PER_SEC, BURST = 50, 400  # of one token; a worker asks once in seconds, an owner's command a few times a second
NUM_TOKENS = 10_000  # that are remembered
JSON_TYPES = ('application/json', 'application/x-ndjson')
# Tokens are found by an index over their digests, so nothing is compared byte by byte with a secret.
ACCOUNT = """
    select 'owner' as kind, name, is_operator, null::bigint as session, false as is_old from owner where token_hash = %(digest)s
    union all select 'pool', name, false, null, false from pool where token_hash = %(digest)s
    union all select 'enrolment', pool, false, null, false from enrolment where token_hash = %(digest)s and used is null
    union all select case when ended is null then 'machine' else 'former' end, node, false, id,
        ended is null and last_seen < now() - %(seen_every)s * interval '1 second' from session where token_hash = %(digest)s
"""
MISSING = {
    'owner': "this token is no owner's; an operator gives one: python -m fleet owners NAME --new-token",
    'pool': "this token is no pool's; an operator gives one: python -m fleet pools NAME --new-token",
    'machine': 'this token opens nothing any more: the machine has left, or another of its name has enrolled',
}


class RequestRejected(HTTPException):
    """An answer that is no success.

    Args:
        status: of HTTP.
        message: for the one who asked: the value, the limit, the remedy.
        errors: where there are several.
        retry_sec: after which the same may be asked again.
    """

    def __init__(self, status: int, message: str, errors: list[str] | None = None, retry_sec: float | None = None):
        super().__init__(status, message, {'Retry-After': f'{ceil(retry_sec)}'} if retry_sec is not None else None)
        self.errors = errors


@dataclass(frozen=True)
class Account:
    """Bearer of a token: an owner; a pool, or an enrolment token of it, with which a machine enrols; a machine in its present session, or in a former
    one, which enrols again."""

    kind: str
    name: str
    token_hash: bytes
    is_operator: bool = False
    session: int | None = None


@dataclass
class Rates:
    """Requests a second of each token: a bucket of BURST that fills with REQUESTS_PER_SEC."""

    clock: Callable[[], float] = time.monotonic
    left: OrderedDict[bytes, tuple[float, float]] = field(default_factory=OrderedDict)

    def take(self, token: str) -> None:
        """Raises RequestRejected: too many."""
        name, now = digest(token), self.clock()
        left, since = self.left.pop(name, (float(BURST), now))
        left = min(BURST, left + (now - since) * REQUESTS_PER_SEC)
        self.left[name] = (max(left - 1, 0.0), now)
        if len(self.left) > NUM_TOKENS:
            self.left.popitem(last=False)
        if left < 1:
            raise RequestRejected(429, f'more than {REQUESTS_PER_SEC} requests a second with this token; ask more slowly')


class FleetService:
    """One process of the service: its settings, and what it counts.

    Args:
        recipes: folder of the recipes that jobs may name.
        sweep_every_sec: between two looks at what nobody asks for; claims take lapsed leases back too.
        notices_to: networks that are told of ended jobs, also by http, beside the public internet.
    """

    def __init__(
        self, database: Database, bucket: Bucket, recipes: Path = RECIPES, leases: LeaseSettings | None = None, *, sweep_every_sec: float = 5.0,
        notices_to: tuple[Network, ...] = (), notices_every_sec: float = 5.0,
    ):  # fmt: skip
        self.database, self.bucket, self.recipes, self.leases = database, bucket, recipes, leases or LeaseSettings()
        self.sweep_every_sec, self.notices_to, self.notices_every_sec = sweep_every_sec, notices_to, notices_every_sec
        self.rates = Rates()
        self.registry = CollectorRegistry()
        self.answers = Counter('fleet_requests', 'Answers of this process.', ['method', 'path', 'status'], registry=self.registry)

    def account_of(self, token: str) -> Account:
        """Find who bears a token, and note that a machine was seen; not at each request, or forty idle machines would write all the time.

        Raises:
            RequestRejected: nobody does.
        """
        with self.database.transaction() as connection:
            row = connection.execute(ACCOUNT, {'digest': digest(token), 'seen_every': self.leases.lease_sec / 4}).fetchone()
            if row is None:
                raise RequestRejected(
                    401,
                    'this token opens nothing; an operator gives one: python -m fleet owners NAME --new-token, for machines pools NAME --new-token',
                )
            if row.pop('is_old'):
                # The node first, as enrolment does.
                connection.execute('update node set last_seen = greatest(last_seen, now()) where name = %s', [row['name']])
                connection.execute('update session set last_seen = greatest(last_seen, now()) where id = %s', [row['session']])
        return Account(token_hash=digest(token), **row)


class GatedRoute(APIRoute):
    """Route whose endpoint runs only for a known token, and whose body is not read before that."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        answer = super().get_route_handler()

        async def gated(request: Request) -> Response:
            service: FleetService = request.app.state.service
            request = _LimitedRequest(request.scope, request.receive)
            try:
                token = _token_of(request)
                service.rates.take(token)
                request.state.account = await run_in_threadpool(service.account_of, token)
                if request.method != 'GET':
                    async with asyncio.timeout(BODY_SEC):
                        request.state.body = await request.body()
                response = await answer(request)
            except Exception as error:
                response = _refusal(request, error)
                if request.method != 'GET' and not hasattr(request.state, 'body') and response.status_code != 413:
                    response.headers['Connection'] = 'close'  # or the server would wait for the rest of the body
            service.answers.labels(request.method, self.path, str(response.status_code)).inc()
            return response

        return gated


class _LimitedRequest(Request):
    async def stream(self) -> AsyncIterator[bytes]:  # type: ignore[override] # mypy takes the base's for a coroutine
        """Yield the body, of which no more is ever held than the limit."""
        num_bytes = 0
        async for part in super().stream():
            num_bytes += len(part)
            if num_bytes > MAX_BODY_BYTES:
                raise RequestRejected(413, f'a body has at most {MAX_BODY_BYTES:,} bytes; send fewer jobs at a time')
            yield part


def _token_of(request: Request) -> str:
    """Return the token of `Bearer TOKEN`, or for GET the password of HTTP's basic scheme, which browsers speak; '' without either.

    A browser sends such a password by itself with whatever a page of somebody else makes it send; so nothing but a look may come of it.

    Raises:
        RequestRejected: the request would change something, and may come from another's page.
    """
    scheme, _, rest = request.headers.get('authorization', '').partition(' ')
    if request.method == 'GET':
        if scheme.lower() == 'basic':
            try:
                return base64.b64decode(rest, validate=True).decode().partition(':')[2]
            except ValueError:  # binascii.Error, UnicodeDecodeError, and what b64decode says of characters beyond ASCII
                return ''
    else:
        origin, host = request.headers.get('origin'), request.headers.get('host', '')
        if request.headers.get('sec-fetch-site') == 'cross-site' or (origin is not None and urlsplit(origin).netloc != host):
            raise RequestRejected(403, f'{request.method} from a page of {(origin or "another site")[:80]}: only programs and {host[:80]} may')
        media_type = request.headers.get('content-type', '').partition(';')[0].strip().lower()
        has_body = request.headers.get('content-length', '0') != '0' or 'transfer-encoding' in request.headers
        if media_type not in JSON_TYPES and (media_type or has_body):
            raise RequestRejected(415, f'Content-Type: {media_type[:80]!r} is not one of {", ".join(JSON_TYPES)}')
        if scheme.lower() == 'basic':
            raise RequestRejected(401, f'{request.method} takes a bearer token alone; a password opens pages')
    return rest.strip() if scheme.lower() == 'bearer' else ''


def _refusal(request: Request, error: Exception) -> Response:
    """Return the answer that an exception means; others are raised again."""
    match error:
        case LeaseEnded():
            return _error(409, 'this lease has ended: stop, and forget the job')
        case RequestValidationError():
            found = error.errors()
            is_body = found[0]['loc'][0] == 'body' and found[0]['type'] != 'json_invalid'
            return _error(422 if is_body else 400, '; '.join(_mistake(one) for one in found[:20]))
        case HTTPException():
            # A browser asks its user for a password on this header.
            headers = {'WWW-Authenticate': 'Basic realm="fleet", charset="UTF-8"'} if (error.status_code, request.method) == (401, 'GET') else {}
            return _error(error.status_code, str(error.detail), {**headers, **(error.headers or {})}, getattr(error, 'errors', None))
        case psycopg.DataError() | UnicodeEncodeError():  # NUL, half of a surrogate pair, a number beyond its column
            print_message(f'refused: {request.method} {request.url.path!r}: {first_line(error, with_type=True)!r}')
            return _error(400, 'the request holds a text or a number that the database cannot store')
        case psycopg.IntegrityError():
            return _error(503, 'another request changed the same at the same time; try again', {'Retry-After': '1'})
        case StorageAway():
            print_message(f'the storage does not answer: {error}')
            return _error(503, 'the storage does not answer; try again', {'Retry-After': '2'})
        case psycopg.OperationalError() | PoolTimeout():
            print_message(f'the database does not answer: {redacted(str(error)).strip()}')
            return _error(503, 'the database does not answer; try again', {'Retry-After': '2'})
        case TimeoutError():
            return _error(408, f'the body did not come within {BODY_SEC:g} s; send fewer jobs at a time')
        case ClientDisconnect():
            return Response(status_code=400)
    raise error


def _error(status: int, message: str, headers: dict[str, str] | None = None, errors: list[str] | None = None) -> Response:
    """Messages quote what was sent, and half of a surrogate pair cannot be sent back."""
    text = json.dumps({'error': message, **({'errors': errors} if errors else {})}, ensure_ascii=False)
    return Response(text.encode(errors='replace'), status, headers, 'application/json')


def _mistake(error: ErrorDetails) -> str:
    key = '.'.join(str(part)[:80] for part in error['loc'][1:]) or 'body'
    if error['type'] == 'extra_forbidden':
        return f'{key}: there is no such setting'
    return f'{key}{":" if error["type"] != "missing" else ""}{describe_mistake(error)}'


def digest(token: str) -> bytes:
    """Return what the database knows of a token: 32 random bytes need no salt."""
    return hashlib.sha256(token.encode()).digest()


def _account_of_kind(*kinds: str) -> Any:
    async def account(request: Request) -> Account:  # async: a thread is not needed for it
        found: Account = request.state.account
        if found.kind not in kinds:
            raise RequestRejected(401, MISSING[kinds[0]])
        return found

    return Depends(account)


async def _operator(request: Request) -> Account:
    found: Account = request.state.account
    if found.kind != 'owner':
        raise RequestRejected(401, MISSING['owner'])
    if not found.is_operator:
        raise RequestRejected(403, f'{found.name} is not an operator')
    return found


async def _service(request: Request) -> FleetService:
    return request.app.state.service  # type: ignore[no-any-return]


async def _body(request: Request) -> bytes:
    return request.state.body  # type: ignore[no-any-return]


# Parameters of endpoints.
Owner = Annotated[Account, _account_of_kind('owner')]
Operator = Annotated[Account, Depends(_operator)]
Newcomer = Annotated[Account, _account_of_kind('pool', 'enrolment', 'machine', 'former')]
Machine = Annotated[Account, _account_of_kind('machine')]
Service = Annotated[FleetService, Depends(_service)]
Body = Annotated[bytes, Depends(_body)]
