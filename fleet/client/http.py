"""Talks to the service for a person: tries again while it is away for a moment, and says what is wrong in words that help."""

import os
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import requests
from requests.auth import AuthBase

from diffusion.common.text import print_message
from diffusion.contracts.errors import IncompleteError, InputError

SERVER_VARIABLE, TOKEN_VARIABLE = 'FLEET_SERVER', 'FLEET_TOKEN'
TIMEOUT_SEC = (10, 60)  # to connect; without a byte
PAUSES_SEC = (0.5, 1, 2, 4, 8)  # between tries: a service that is started again is back by then
AWAY = (429, 502, 503, 504)


class ServiceRefusal(InputError):
    """The service says no.

    Args:
        status: of HTTP.
        errors: all mistakes, where there are several.
    """

    def __init__(self, message: str, status: int, errors: list[str]):
        self.status, self.errors = status, errors
        super().__init__('\n'.join([message, *errors]))


class _Bearer(AuthBase):
    """Token as an object and not as a header: requests would put what ~/.netrc says of a host in place of a header."""

    def __init__(self, token: str):
        self.token = token

    def __call__(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        request.headers['Authorization'] = f'Bearer {self.token}'
        return request


def sleep(seconds: float) -> None:
    """Wait between two requests: the one place where the client does nothing."""
    time.sleep(seconds)


class FleetClient:
    """A service, and who asks it.

    Args:
        server: its URL.
        pauses_sec: between tries while it does not answer.

    Raises:
        InputError: the URL is none.
    """

    def __init__(self, server: str, token: str, pauses_sec: tuple[float, ...] = PAUSES_SEC):
        parts = urlsplit(server)
        if parts.scheme not in ('http', 'https') or not parts.netloc or parts.username:
            raise InputError(f'{parts.hostname or server[:80]}: the server is an address such as https://fleet.example.org')
        self.server, self.pauses_sec = server.rstrip('/'), pauses_sec
        self.session = requests.Session()
        self.session.auth = _Bearer(token)

    def get(self, path: str, **query: Any) -> dict[str, Any]:
        return self.ask('GET', path, params={key: value for key, value in query.items() if value is not None})

    def post(self, path: str, content: dict[str, Any] | None = None, may_repeat: bool = True) -> dict[str, Any]:
        return self.ask('POST', path, json=content or {}, may_repeat=may_repeat)

    def delete(self, path: str) -> dict[str, Any]:
        return self.ask('DELETE', path)

    def ask(self, method: str, path: str, may_repeat: bool = True, **options: Any) -> dict[str, Any]:
        """One answer of the service.

        Args:
            path: with its parts quoted.
            may_repeat: whether the request may be sent again although it may have been done, its answer being lost.

        Raises:
            ServiceRefusal: it says no.
            IncompleteError: it does not answer.
        """
        for number, pause in enumerate((*self.pauses_sec, None)):
            if number == 1:  # not at the first: the pause after it is half a second
                print_message(f'{self.server} does not answer; tried again for {sum(self.pauses_sec):.0f} s')
            try:
                answer = self.session.request(method, f'{self.server}{path}', timeout=TIMEOUT_SEC, allow_redirects=False, **options)
            except requests.ConnectionError as error:
                # What was not connected was not done.
                if pause is None or not (may_repeat or isinstance(error, requests.ConnectTimeout) or 'NewConnectionError' in repr(error)):
                    raise IncompleteError(self._away('no connection')) from None
            except requests.RequestException as error:
                if pause is None or not may_repeat:
                    raise IncompleteError(self._away(type(error).__name__)) from None
            else:
                if answer.status_code not in AWAY:
                    return self._content(answer)
                if pause is None:
                    raise IncompleteError(self._away(_said(answer) or f'HTTP {answer.status_code}'))
            sleep(pause)
        raise AssertionError

    def _away(self, reason: str) -> str:
        return f'{self.server} does not answer: {reason}; is the service running, and is this its address ({SERVER_VARIABLE} or --server)?'

    def _content(self, answer: requests.Response) -> dict[str, Any]:
        if 200 <= answer.status_code < 300:
            try:
                content = answer.json()
            except ValueError:
                content = None
            if isinstance(content, dict):
                return content
            raise InputError(f'{self.server} is not a fleet: it answers with something else than JSON; check {SERVER_VARIABLE} or --server')
        said = _said(answer)
        if answer.status_code == 401:
            said = f'the token is not known to {self.server}; an operator gives another: python -m fleet owners NAME --new-token'
        elif answer.status_code == 403 and said:
            said = f'{said}; this command is for operators'
        elif 300 <= answer.status_code < 400:
            said = f'{self.server} redirects to another address; name that one'
        errors = _json(answer).get('errors')
        raise ServiceRefusal(
            said or f'{self.server} answers HTTP {answer.status_code}', answer.status_code, errors if isinstance(errors, list) else []
        )


def _json(answer: requests.Response) -> dict[str, Any]:
    try:
        content = answer.json()
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


def _said(answer: requests.Response) -> str:
    return str(_json(answer).get('error') or '')


def quoted(part: str) -> str:
    """A name as one part of a path."""
    return quote(part, safe='')


def connect(server: str | None, token_file: Path | None) -> FleetClient:
    """Raises InputError: server or token are not said. A token is never an argument: those are seen by every user of the machine."""
    server = server or os.environ.get(SERVER_VARIABLE, '')
    if not server:
        raise InputError(f'which service? Set {SERVER_VARIABLE}=https://..., or say --server URL')
    try:
        token = token_file.read_text().strip() if token_file is not None else os.environ.get(TOKEN_VARIABLE, '').strip()
    except OSError as error:
        raise InputError(f'{token_file}: {error.strerror}') from error
    if not token:
        raise InputError(f'no token: set {TOKEN_VARIABLE}, or name a file that holds it in one line with --token-file')
    if not token.isascii() or not token.isprintable() or ' ' in token:
        raise InputError(f'{token_file or TOKEN_VARIABLE}: no token: a token is one line of ASCII without blanks; copy it again')
    return FleetClient(server, token, PAUSES_SEC)
