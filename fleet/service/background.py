"""Threads of the service: one sweeps up what nobody asks for, one tells owners' servers that jobs have ended."""

import asyncio
import hashlib
import hmac
import ipaddress
import threading
from abc import ABC, abstractmethod
from typing import Any, ClassVar

import aiohttp
from yarl import URL

from data_prep.crawling.addresses import Network, is_allowed
from data_prep.crawling.fetch import MAX_HEADER_BYTES, FetchError, checked_connector, reason_of
from diffusion.common.text import first_line, print_message, redacted
from fleet.policies.hand_out import stranded
from fleet.queue import leases, reading
from fleet.queue.database import Connection, Database
from fleet.queue.leases import LeaseSettings

GONE_AFTER = 3.0  # leases without a sign of life after which a machine's stay has ended
SWEEPS = 0x737765  # advisory lock: of several services one sweeps; it goes with the connection, however that ends


class RepeatedWork(ABC):
    """A thread that calls `look` again and again, for as long as the service runs.

    Args:
        every_sec: between two looks.
    """

    name: ClassVar[str]
    ending_sec: ClassVar[float] = 10.0  # that a look may take when the service ends

    def __init__(self, database: Database, every_sec: float):
        self.database, self.every_sec = database, every_sec
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._run, name=self.name, daemon=True)

    def start(self) -> None:
        self.thread.start()

    def stop(self) -> None:
        self.ended.set()
        self.thread.join(self.ending_sec)

    def _run(self) -> None:
        while not self.ended.wait(self.every_sec):
            try:
                self.look()
            except Exception as error:  # a database that restarts, no file descriptor is left; whatever it is, the next look may succeed
                print_message(f'{self.name}: {redacted(first_line(error, with_type=True))}')

    @abstractmethod
    def look(self) -> None:
        """Do what is due."""


class Sweeper(RepeatedWork):
    """Sweeps up what nobody asks for; claims take lapsed leases back too. Of several services one sweeps at a time."""

    name = 'sweeper'

    def __init__(self, database: Database, settings: LeaseSettings, every_sec: float = 5.0):
        super().__init__(database, every_sec)
        self.settings = settings

    def look(self) -> None:
        with self.database.transaction() as connection:
            row = connection.execute('select pg_try_advisory_xact_lock(%s) as mine', [SWEEPS]).fetchone()
            if row is None or not row['mine']:
                return
            leases.take_back(connection, 'j.lease_until <= now()')
            end_sessions(connection, GONE_AFTER * self.settings.lease_sec)
            lift_bans(connection)


def end_sessions(connection: Connection, after_sec: float) -> None:
    """End the stays of machines that have said nothing for so long; one that still lives is told 401, and enrols again."""
    connection.execute(
        """with ended as (
            update session set ended = last_seen where ended is null and last_seen < now() - %s * interval '1 second' returning node
        ) update node set state = 'gone' from ended where name = ended.node and state in ('live', 'draining')""",
        [after_sec],
    )


def lift_bans(connection: Connection) -> None:
    """Let the oldest ban of a job go that no live machine may take (policies/hand_out.py)."""
    queued = reading.jobs(connection, "j.state = 'queued' and exists (select 1 from ban where ban.job = j.id and ban.until > now())")
    if not queued:
        return
    live = reading.nodes(connection, "n.state = 'live'")
    for found in stranded(queued, live, reading.bans(connection), reading.now(connection)):
        if found.lift is not None:
            connection.execute('delete from ban where job = %s and node = %s', [found.lift.job, found.lift.node])


# Tells owners' servers that a job has ended: a POST of the row that the transaction which ended it has written.
#
# The body is JSON, {id, job, name, state, cause, dollars, results}. `X-Fleet-Notice` repeats the id, which is the same at every try, and
# `X-Fleet-Signature` is `sha256=` and the HMAC-SHA256 of the body in hex, by the owner's notice key (bytes; commands show it in hex). A server that
# answers with a status from 200 to 299 within ten seconds has been told; any other is told again, after a minute, two, four, and so on up to a day.
#
# Addresses are strangers' too: https to the public internet alone, without redirects, cookies or proxies, and nothing of an answer is read but its
# status. `--allow-notices-to NETWORK` adds networks, in which http will do.

FIRST_PAUSE_SEC, LONGEST_PAUSE_SEC = 60, 86_400
MAX_TRIES = 15  # 1 + 2 + ... + 1,024 minutes and then a day at a time: five and a half days
TIMEOUT_SEC = 10  # of one try, from the name to the status
AT_A_TIME = 20
# The next try is written before this one begins: whoever dies in between has delivered it late, and no other service sends it at the same time.
TAKE = """
    update notice set tries = tries + 1, next_try = case when tries + 1 >= %(most)s then 'infinity'::timestamptz
        else now() + least(%(longest)s, %(first)s * 2.0 ^ tries) * interval '1 second' end
    from job j join owner o on o.name = j.owner where j.id = notice.job and notice.id in (
        select id from notice where delivered is null and next_try <= now() order by next_try limit %(num)s for update skip locked
    ) returning notice.id::text, notice.url, notice.body, o.notice_key
"""


class WebhookSender(RepeatedWork):
    """Delivers notices. Several services may, each takes other rows.

    Args:
        networks: whose addresses are told although they are not of the public internet.
    """

    name = 'webhooks'
    ending_sec = TIMEOUT_SEC + 5

    def __init__(self, database: Database, networks: tuple[Network, ...] = (), every_sec: float = 5.0):
        super().__init__(database, every_sec)
        self.networks = networks

    def look(self) -> None:
        while self.deliver() == AT_A_TIME and not self.ended.is_set():
            pass

    def deliver(self) -> int:
        """Try what is due, AT_A_TIME at most, all at once; returns how many. No transaction is open meanwhile."""
        values = {'most': MAX_TRIES, 'first': FIRST_PAUSE_SEC, 'longest': LONGEST_PAUSE_SEC, 'num': AT_A_TIME}
        with self.database.transaction() as connection:
            rows = connection.execute(TAKE, values).fetchall()
        if not rows:
            return 0
        errors = asyncio.run(post_all(rows, self.networks))
        with self.database.transaction() as connection:
            for notice, error in zip(rows, errors, strict=True):
                connection.execute(
                    "update notice set delivered = case when %(error)s = '' then now() end, last_error = %(error)s where id = %(id)s",
                    {'id': notice['id'], 'error': error},
                )
        return len(rows)


async def post_all(notices: list[dict[str, Any]], networks: tuple[Network, ...]) -> list[str]:
    """Tell everyone at once; returns why each was not told, '' for those who were."""

    def may_be_told(ip: str) -> bool:
        return is_allowed(ip, networks)

    def is_near(ip: str) -> bool:
        return any(ipaddress.ip_address(ip) in network for network in networks)

    options: dict[str, Any] = {'auto_decompress': False, 'max_line_size': MAX_HEADER_BYTES, 'max_field_size': MAX_HEADER_BYTES}
    async with (
        aiohttp.ClientSession(connector=checked_connector(may_be_told), cookie_jar=aiohttp.DummyCookieJar(), **options) as secure,
        aiohttp.ClientSession(connector=checked_connector(is_near), cookie_jar=aiohttp.DummyCookieJar(), **options) as plain,
    ):
        return await asyncio.gather(*(_post({'https': secure, 'http': plain}, notice) for notice in notices))


async def _post(sessions: dict[str, aiohttp.ClientSession], notice: dict[str, Any]) -> str:
    body = notice['body'].encode()
    headers = {
        'Content-Type': 'application/json',
        'User-Agent': 'fleet',
        'X-Fleet-Notice': notice['id'],
        'X-Fleet-Signature': f'sha256={hmac.new(notice["notice_key"], body, hashlib.sha256).hexdigest()}',
    }
    try:
        url = URL(notice['url'], encoded=True)
        if url.scheme not in sessions:
            return 'not an https address'
        async with (
            asyncio.timeout(TIMEOUT_SEC),
            sessions[url.scheme].post(url, data=body, headers=headers, allow_redirects=False) as response,
        ):
            return '' if 200 <= response.status < 300 else f'HTTP {response.status}'
    except TimeoutError:
        return f'took over {TIMEOUT_SEC} s'
    except FetchError as error:
        return str(error)
    except Exception as error:  # none of the reasons quotes what a server said
        return reason_of(error)
