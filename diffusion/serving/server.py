"""The page over HTTP: which requests are let through, and how the process starts and ends."""

import asyncio
import ipaddress
import json
import re
import socket as sockets
from collections.abc import Callable, Coroutine, Mapping, MutableMapping
from contextlib import suppress
from typing import Any
from urllib.parse import parse_qs

import uvicorn

from diffusion.common.files import parse_json_object
from diffusion.contracts.errors import InputError

Scope = MutableMapping[str, Any]
MAX_BODY_BYTES = 64 << 10
MAX_PORT = 65535
# Of Gradio's addresses those that the page reads, besides those of its functions: it also has some for uploads, recordings, other servers' files,
# editing the application and starting its queue a second time.
PATHS = ('/', '/config', '/theme.css', '/manifest.json', '/favicon.ico', '/robots.txt')
FOLDERS = ('/assets/', '/static/', '/gradio_api/file=/', '/gradio_api/info', '/gradio_api/app_id', '/theme.css')
HEALTH = '/health'
JOIN = '/gradio_api/queue/join'
RUN = '/gradio_api/run/predict'  # of a function that does not wait in the queue
PROGRESS = '/gradio_api/queue/data'  # a page reads from it for as long as a drawing of its own waits or runs
SESSION = re.compile('[a-z0-9]{1,40}')  # what Gradio's script makes of a random number
# The browser itself refuses to load anything from elsewhere. Gradio's scripts are partly inline, and make functions of text.
POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
    "font-src 'self' data:; worker-src 'self' blob:; object-src 'none'; base-uri 'self'; form-action 'self'; frame-ancestors 'none'"
)
HEADERS = ((b'content-security-policy', POLICY.encode()), (b'x-content-type-options', b'nosniff'), (b'referrer-policy', b'no-referrer'))


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches the address."""
    try:
        return host == 'localhost' or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def listen(host: str, port: int) -> sockets.socket:
    """A bound socket; 0 takes a free port.

    Raises:
        InputError: the port is taken, or the address is none of this machine.
    """
    if not 0 <= port <= MAX_PORT:  # getaddrinfo would take the rest of a division
        raise InputError(f'--port {port}: ports go from 0, a free one, to {MAX_PORT}')
    try:
        kind, _, _, _, address = sockets.getaddrinfo(host, port, type=sockets.SOCK_STREAM)[0]
        bound = sockets.socket(kind)
        bound.setsockopt(sockets.SOL_SOCKET, sockets.SO_REUSEADDR, 1)
        bound.bind(address)
    except (OSError, OverflowError) as error:
        reason = getattr(error, 'strerror', None) or error
        raise InputError(f'{host}:{port} cannot be listened at: {reason}; name another --port, or 0 for a free one') from error
    return bound


def url_of(bound: sockets.socket) -> str:
    host, port = bound.getsockname()[:2]
    return f'http://{f"[{host}]" if ":" in host else host}:{port}'


class Gate:
    """An ASGI application before another one.

    Args:
        only_here: refuse requests for other names than this machine's: pages of others reach a server on loopback through a name of theirs that is
            given its address.
        on_leave: called with the session of a page that no longer listens to how its drawing goes: it has been closed, or the drawing is over.
        calls: number of inputs of each function that the page may call, by address and index. Bodies are checked: Gradio accepts some that end
            its queue.
        is_alive: whether drawings still leave the queue, which `/health` tells.
    """

    def __init__(
        self,
        app: Callable[..., Coroutine[Any, Any, None]],
        only_here: bool,
        on_leave: Callable[[str], object],
        calls: Mapping[tuple[str, int], int],
        is_alive: Callable[[], bool],
    ):
        self._app = app
        self._on_leave = on_leave
        self._only_here = only_here
        self._calls = calls
        self.is_alive = is_alive
        self._closed = asyncio.Event()

    def close(self) -> None:
        """End all answers in progress: an open page holds one for as long as it is open. In the thread of the event loop."""
        self._closed.set()

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        if scope['type'] == 'lifespan':
            return await self._app(scope, receive, send)
        if scope['type'] != 'http':
            return None
        status, text = self._own_answer(scope)
        if not status and scope['method'] == 'POST':
            try:
                receive = _replay(self._checked(scope['path'], await _read(receive)), receive)
            except ValueError as error:
                status, text = 400, f'{error}. Open the page again.'
        if status:
            await send({'type': 'http.response.start', 'status': status, 'headers': [(b'content-type', b'text/plain; charset=utf-8'), *HEADERS]})
            return await send({'type': 'http.response.body', 'body': text.encode()})

        answer = _Answer(send)
        running = asyncio.ensure_future(self._app(scope, receive, answer.send))
        closed = asyncio.ensure_future(self._closed.wait())
        try:
            await asyncio.wait((running, closed), return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                return running.result()
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running
            return await answer.finish()
        finally:
            closed.cancel()
            running.cancel()
            if scope['path'] == PROGRESS:
                for session in _sessions(scope):
                    self._on_leave(session)

    def _own_answer(self, scope: Scope) -> tuple[int, str]:
        """Status and text; 0 for a request that may pass."""
        headers = dict(scope['headers'])
        path = scope['path']
        host = headers.get(b'host', b'').decode('latin-1')
        name = host.rpartition(':')[0] if host.rpartition(':')[2].isdigit() else host
        if self._only_here and not is_loopback(name.strip('[]')):
            return 403, f'This server answers to localhost and 127.0.0.1, not to {name}; start it with --host to open it to others.'
        if path == HEALTH:
            return (200, 'ok') if self.is_alive() else (503, 'The queue of drawings has ended.')
        is_function = any(path == function for function, _ in self._calls)
        if not is_function and path not in (*PATHS, PROGRESS) and not path.startswith(FOLDERS):
            return 404, 'There is nothing here.'
        if scope['method'] not in (('POST',) if is_function else ('GET', 'HEAD')):
            return 405, 'Only GET, HEAD and POST are answered, each where the page uses it.'
        length = headers.get(b'content-length', b'0')
        if b'transfer-encoding' in headers or not length.isdigit() or int(length) > MAX_BODY_BYTES:
            return 413, f'A request may have {MAX_BODY_BYTES:,} bytes.'
        if path == PROGRESS and not all(map(SESSION.fullmatch, _sessions(scope) or [''])):
            return 400, 'There is no such session. Open the page again.'
        return 0, ''

    def _checked(self, path: str, body: bytes) -> bytes:
        """Return what Gradio may read of a call: nothing but the fields that it needs.

        Raises:
            ValueError: one of them is missing or of another type, or there is no such function.
        """
        call = parse_json_object(body)
        session, index, data = call.get('session_hash'), call.get('fn_index'), call.get('data')
        if not isinstance(session, str) or not SESSION.fullmatch(session):
            raise ValueError(f'session_hash {session!r:.60}: 1 to 40 small letters and digits are expected')
        if type(index) is not int or (path, index) not in self._calls:
            raise ValueError(f'fn_index {index!r:.60}: {path} has no such function')
        if not isinstance(data, list) or len(data) != self._calls[path, index]:
            raise ValueError(f'data: expected a list of {self._calls[path, index]} values')
        return json.dumps({'session_hash': session, 'fn_index': index, 'data': data}).encode()


def _sessions(scope: Scope) -> list[str]:
    return parse_qs(scope['query_string'].decode('latin-1'), keep_blank_values=True).get('session_hash', [])


async def _read(receive: Callable[[], Coroutine[Any, Any, MutableMapping[str, Any]]]) -> bytes:
    """A request's whole body, whose length has been checked; what had come of it if the client has left."""
    body, more = b'', True
    while more:
        message = await receive()
        body += message.get('body', b'')
        more = message.get('more_body', False)
    return body


def _replay(body: bytes, receive: Callable[[], Coroutine[Any, Any, Any]]) -> Callable[[], Coroutine[Any, Any, Any]]:
    """Return a `receive` that gives this body first."""
    messages = [{'type': 'http.request', 'body': body}]

    async def replayed() -> Any:
        return messages.pop() if messages else await receive()

    return replayed


class _Answer:
    """Sends an application's answer with our headers, and knows how much of it is sent."""

    def __init__(self, send: Callable[..., Coroutine[Any, Any, None]]):
        self._send = send
        self._is_begun = self._is_whole = False

    async def send(self, message: MutableMapping[str, Any]) -> None:
        if message['type'] == 'http.response.start':
            self._is_begun = True
            message['headers'] = [*message.get('headers', ()), *HEADERS]
        else:
            self._is_whole = not message.get('more_body', False)
        await self._send(message)

    async def finish(self) -> None:
        """Send what is missing of an answer that was broken off."""
        if not self._is_begun:
            await self.send({'type': 'http.response.start', 'status': 503})
        if not self._is_whole:
            await self.send({'type': 'http.response.body'})


class Server(uvicorn.Server):
    """Args:
    on_end: called at the first SIGINT or SIGTERM, or when the queue has ended, before open connections are closed.
    is_alive: whether drawings still leave the queue; if not, the server ends, and `has_failed`: pages would wait for ever.
    """

    def __init__(self, config: uvicorn.Config, on_end: Callable[[], object], is_alive: Callable[[], bool]):
        super().__init__(config)
        self.has_failed = False
        self._on_end = on_end
        self._is_alive = is_alive

    def handle_exit(self, sig: int, frame: Any) -> None:
        self._on_end()
        super().handle_exit(sig, frame)

    async def on_tick(self, counter: int) -> bool:
        if not self.should_exit and not self._is_alive():
            self.has_failed = self.should_exit = True
            self._on_end()
        return await super().on_tick(counter)
