"""Pictures from addresses that strangers wrote: urllib, kept from the inside of the network and from servers that never end.

`install` makes every `urllib.request.urlopen` of this process

- speak http and https only, without the proxies of the environment;
- refuse addresses that are neither of the public internet nor of a network that was named. The name is resolved once and the very address
  that was checked is connected to, for every redirect anew (three at most), so neither a redirect nor a name server that changes its mind gets by;
- give up at the request's timeout, counted from the start to the last byte, however slowly a server sends;
- read no body larger than a limit.

Resolving a name is the one step that takes as long as the system's resolver wants.
"""

from __future__ import annotations

import http.client
import io
import socket
import ssl
import time
import urllib.request
from dataclasses import dataclass
from functools import partial
from typing import Any

from data_prep.crawling.addresses import Network, is_allowed

MAX_REDIRECTS = 3


class RefusedError(ValueError):
    """The picture is not fetched; the message is short and says why, the same for all of a kind."""


@dataclass(frozen=True)
class Limits:
    """What `install` lets through.

    Attributes:
        max_bytes: largest body.
        networks: whose addresses are asked although they are not of the public internet.
    """

    max_bytes: int = 64 << 20
    networks: tuple[Network, ...] = ()

    @property
    def max_mb(self) -> float:
        """`max_bytes` in MB."""
        return self.max_bytes / (1 << 20)


def install(limits: Limits) -> None:
    """Guard every `urlopen` of this process."""
    urllib.request.install_opener(opener(limits))


def opener(limits: Limits) -> urllib.request.OpenerDirector:
    """What `install` installs."""
    director = urllib.request.OpenerDirector()  # not build_opener: that adds files, FTP and proxies
    for handler in (_Handler(limits), _Redirects(), _OtherSchemes(), urllib.request.HTTPErrorProcessor(), urllib.request.HTTPDefaultErrorHandler()):
        director.add_handler(handler)
    return director


class _Deadline:
    def __init__(self, seconds: float):
        self.seconds, self.end = seconds, time.monotonic() + seconds

    def left(self) -> float:
        left = self.end - time.monotonic()
        if left <= 0:
            raise RefusedError(f'took over {self.seconds:g} s')
        return left


def _connect(host: str, port: int, deadline: _Deadline, networks: tuple[Network, ...]) -> socket.socket:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise RefusedError('host not found') from None
    if not all(is_allowed(str(address[0]), networks) for *_, address in found):
        raise RefusedError('private address')
    problem = OSError('host has no address')
    for i, (family, kind, protocol, _, address) in enumerate(found):
        timeout = deadline.left() / (len(found) - i)  # an address that swallows packets leaves time for the next one
        connection = socket.socket(family, kind, protocol)
        try:
            connection.settimeout(timeout)
            connection.connect(address)
            return connection
        except OSError as error:
            connection.close()
            problem = error
    deadline.left()
    raise problem


class _Reader(io.RawIOBase):
    """What a socket receives, until the deadline."""

    def __init__(self, connection: socket.socket, deadline: _Deadline):
        self.connection, self.deadline = connection, deadline
        self.raw = connection.makefile('rb', buffering=0)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        self.connection.settimeout(self.deadline.left())
        try:
            return self.raw.readinto(buffer)
        except TimeoutError:
            self.deadline.left()
            raise

    def close(self) -> None:
        self.raw.close()
        super().close()


class _Response(http.client.HTTPResponse):
    """A response that is read whole: all of it, or an error."""

    def __init__(self, connection: socket.socket, *args: Any, deadline: _Deadline, max_bytes: int, **kwargs: Any):
        super().__init__(connection, *args, **kwargs)
        unguarded, self.fp = self.fp, io.BufferedReader(_Reader(connection, deadline))
        unguarded.close()
        self.max_bytes = max_bytes

    def read(self, amt: int | None = None) -> bytes:
        too_large = RefusedError(f'over {self.max_bytes / (1 << 20):g} MB')
        if self.length is not None and self.length > self.max_bytes:
            raise too_large
        content = super().read(self.max_bytes + 1)
        if len(content) > self.max_bytes:
            raise too_large
        if self.length:  # so much was announced and did not come
            raise http.client.IncompleteRead(content, self.length)
        return content


class _Connection(http.client.HTTPConnection):
    """A connection to an address that was checked."""

    def __init__(self, host: str, limits: Limits, deadline: _Deadline, **kwargs: Any):
        super().__init__(host, **kwargs)
        self.limits, self.deadline = limits, deadline
        self.response_class: Any = partial(_Response, deadline=deadline, max_bytes=limits.max_bytes)

    def connect(self) -> None:
        self.sock = _connect(self.host, self.port, self.deadline, self.limits.networks)


class _SecureConnection(_Connection):
    default_port = http.client.HTTPS_PORT

    def __init__(self, host: str, tls: ssl.SSLContext, **kwargs: Any):
        super().__init__(host, **kwargs)
        self.tls = tls

    def connect(self) -> None:
        super().connect()
        self.sock.settimeout(self.deadline.left())
        self.sock = self.tls.wrap_socket(self.sock, server_hostname=self.host)


class _Handler(urllib.request.AbstractHTTPHandler):
    def __init__(self, limits: Limits):
        super().__init__()
        self.limits, self.tls = limits, ssl.create_default_context()

    http_request = https_request = urllib.request.AbstractHTTPHandler.do_request_

    def http_open(self, request: Any) -> Any:
        return self.do_open(partial(_Connection, limits=self.limits, deadline=_deadline(request)), request)

    def https_open(self, request: Any) -> Any:
        return self.do_open(partial(_SecureConnection, tls=self.tls, limits=self.limits, deadline=_deadline(request)), request)


def _deadline(request: Any) -> _Deadline:
    if not hasattr(request, 'deadline'):
        request.deadline = _Deadline(request.timeout)
    return request.deadline


class _Redirects(urllib.request.HTTPRedirectHandler):
    max_redirections = MAX_REDIRECTS
    inf_msg = 'too many redirects: '

    def redirect_request(self, request: Any, *args: Any) -> Any:
        again: Any = super().redirect_request(request, *args)
        if again is not None:
            again.deadline = request.deadline  # one for the whole way
        return again


class _OtherSchemes(urllib.request.BaseHandler):
    def unknown_open(self, request: Any) -> Any:
        raise RefusedError('not http or https')
