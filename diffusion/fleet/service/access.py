"""Who asks: owners, machines and pools, by their tokens. The database knows SHA-256 digests of them only."""

import hashlib
from dataclasses import dataclass

from diffusion.fleet.queue.database import Connection


class Refused(Exception):
    """An answer that is no success.

    Args:
        status: of HTTP.
        message: for the one who asked: the value, the limit, the remedy.
        errors: where there are several.
    """

    def __init__(self, status: int, message: str, errors: list[str] | None = None):
        self.status, self.errors = status, errors
        super().__init__(message)


@dataclass(frozen=True)
class Account:
    name: str
    is_operator: bool


@dataclass(frozen=True)
class Machine:
    """A node in its present session."""

    node: str
    session: int


def digest(token: str) -> bytes:
    """What the database knows of a token: 32 random bytes need no salt. An index finds it, so nothing is compared byte by byte with a secret."""
    return hashlib.sha256(token.encode()).digest()


def owner_of(connection: Connection, token: str) -> Account:
    """Raises Refused: it is no owner's."""
    row = connection.execute('select name, is_operator from owner where token_hash = %s', [digest(token)]).fetchone()
    if row is None:
        raise Refused(401, "this token is no owner's; an operator gives one: python -m diffusion.fleet owners NAME --new-token")
    return Account(**row)


def operator_of(connection: Connection, token: str) -> Account:
    """Raises Refused: it is no operator's."""
    owner = owner_of(connection, token)
    if not owner.is_operator:
        raise Refused(403, f'{owner.name} is not an operator')
    return owner


def machine_of(connection: Connection, token: str, seen_every_sec: float) -> Machine:
    """The machine of a session's token; that it was seen is noted.

    Args:
        seen_every_sec: no more often than that: forty idle machines would otherwise write all the time.

    Raises:
        Refused: the session has ended, or another of the same name has begun.
    """
    row = connection.execute(
        """select node, id as session, last_seen < now() - %s * interval '1 second' as is_old from session
        where token_hash = %s and ended is null""",
        [seen_every_sec, digest(token)],
    ).fetchone()
    if row is None:
        raise Refused(401, 'this token opens nothing any more: the machine has left, or another of its name has enrolled')
    if row.pop('is_old'):
        connection.execute('update node set last_seen = greatest(last_seen, now()) where name = %s', [row['node']])  # first, as enrolment does
        connection.execute('update session set last_seen = greatest(last_seen, now()) where id = %s', [row['session']])
    return Machine(**row)


def pool_of(connection: Connection, token: str) -> str:
    """The pool of an enrolment token.

    Raises:
        Refused: there is none.
    """
    row = connection.execute('select name from pool where token_hash = %s', [digest(token)]).fetchone()
    if row is None:
        raise Refused(401, "this token is no pool's; an operator gives one: python -m diffusion.fleet pools NAME --new-token")
    return row['name']
