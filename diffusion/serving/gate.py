"""The address of the server, and which requests are let through to Gradio. Imports neither it nor torch."""

import ipaddress
import json
import re
import socket as sockets
from collections.abc import Callable, Mapping

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from diffusion.common.files import parse_json_object
from diffusion.contracts.errors import InputError

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
    """An ASGI middleware. Starlette's TrustedHostMiddleware would not name the remedy, and its versions differ about IPv6.

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
        app: ASGIApp,
        only_here: bool,
        on_leave: Callable[[str], object],
        calls: Mapping[tuple[str, int], int],
        is_alive: Callable[[], bool],
    ):
        self._app, self._only_here, self._on_leave, self._calls, self.is_alive = app, only_here, on_leave, calls, is_alive

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope['type'] == 'lifespan':
            await self._app(scope, receive, send)
        if scope['type'] != 'http':
            return

        async def send_with_headers(message: Message) -> None:
            if message['type'] == 'http.response.start':
                message['headers'] = [*message.get('headers', ()), *HEADERS]
            await send(message)

        request = Request(scope, receive)
        try:
            session = self._check(request)
            messages = [{'type': 'http.request', 'body': await self._call(request)}] if request.method == 'POST' else []
        except HTTPException as refused:
            await PlainTextResponse(refused.detail, refused.status_code)(scope, receive, send_with_headers)
            return
        except ClientDisconnect:
            return

        async def receive_checked() -> Message:
            return messages.pop() if messages else await receive()

        try:
            await self._app(scope, receive_checked, send_with_headers)
        finally:
            if session:
                self._on_leave(session)

    def _check(self, request: Request) -> str:
        """Return the session of a page that listens to its drawing, '' for other requests that may pass.

        Raises:
            HTTPException: all others, and those that are answered here.
        """
        path, name = request.scope['path'], re.sub(r':\d+$', '', request.headers.get('host', ''))
        if self._only_here and not is_loopback(name.strip('[]')):
            raise HTTPException(403, f'This server answers to localhost and 127.0.0.1, not to {name}; start it with --host to open it to others.')
        if path == HEALTH:
            raise HTTPException(200, 'ok') if self.is_alive() else HTTPException(503, 'The queue of drawings has ended.')
        is_function = any(path == function for function, _ in self._calls)
        if not is_function and path not in (*PATHS, PROGRESS) and not path.startswith(FOLDERS):
            raise HTTPException(404, 'There is nothing here.')
        if request.method not in (('POST',) if is_function else ('GET', 'HEAD')):
            raise HTTPException(405, 'Only GET, HEAD and POST are answered, each where the page uses it.')
        session = request.query_params.get('session_hash', '') if path == PROGRESS else ''
        if path == PROGRESS and not SESSION.fullmatch(session):
            raise HTTPException(400, 'There is no such session. Open the page again.')
        return session

    async def _call(self, request: Request) -> bytes:
        """Return what Gradio may read of a call: nothing but the fields that it needs.

        Raises:
            HTTPException: one of them is missing or of another type, there is no such function, or the body is too large.
        """
        body = b''
        async for part in request.stream():
            body += part
            if len(body) > MAX_BODY_BYTES:
                raise HTTPException(413, f'A request may have {MAX_BODY_BYTES:,} bytes.')
        try:
            call = parse_json_object(body)
            session, index, data = call.get('session_hash'), call.get('fn_index'), call.get('data')
            num_inputs = self._calls.get((request.scope['path'], index)) if type(index) is int else None
            if not isinstance(session, str) or not SESSION.fullmatch(session):
                raise ValueError(f'session_hash {session!r:.60}: 1 to 40 small letters and digits are expected')
            if num_inputs is None:
                raise ValueError(f'fn_index {index!r:.60}: {request.scope["path"]} has no such function')
            if not isinstance(data, list) or len(data) != num_inputs:
                raise ValueError(f'data: expected a list of {num_inputs} values')
        except ValueError as error:
            raise HTTPException(400, f'{error}. Open the page again.') from error
        return json.dumps({'session_hash': session, 'fn_index': index, 'data': data}).encode()
