"""From a request to a function of plain values, and from its exceptions to answers: the only file that knows the web framework's details."""

import base64
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import psycopg
from psycopg_pool import PoolTimeout
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from diffusion.common.files import parse_json_object
from diffusion.common.text import first_line, print_message, redacted
from diffusion.fleet.queue.leases import LeaseEnded
from diffusion.fleet.service.access import Refused, digest
from diffusion.fleet.service.bucket import StorageAway

MAX_BODY_BYTES = 1 << 20
REQUESTS_PER_SEC, BURST = 50, 400  # of one token; a worker asks once in seconds, an owner's command a few times a second
NUM_TOKENS = 10_000  # that are remembered


@dataclass(frozen=True)
class Call:
    """A request as endpoints see it."""

    token: str
    path: Mapping[str, Any]
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> dict[str, Any]:
        """Raises Refused: the body is no JSON object."""
        try:
            return parse_json_object(self.body or b'{}')
        except ValueError as error:
            raise Refused(400, f'the body cannot be read: {error}') from error

    def whole_number(self, key: str, default: int, most: int) -> int:
        """A number of the query.

        Raises:
            Refused: it is none from 0 to `most`.
        """
        text = self.query.get(key, str(default))
        if not re.fullmatch('[0-9]{1,18}', text) or int(text) > most:
            raise Refused(400, f'{key}: {text[:80]!r} is not a whole number from 0 to {most:,}')
        return int(text)


@dataclass
class Rates:
    """Requests a second of each token: a bucket of BURST that fills with REQUESTS_PER_SEC."""

    clock: Callable[[], float] = time.monotonic
    left: OrderedDict[bytes, tuple[float, float]] = field(default_factory=OrderedDict)

    def take(self, token: str) -> None:
        """Raises Refused: too many."""
        name, now = digest(token), self.clock()
        left, since = self.left.pop(name, (float(BURST), now))
        left = min(BURST, left + (now - since) * REQUESTS_PER_SEC)
        self.left[name] = (max(left - 1, 0.0), now)
        if len(self.left) > NUM_TOKENS:
            self.left.popitem(last=False)
        if left < 1:
            raise Refused(429, f'more than {REQUESTS_PER_SEC} requests a second with this token; ask more slowly')


def endpoint(work: Callable[[Call], Response], rates: Rates) -> Callable[[Request], Any]:
    """Make an endpoint of a function that may block: it runs in a thread."""

    async def answer(request: Request) -> Response:
        try:
            token = _token(request.headers.get('authorization', ''))
            rates.take(token)
            asked = Call(token, request.path_params, request.query_params, request.headers, await _body(request))
            return await run_in_threadpool(work, asked)
        except LeaseEnded:
            return JSONResponse({'error': 'this lease has ended: stop, and forget the job'}, 409)
        except Refused as error:
            # A browser asks its user for a password on this header.
            headers = {'WWW-Authenticate': 'Basic realm="fleet", charset="UTF-8"'} if error.status == 401 else {}
            errors = {'errors': [_encodable(one) for one in error.errors]} if error.errors else {}
            return JSONResponse({'error': _encodable(str(error)), **errors}, error.status, headers)
        except (psycopg.DataError, UnicodeEncodeError) as error:  # NUL, half of a surrogate pair, a number beyond its column
            print_message(f'refused: {request.method} {request.url.path!r}: {first_line(error, with_type=True)!r}')
            return JSONResponse({'error': 'the request holds a text or a number that the database cannot store'}, 400)
        except psycopg.IntegrityError:
            return JSONResponse({'error': 'another request changed the same at the same time; try again'}, 503, {'Retry-After': '1'})
        except StorageAway as error:
            print_message(f'the storage does not answer: {error}')
            return JSONResponse({'error': 'the storage does not answer; try again'}, 503, {'Retry-After': '2'})
        except (psycopg.OperationalError, PoolTimeout) as error:
            print_message(f'the database does not answer: {redacted(str(error)).strip()}')
            return JSONResponse({'error': 'the database does not answer; try again'}, 503, {'Retry-After': '2'})
        except ClientDisconnect:
            return Response(status_code=400)

    return answer


async def _body(request: Request) -> bytes:
    """The body, of which no more is ever held than the limit."""
    parts, num_bytes = [], 0
    async for part in request.stream():
        num_bytes += len(part)
        if num_bytes > MAX_BODY_BYTES:
            raise Refused(413, f'a body has at most {MAX_BODY_BYTES:,} bytes; send fewer jobs at a time')
        parts.append(part)
    return b''.join(parts)


def _token(header: str) -> str:
    """The token of `Bearer TOKEN`, or the password of HTTP's basic scheme, which browsers speak; '' without either."""
    scheme, _, rest = header.partition(' ')
    if scheme.lower() == 'bearer':
        return rest.strip()
    if scheme.lower() == 'basic':
        try:
            return base64.b64decode(rest, validate=True).decode().partition(':')[2]
        except ValueError:  # binascii.Error, UnicodeDecodeError, and what b64decode says of characters beyond ASCII
            return ''
    return ''


def _encodable(text: str) -> str:
    """Messages quote what was sent, and half of a surrogate pair cannot be sent back."""
    return text.encode(errors='replace').decode()
