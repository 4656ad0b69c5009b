"""The page over HTTP: which requests are let through, and how the process starts and ends."""

from __future__ import annotations

import asyncio
import ipaddress
import socket as sockets
from collections.abc import Callable, Coroutine, MutableMapping
from contextlib import suppress
from typing import Any
from urllib.parse import parse_qs

import uvicorn

from diffusion.contracts.errors import InputError

Scope = MutableMapping[str, Any]
MAX_BODY_BYTES = 64 << 10
MAX_PORT = 65535
# Of Gradio's addresses those that the page uses: it also has some for uploads, recordings, other servers' files and editing the application.
PATHS = ('/config', '/theme.css', '/manifest.json', '/favicon.ico', '/robots.txt')
PROGRESS = '/gradio_api/queue/data'  # a page reads from it for as long as a drawing of its own waits or runs
FOLDERS = (
    '/assets/', '/static/', '/gradio_api/file=/', '/gradio_api/queue/', '/gradio_api/startup-events', '/gradio_api/cancel',
    '/gradio_api/info', '/gradio_api/run/', '/gradio_api/reset', '/gradio_api/app_id', '/theme.css',
)  # fmt: skip
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
    """

    def __init__(self, app: Callable[..., Coroutine[Any, Any, None]], only_here: bool, on_leave: Callable[[str], object]):
        self._app = app
        self._on_leave = on_leave
        self._only_here = only_here
        self._closed = asyncio.Event()

    def close(self) -> None:
        """End all answers in progress: an open page holds one for as long as it is open. In the thread of the event loop."""
        self._closed.set()

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        if scope['type'] == 'lifespan':
            return await self._app(scope, receive, send)
        if scope['type'] != 'http':
            return None
        status, text = self._refusal(scope)
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
                for session in parse_qs(scope['query_string'].decode('latin-1')).get('session_hash', []):
                    self._on_leave(session)

    def _refusal(self, scope: Scope) -> tuple[int, str]:
        """Status and reason; 0 for a request that may pass."""
        headers = dict(scope['headers'])
        path = scope['path']
        host = headers.get(b'host', b'').decode('latin-1')
        name = host.rpartition(':')[0] if host.rpartition(':')[2].isdigit() else host
        if self._only_here and not is_loopback(name.strip('[]')):
            return 403, f'This server answers to localhost and 127.0.0.1, not to {name}; start it with --host to open it to others.'
        if path != '/' and path not in PATHS and not path.startswith(FOLDERS):
            return 404, 'There is nothing here.'
        if scope['method'] not in ('GET', 'HEAD', 'POST'):
            return 405, 'Only GET, HEAD and POST are answered.'
        length = headers.get(b'content-length', b'0')
        if b'transfer-encoding' in headers or not length.isdigit() or int(length) > MAX_BODY_BYTES:
            return 413, f'A request may have {MAX_BODY_BYTES:,} bytes.'
        return 0, ''


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
    on_end: called at the first SIGINT or SIGTERM, before open connections are closed.
    """

    def __init__(self, config: uvicorn.Config, on_end: Callable[[], object]):
        super().__init__(config)
        self._on_end = on_end

    def handle_exit(self, sig: int, frame: Any) -> None:
        self._on_end()
        super().handle_exit(sig, frame)
