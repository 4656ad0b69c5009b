"""HTTP to the service: one session, one token, errors that name no address."""

import re
from dataclasses import dataclass
from typing import Any

import requests

from diffusion.common.files import parse_json_object
from diffusion.contracts.errors import InputError
from diffusion.fleet.attempts.transfers import no_auth

TIMEOUT_SEC = (5.0, 10.0)  # to connect, to answer: renewals wait for it, so it is short
MAX_ANSWER_BYTES = 8 << 20


class ServiceAway(Exception):
    """The service does not answer, or asks to come again later; `retry_sec` says when, if it does."""

    def __init__(self, message: str, retry_sec: float | None = None):
        super().__init__(message)
        self.retry_sec = retry_sec


@dataclass(frozen=True)
class ServiceAnswer:
    """Status, content and Retry-After in seconds."""

    status: int
    content: dict[str, Any]
    retry_sec: float | None = None

    @property
    def error(self) -> str:
        return str(self.content.get('error', f'status {self.status}'))[:500]


class ServiceClient:
    """Args:
        server: `https://host[:port]`; http only where somebody else encrypts, or on this machine.

    Raises:
        InputError: that is not its form.
    """

    def __init__(self, server: str):
        if not re.fullmatch(r'https?://[^/@\s?#]+(/[^@\s?#]*)?', server):
            raise InputError('--server: https://HOST is wanted, without user, password or query')
        self.server, self.token = server.rstrip('/'), ''
        self._session = requests.Session()

    def post(self, path: str, body: dict[str, Any]) -> ServiceAnswer:
        """Ask the service.

        Raises:
            ServiceAway.
        """
        headers = {'Authorization': f'Bearer {self.token}'}
        try:
            with self._session.post(
                f'{self.server}{path}', json=body, headers=headers, auth=no_auth, timeout=TIMEOUT_SEC, allow_redirects=False, stream=True
            ) as answer:
                content = answer.raw.read(MAX_ANSWER_BYTES + 1, decode_content=True)
                retry_sec = _seconds(answer.headers.get('Retry-After'))
                status = answer.status_code
        except (requests.RequestException, OSError) as error:
            raise ServiceAway(f'the service does not answer: {type(error).__name__}') from None
        except Exception as error:  # urllib3's own, while the body is read
            raise ServiceAway(f'the service broke off: {type(error).__name__}') from None
        if status == 429 or status >= 500:
            raise ServiceAway(f'the service answers with status {status}', retry_sec)
        try:
            parsed = parse_json_object(content) if content.strip() else {}
        except ValueError:
            raise ServiceAway(f'the service answers with status {status} and no JSON: is a proxy between?') from None
        return ServiceAnswer(status, parsed, retry_sec)

    def close(self) -> None:
        self._session.close()


def _seconds(text: str | None) -> float | None:
    return float(text) if text is not None and re.fullmatch(r'\d{1,6}', text.strip()) else None
