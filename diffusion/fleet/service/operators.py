"""What operators ask: machines, owners and pools. Every change is printed by the service with the name of the operator: that is its record."""

import re
import secrets
from collections.abc import Callable
from typing import Any

from starlette.responses import JSONResponse, Response

from diffusion.fleet.jobs.spec import NAME
from diffusion.fleet.policies.rows import Ending, NodeState
from diffusion.fleet.queue.database import Connection, Database, new_token
from diffusion.fleet.queue.endings import close
from diffusion.fleet.service.access import Account, Refused, digest, operator_of
from diffusion.fleet.service.http import Call

MAX_LISTED = 1000
MAX_REASON = 300
ACTIONS = {'ban': NodeState.QUARANTINED, 'drain': NodeState.DRAINING, 'readmit': NodeState.LIVE}
UNPRINTABLE = re.compile(r'[^\x20-\x7e\xa0-\ud7ff\ue000-\uffff]+')  # control characters, halves of surrogate pairs
NODES = """
    n.name, n.pool, n.state, n.reason, n.gpu, n.gpu_gb, n.num_gpus, n.image, p.trusted, s.price_per_hour,
    extract(epoch from now() - greatest(s.last_seen, n.last_seen))::float8 as silent_sec,
    j.id::text as job, j.name as job_name, j.owner, a.last_step as step, j.num_steps, a.steps_per_sec,
    (select count(*) from attempt where attempt.node = n.name)::int as attempts,
    (select count(*) from attempt where attempt.node = n.name and ending = 'done')::int as done
    from node n join pool p on p.name = n.pool left join session s on s.node = n.name and s.ended is null
    left join job j on j.node = n.name and j.state = 'leased' left join attempt a on a.job = j.id and a.epoch = j.epoch
"""
# What may be said of an owner and of a pool: (type, least, most).
OWNER_LIMITS: dict[str, tuple[type, float, float]] = {
    'max_leased': (int, 0, 100_000),
    'max_queued': (int, 0, 10_000_000),
    'budget_dollars': (float, 0, 1e9),
    'operator': (bool, 0, 1),
}
POOL_LIMITS: dict[str, tuple[type, float, float]] = {'price_per_hour': (float, 0, 10_000), 'trusted': (bool, 0, 1)}


class Operators:
    """The endpoints of operators."""

    def __init__(self, database: Database):
        self.database = database
        self.endpoints: dict[tuple[str, str], Callable[[Call], Response]] = {
            ('GET', '/nodes'): self.nodes,
            ('POST', '/nodes/{name}/{action}'): self.judge,
            ('GET', '/owners'): self.owners,
            ('POST', '/owners'): self.set_owner,
            ('DELETE', '/owners/{name}/token'): self.revoke_owner,
            ('GET', '/pools'): self.pools,
            ('POST', '/pools'): self.set_pool,
            ('DELETE', '/pools/{name}/token'): self.revoke_pool,
        }

    def nodes(self, asked: Call) -> Response:
        """Machines that are here, then those that were, the latest first; 1,000 at most."""
        with self.database.transaction() as connection:
            operator_of(connection, asked.token)
            rows = connection.execute(f"select {NODES} order by n.state = 'gone', n.last_seen desc, n.name limit {MAX_LISTED}").fetchall()
            num = connection.execute('select count(*) as num from node').fetchone()
        return JSONResponse({'nodes': rows, 'left_out': num['num'] - len(rows) if num else 0})

    def judge(self, asked: Call) -> Response:
        """Ban, drain or readmit a machine. A ban takes its job from it at once: what it has not published is lost; draining lets it save."""
        name, action = _named(asked), str(asked.path['action'])
        if action not in ACTIONS:
            raise Refused(404, f'{action[:80]!r} is not one of {", ".join(ACTIONS)}')
        reason = _reason(asked.json().get('reason'))
        with self.database.transaction() as connection:
            operator = operator_of(connection, asked.token)
            row = connection.execute('select state from node where name = %s for update', [name]).fetchone()
            if row is None:
                raise Refused(404, f'there is no machine {name}')
            state: str = ACTIONS[action]
            if action == 'drain' and row['state'] != NodeState.LIVE:
                raise Refused(409, f'{name} is {row["state"]} already; only live machines are drained')
            if action == 'readmit':
                here = connection.execute('select 1 from session where node = %s and ended is null', [name]).fetchone()
                state, reason = NodeState.LIVE if here else NodeState.GONE, ''
                connection.execute('update node set judged_from = now() where name = %s', [name])
                connection.execute('delete from ban where node = %s', [name])
            else:
                reason = reason or f'{action} by {operator.name}'
            connection.execute('update node set state = %s, reason = %s where name = %s', [state, reason, name])
            if action == 'ban':
                _take_jobs(connection, name, f'{name} was banned by an operator')
        _record(operator, f'{action} machine {name}, which was {row["state"]}{": " + reason if reason else ""}')
        return JSONResponse({'name': name, 'state': state, 'reason': reason})

    def owners(self, asked: Call) -> Response:
        with self.database.transaction() as connection:
            operator_of(connection, asked.token)
            rows = connection.execute(
                f"""select o.name, o.is_operator as operator, o.max_leased, o.max_queued, o.budget_dollars,
                (select count(*) from job where owner = o.name and state = 'queued')::int as queued,
                (select count(*) from job where owner = o.name and state = 'leased')::int as leased,
                coalesce((select sum(a.dollars) from attempt a join job j on j.id = a.job where j.owner = o.name), 0) as spent_dollars
                from owner o where %(name)s::text is null or o.name = %(name)s order by o.name limit {MAX_LISTED}""",
                {'name': asked.query.get('name')},
            ).fetchall()
        return JSONResponse({'owners': rows})

    def set_owner(self, asked: Call) -> Response:
        """Change an owner, or with `create: true` make one; `new_token: true` gives a known one another token. Secrets are shown once."""
        said = asked.json()
        with self.database.transaction() as connection:
            operator = operator_of(connection, asked.token)
            name, values = _name(said), _values(said, OWNER_LIMITS)
            if 'operator' in values:
                values['is_operator'] = values.pop('operator')
            known = _known(connection, 'owner', name, said)
            if name == operator.name and values.get('is_operator') is False:
                raise Refused(409, f'{name} cannot take its own rights; another operator can')
            answer: dict[str, Any] = {'name': name, 'created': not known}
            if not known or said.get('new_token') is True:
                answer['token'] = new_token('owner')
                values['token_hash'] = digest(answer['token'])
            if not known:
                key = secrets.token_bytes(32)
                answer['notice_key'], values['notice_key'] = key.hex(), key
            _write(connection, 'owner', name, values, known)
        _record(operator, f'{"change" if known else "create"} owner {name}: {_shown(values)}')
        return JSONResponse(answer)

    def revoke_owner(self, asked: Call) -> Response:
        """Make an owner's token useless; its jobs stay."""
        return self._revoke(asked, 'owner')

    def pools(self, asked: Call) -> Response:
        with self.database.transaction() as connection:
            operator_of(connection, asked.token)
            rows = connection.execute(
                f"""select p.name, p.price_per_hour, p.trusted, (select count(*) from node where pool = p.name and state <> 'gone')::int as nodes
                from pool p where %(name)s::text is null or p.name = %(name)s order by p.name limit {MAX_LISTED}""",
                {'name': asked.query.get('name')},
            ).fetchall()
        return JSONResponse({'pools': rows})

    def set_pool(self, asked: Call) -> Response:
        """Change a pool, or with `create: true` make one. The price is that of machines to come; the enrolment token is shown once."""
        said = asked.json()
        with self.database.transaction() as connection:
            operator = operator_of(connection, asked.token)
            name, values = _name(said), _values(said, POOL_LIMITS)
            known = _known(connection, 'pool', name, said)
            if not known and 'price_per_hour' not in values:
                raise Refused(422, f'price_per_hour: the pool {name} is new; say what one of its machines costs in an hour, in dollars')
            answer: dict[str, Any] = {'name': name, 'created': not known}
            if not known or said.get('new_token') is True:
                answer['token'] = new_token('pool')
                values['token_hash'] = digest(answer['token'])
            _write(connection, 'pool', name, values, known)
        _record(operator, f'{"change" if known else "create"} pool {name}: {_shown(values)}')
        return JSONResponse(answer)

    def revoke_pool(self, asked: Call) -> Response:
        """Make an enrolment token useless; machines that are here stay until they leave."""
        return self._revoke(asked, 'pool')

    def _revoke(self, asked: Call, table: str) -> Response:
        name = _named(asked)
        with self.database.transaction() as connection:
            operator = operator_of(connection, asked.token)
            if table == 'owner' and name == operator.name:
                raise Refused(409, f'{name} cannot revoke its own token; another operator can, or take a new one')
            row = connection.execute(f'update {table} set token_hash = %s where name = %s returning name', [secrets.token_bytes(32), name]).fetchone()
            if row is None:
                raise Refused(404, f'there is no {table} {name}')
        _record(operator, f'revoke the token of {table} {name}')
        return JSONResponse({'name': name})


def _take_jobs(connection: Connection, node: str, message: str) -> None:
    """Give the jobs of a machine back to the queue; it is told 409 with its next request."""
    rows = connection.execute("select id::text, epoch from job where node = %s and state = 'leased' for update", [node]).fetchall()
    for row in rows:
        close(connection, row['id'], row['epoch'], Ending.RELEASED, message=message)


def _known(connection: Connection, table: str, name: str, said: dict[str, Any]) -> bool:
    """Whether the owner or pool is there; its row is locked.

    Raises:
        Refused: it is not, and `create` is not said; or it is, and it is.
    """
    known = connection.execute(f'select 1 from {table} where name = %s for update', [name]).fetchone() is not None
    create = said.get('create') is True
    if known and create:
        raise Refused(409, f'the {table} {name} is there already; leave --create out to change it')
    if not known and not create:
        raise Refused(404, f'there is no {table} {name}; say --create to make one of that name')
    return known


def _write(connection: Connection, table: str, name: str, values: dict[str, Any], known: bool) -> None:
    """Insert or update a row; the names of columns are this file's."""
    if not known:
        columns = ['name', *values]
        connection.execute(f'insert into {table} ({", ".join(columns)}) values ({", ".join(["%s"] * len(columns))})', [name, *values.values()])
    elif values:
        connection.execute(f'update {table} set {", ".join(f"{column} = %s" for column in values)} where name = %s', [*values.values(), name])


def _named(asked: Call) -> str:
    """The name in the path.

    Raises:
        Refused: nothing can have it.
    """
    name = str(asked.path['name'])
    if not NAME.fullmatch(name):
        raise Refused(404, f'there is nothing of the name {name[:80]!r}')
    return name


def _name(said: dict[str, Any]) -> str:
    name = said.get('name')
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise Refused(422, f'name: {str(name)[:80]!r} may have letters, digits and . _ - alone, 64 at most: it becomes the name of a folder')
    return name


def _values(said: dict[str, Any], limits: dict[str, tuple[type, float, float]]) -> dict[str, Any]:
    unknown = sorted(set(said) - {*limits, 'name', 'new_token', 'create'})
    errors = [f'{key[:80]}: there is no such setting; there are {", ".join(limits)}' for key in unknown]
    values = {}
    for key, (kind, low, high) in limits.items():
        value = said.get(key)
        if value is None:
            continue
        fits = isinstance(value, bool) if kind is bool else not isinstance(value, bool) and isinstance(value, int if kind is int else int | float)
        if not fits or not low <= value <= high:
            wanted = 'true or false' if kind is bool else f'{"a whole" if kind is int else "a"} number from {low:g} to {high:g}'
            errors.append(f'{key}: {str(value)[:80]!r} is not {wanted}')
        values[key] = value
    if errors:
        raise Refused(422, '; '.join(errors), errors)
    return values


def _reason(said: object) -> str:
    return UNPRINTABLE.sub(' ', str(said or ''))[:MAX_REASON].strip()


def _shown(values: dict[str, Any]) -> str:
    """ServiceSettings for the record, without secrets."""
    shown = [f'{key}={value}' for key, value in values.items() if key not in ('token_hash', 'notice_key')]
    return ', '.join([*shown, *(['new token'] if 'token_hash' in values else [])]) or 'nothing'


def _record(operator: Account, what: str) -> None:
    print(f'operator {operator.name}: {what}', flush=True)
