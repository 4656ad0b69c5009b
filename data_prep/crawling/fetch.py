"""Fetch images from addresses that strangers wrote: aiohttp, kept out of the private network and away from servers that never end.

- Only http and https are spoken, without the proxies of the environment and without cookies.
- Addresses are refused that are neither of the public internet nor of a named network. A name is resolved once per connection and the very address
  that was checked is connected to, again for every redirect (three at most), so neither a redirect nor a name server that changes its mind gets by.
- One deadline holds from resolving the name to the last byte, however slowly a server sends; no body is read beyond a limit.
- Servers that opt out by X-Robots-Tag are respected.
"""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
from multidict import CIMultiDictProxy
from yarl import URL

from data_prep.crawling.addresses import Network, is_allowed

MAX_REDIRECTS = 3
MAX_HEADER_BYTES = 1 << 16
OPT_OUTS = {'noai', 'noimageai', 'noindex', 'noimageindex'}
USER_AGENT = 'Mozilla/5.0 (X11; Ubuntu; Linux x86_64; rv:72.0) Gecko/20100101 Firefox/72.0'  # img2dataset's: many servers refuse an unknown one

PRIVATE, OPTED_OUT, BAD_URL, BAD_SCHEME, NOT_FOUND = 'private address', 'opted out by X-Robots-Tag', 'bad URL', 'not http or https', 'host not found'
# What aiohttp raises, as one of a few reasons: the first that matches. None of them quotes what a server said.
REASONS: tuple[tuple[type[Exception] | tuple[type[Exception], ...], str], ...] = (
    (aiohttp.TooManyRedirects, 'too many redirects'),
    (aiohttp.NonHttpUrlClientError, BAD_SCHEME),
    (aiohttp.InvalidURL, BAD_URL),
    ((aiohttp.ClientConnectorDNSError, UnicodeError), NOT_FOUND),
    ((aiohttp.ClientSSLError, ssl.SSLError), 'TLS error'),
    (aiohttp.ClientPayloadError, 'cut short'),
    (aiohttp.ClientResponseError, 'not a valid HTTP response'),
    ((aiohttp.ClientError, OSError), 'connection failed'),
    (ValueError, BAD_URL),
)


class FetchError(Exception):
    """No image; the message is the reason, the same for all of a kind."""


@dataclass(frozen=True)
class Fetching:
    """How images are asked for."""

    concurrency: int = 64  # images at a time, in each process
    timeout: float = 20  # seconds for one image, in all
    retries: int = 0  # more tries, at once
    user_agent: str | None = None  # token for the User-Agent header, which X-Robots-Tag headers may name
    max_bytes: int = 64 << 20  # largest body
    networks: tuple[Network, ...] = ()  # whose addresses are asked although they are not of the public internet

    @property
    def max_mb(self) -> float:
        return self.max_bytes / (1 << 20)

    @property
    def network_names(self) -> list[str]:
        """The networks, as a shard's stats remember them."""
        return sorted(map(str, self.networks))


@asynccontextmanager
async def open_session(fetching: Fetching) -> AsyncIterator[aiohttp.ClientSession]:
    """The session that `fetch` needs."""
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(fetching.concurrency))  # a thread waits for each name
    agent = f'{USER_AGENT} (compatible; {fetching.user_agent})' if fetching.user_agent else USER_AGENT
    async with aiohttp.ClientSession(
        connector=checked_connector(lambda ip: is_allowed(ip, fetching.networks)),
        cookie_jar=aiohttp.DummyCookieJar(),
        headers={'User-Agent': agent, 'Accept-Encoding': 'identity'},
        auto_decompress=False,  # a small body could become a large one
        timeout=aiohttp.ClientTimeout(),  # none: `fetch` has one for everything
        max_line_size=MAX_HEADER_BYTES,
        max_field_size=MAX_HEADER_BYTES,
    ) as session:
        yield session


def checked_connector(may_ask: Callable[[str], bool]) -> aiohttp.TCPConnector:
    """Connector to addresses that may be asked alone: the very ones that were checked.

    Args:
        may_ask: whether an IP address may be. Connecting to another raises FetchError(PRIVATE).
    """

    def checked_socket(address: tuple[Any, ...]) -> socket.socket:
        """A socket for an address, be it resolved or written in the URL."""
        family, kind, protocol, _, (ip, *_) = address
        if not may_ask(ip):
            raise FetchError(PRIVATE)
        return socket.socket(family, kind, protocol)

    return aiohttp.TCPConnector(
        limit=0,
        force_close=True,  # of many hosts; idle connections would use up the file descriptors
        resolver=_Resolver(may_ask),
        socket_factory=checked_socket,
        ssl=ssl.create_default_context(),
    )


class _Resolver(aiohttp.ThreadedResolver):
    """Refuse a name as soon as one of its addresses is private."""

    def __init__(self, may_ask: Callable[[str], bool]):
        super().__init__()
        self.may_ask = may_ask

    async def resolve(self, *args: Any, **kwargs: Any) -> list[Any]:
        found = await super().resolve(*args, **kwargs)
        if not all(self.may_ask(address['host']) for address in found):
            raise FetchError(PRIVATE)
        return found


async def fetch(session: aiohttp.ClientSession, url: str | None, fetching: Fetching) -> bytes:
    """The body at a URL. Raises FetchError: it could not be had, must not be had, or is too large."""
    if not url or not url.isascii() or not url.isprintable() or ' ' in url:
        raise FetchError(BAD_URL)
    try:
        parsed = URL(url, encoded=True)  # asked for as it is written
        if parsed.scheme not in ('http', 'https'):
            raise FetchError(BAD_SCHEME if parsed.scheme else BAD_URL)
        async with asyncio.timeout(fetching.timeout), session.get(parsed, max_redirects=MAX_REDIRECTS + 1) as response:
            if not 200 <= response.status < 300:
                raise FetchError(f'HTTP {response.status}')
            if opts_out(response.headers, fetching.user_agent):
                raise FetchError(OPTED_OUT)
            content = bytearray()
            if (response.content_length or 0) <= fetching.max_bytes:
                async for chunk in response.content.iter_any():
                    content += chunk
                    if len(content) > fetching.max_bytes:
                        break
                else:
                    return bytes(content)
            raise FetchError(f'over {fetching.max_mb:g} MB')
    except TimeoutError:
        raise FetchError(f'took over {fetching.timeout:g} s') from None
    except FetchError:
        raise
    except Exception as error:
        raise FetchError(reason_of(error)) from error


def reason_of(error: Exception) -> str:
    """The reason for an exception of aiohttp."""
    return next((reason for kinds, reason in REASONS if isinstance(error, kinds)), 'other')


def opts_out(headers: CIMultiDictProxy[str], user_agent: str | None) -> bool:
    """Whether a header `X-Robots-Tag: [AGENT:] noai, ...` speaks to every agent or to this one, and says no."""
    for value in headers.getall('X-Robots-Tag', []):
        agent, colon, directives = value.lower().partition(':')
        addressed = not colon or (user_agent is not None and agent.strip() == user_agent.strip().lower())
        if addressed and OPT_OUTS & {word.strip() for word in (directives if colon else agent).split(',')}:
            return True
    return False
