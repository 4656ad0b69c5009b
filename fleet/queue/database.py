"""Connections to the fleet's PostgreSQL, and its schema."""

import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
from psycopg.rows import DictRow, dict_row
from psycopg_pool import ConnectionPool

from diffusion.common.text import redacted
from diffusion.contracts.errors import InputError

VERSION = 2
UPGRADE = 0x757067  # advisory lock
SCHEMA, UPGRADES = Path(__file__).with_name('schema.sql'), Path(__file__).with_name('upgrades.sql')
URL_VARIABLE = 'FLEET_DATABASE_URL'  # never an argument: those are seen by every user of the machine
STATEMENT_SEC = 30  # no statement of ours takes a second; one that hangs must not keep its locks

Connection = psycopg.Connection[DictRow]


def database_url(file: Path | None) -> str:
    """The address of the database, with its password.

    Args:
        file: that holds it in one line; None: the variable FLEET_DATABASE_URL.

    Raises:
        InputError: neither is there.
    """
    try:
        url = file.read_text().strip() if file is not None else os.environ.get(URL_VARIABLE, '')
    except OSError as error:
        raise InputError(f'{file}: {error.strerror}') from error
    if not url:
        raise InputError(f'no database: set {URL_VARIABLE}=postgresql://USER:PASSWORD@HOST/NAME, or name a file that holds it with --database-file')
    return url


class Database:
    """A pool of connections; each transaction takes one.

    Args:
        url: as PostgreSQL's clients read it.
        size: connections at most.
    """

    def __init__(self, url: str, size: int = 8):
        options = f'-c statement_timeout={STATEMENT_SEC}s -c idle_in_transaction_session_timeout={STATEMENT_SEC}s -c timezone=UTC'
        arguments: dict[str, Any] = {'row_factory': dict_row, 'options': options, 'connect_timeout': 5, 'application_name': 'fleet'}
        self.pool: ConnectionPool[Connection] = ConnectionPool(
            url, min_size=1, max_size=size, kwargs=arguments, open=False, timeout=5, reconnect_timeout=10, check=ConnectionPool.check_connection
        )

    def open(self) -> None:
        """Raises InputError: it cannot be reached."""
        self.pool.open()

    def close(self) -> None:
        self.pool.close()

    @contextmanager
    def transaction(self) -> Iterator[Connection]:
        """A connection whose statements are one transaction: all of them, or none after an exception.

        Raises:
            psycopg.OperationalError: the database does not answer; everything can be tried again.
        """
        with self.pool.connection() as connection:
            yield connection


def create(url: str) -> None:
    """Create the schema in an empty database.

    Raises:
        InputError: it cannot be reached, or holds a fleet already.
    """
    with connected(url) as connection:
        if _version(connection) is not None:
            raise InputError('this database holds a fleet already; nothing was changed')
        connection.execute(SCHEMA.read_bytes())


@contextmanager
def connected(url: str) -> Iterator[Connection]:
    """One connection, one transaction.

    Raises:
        InputError: the database cannot be reached.
    """
    try:
        connection = psycopg.connect(url, row_factory=dict_row, connect_timeout=10, options='-c timezone=UTC')
    except psycopg.OperationalError as error:
        raise InputError(f'the database does not answer: {redacted(str(error)).strip()}') from None
    except psycopg.ProgrammingError:  # its message quotes what was given, in which a password may be
        raise InputError(f'{URL_VARIABLE} is no address of a database; write postgresql://USER:PASSWORD@HOST/NAME') from None
    with connection:
        yield connection


def upgrade(connection: Connection) -> int:
    """Bring the schema of an older version to this code's, in the transaction of the connection; services that start at once wait for each other.

    Returns:
        The version that was found.

    Raises:
        InputError: the schema is missing, or younger than this code.
    """
    connection.execute('select pg_advisory_xact_lock(%s)', [UPGRADE])
    version = _version(connection)
    if version is None:
        raise InputError('this database holds no fleet yet; python -m fleet init creates it')
    if version > VERSION:
        raise InputError(f'the schema of this database has version {version}, this code knows {VERSION}: update the code')
    _, *upgrades = re.split(r'^-- version \d+:.*$', UPGRADES.read_text(), flags=re.MULTILINE)
    for statements in upgrades[version - 1 :]:
        connection.execute(statements.encode())
    connection.execute('update fleet_version set version = %s where version <> %s', [VERSION, VERSION])
    return version


def check_bucket(connection: Connection, url: str) -> None:
    """Raises InputError: jobs wait whose inputs lie elsewhere than below `url`: this service could not sign them, and every claim would meet them."""
    row = connection.execute(
        """select count(distinct job.id) as num, min(input.value->>'url') as url from job cross join lateral jsonb_each(spec->'inputs') input
        where state in ('queued', 'leased') and not starts_with(input.value->>'url', %s)""",
        [f'{url}/'],
    ).fetchone()
    if row is not None and row['num']:
        raise InputError(
            f'--bucket {url}: {row["num"]} jobs that have not ended have inputs elsewhere, such as {row["url"]}; name that bucket, or cancel them'
        )


def _version(connection: Connection) -> int | None:
    known = connection.execute("select to_regclass('fleet_version') as found").fetchone()
    if known is None or known['found'] is None:
        return None
    row = connection.execute('select version from fleet_version').fetchone()
    return row['version'] if row else None


def new_token(kind: str) -> str:
    """32 random bytes as text; `kind` says at its beginning what it opens, so that scanners and people recognise it."""
    return f'fleet-{kind}-{secrets.token_urlsafe(32)}'
