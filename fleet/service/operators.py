"""Endpoints of operators: machines, owners, pools, scaling and bills. The service prints each change with its operator's name."""

import secrets
from datetime import UTC, datetime
from typing import Annotated, Any

from fastapi import APIRouter, Query

from fleet.jobs.protocol import (
    AccountAnswer,
    AccountSettings,
    MachineAction,
    OwnerSettings,
    PoolSettings,
    TokensAnswer,
    TokensRequest,
)
from fleet.jobs.spec import NAME
from fleet.policies.hand_out import ScalingLimits
from fleet.policies.rows import Ending, NodeState
from fleet.queue.bills import bill
from fleet.queue.database import new_token
from fleet.queue.endings import close
from fleet.service.gate import Account, FleetService, GatedRoute, Operator, Owner, RequestRejected, Service, digest
from fleet.service.scaling import proposal

MAX_LISTED = 1000
MAX_JOBS_BILLED = 1000
ACTIONS = {'ban': NodeState.QUARANTINED, 'drain': NodeState.DRAINING, 'readmit': NodeState.LIVE}
NODES = """
    n.name, n.pool, n.state, n.reason, n.gpu, n.gpu_gb, n.num_gpus, n.image, n.version, p.trusted, s.price_per_hour, s.address,
    array(select r.name from recipe r where n.recipes ->> r.name is distinct from r.sha256 order by r.name) as other_recipes,
    extract(epoch from now() - greatest(s.last_seen, n.last_seen))::float8 as silent_sec,
    j.id::text as job, j.name as job_name, j.owner, a.last_step as step, j.num_steps, a.steps_per_sec,
    (select count(*) from attempt where attempt.node = n.name)::int as attempts,
    (select count(*) from attempt where attempt.node = n.name and ending = 'done')::int as done
    from node n join pool p on p.name = n.pool left join session s on s.node = n.name and s.ended is null
    left join job j on j.node = n.name and j.state = 'leased' left join attempt a on a.job = j.id and a.epoch = j.epoch
"""

router = APIRouter(route_class=GatedRoute, tags=['asked by an operator'])


@router.get('/nodes')
def nodes(_: Operator, service: Service) -> dict[str, Any]:
    """List machines that are here, then those that were, the latest first; 1,000 at most."""
    with service.database.transaction() as connection:
        rows = connection.execute(f"select {NODES} order by n.state = 'gone', n.last_seen desc, n.name limit {MAX_LISTED}").fetchall()
        num = connection.execute('select count(*) as num from node').fetchone()
    return {'nodes': rows, 'left_out': num['num'] - len(rows) if num else 0}


@router.post('/nodes/{name}/{action}')
def act_on_machine(name: str, action: str, said: MachineAction, operator: Operator, service: Service) -> dict[str, str]:
    """Ban, drain or readmit a machine. A ban takes its job from it at once: what it has not published is lost; draining lets it save."""
    _refuse_no_name(name)
    if action not in ACTIONS:
        raise RequestRejected(404, f'{action[:80]!r} is not one of {", ".join(ACTIONS)}')
    reason = said.reason
    with service.database.transaction() as connection:
        row = connection.execute('select state from node where name = %s for update', [name]).fetchone()
        if row is None:
            raise RequestRejected(404, f'there is no machine {name}; `nodes` lists them')
        state: str = ACTIONS[action]
        if action == 'drain' and row['state'] != NodeState.LIVE:
            raise RequestRejected(409, f'{name} is {row["state"]} already; only live machines are drained')
        if action == 'readmit':
            here = connection.execute('select 1 from session where node = %s and ended is null', [name]).fetchone()
            state, reason = NodeState.LIVE if here else NodeState.GONE, ''
            connection.execute('update node set judged_from = now() where name = %s', [name])
            connection.execute('delete from ban where node = %s', [name])
        else:
            reason = reason or f'{action} by {operator.name}'
        connection.execute('update node set state = %s, reason = %s where name = %s', [state, reason, name])
        if action == 'ban':  # it is told 409 with its next request
            jobs = connection.execute("select id::text, epoch from job where node = %s and state = 'leased' for update", [name]).fetchall()
            for job in jobs:
                close(connection, job['id'], job['epoch'], Ending.RELEASED, message=f'{name} was banned by an operator')
    _record(operator, f'{action} machine {name}, which was {row["state"]}{": " + reason if reason else ""}')
    return {'name': name, 'state': state, 'reason': reason}


@router.get('/owners')
def list_owners(_: Operator, service: Service, name: str | None = None) -> dict[str, Any]:
    """List owners with their limits, dollars and jobs."""
    with service.database.transaction() as connection:
        rows = connection.execute(
            f"""select o.name, o.is_operator as operator, o.max_leased, o.max_queued, o.budget_dollars,
            (select count(*) from job where owner = o.name and state = 'queued')::int as queued,
            (select count(*) from job where owner = o.name and state = 'leased')::int as leased,
            coalesce((select sum(a.dollars) from attempt a join job j on j.id = a.job where j.owner = o.name), 0) as spent_dollars
            from owner o where %(name)s::text is null or o.name = %(name)s order by o.name limit {MAX_LISTED}""",
            {'name': name},
        ).fetchall()
    return {'owners': rows}


@router.post('/owners', response_model_exclude_none=True)
def set_owner(said: OwnerSettings, operator: Operator, service: Service) -> AccountAnswer:
    """Change an owner, or with `create: true` make one."""
    values = said.columns
    if 'operator' in values:
        values['is_operator'] = values.pop('operator')
    if said.name == operator.name and said.operator is False:
        raise RequestRejected(409, f'{said.name} cannot take its own rights; another operator can')
    return _set_account(service, operator, 'owner', said, values)


@router.delete('/owners/{name}/token')
def revoke_owner(name: str, operator: Operator, service: Service) -> dict[str, str]:
    """Make an owner's token useless; its jobs stay."""
    if name == operator.name:
        raise RequestRejected(409, f'{name} cannot revoke its own token; another operator can, or take a new one')
    return _revoke(service, operator, 'owner', name)


@router.get('/pools')
def list_pools(_: Operator, service: Service, name: str | None = None) -> dict[str, Any]:
    """List pools with their prices and numbers of machines."""
    with service.database.transaction() as connection:
        rows = connection.execute(
            f"""select p.name, p.price_per_hour, p.trusted, p.max_machines, p.max_per_address, p.one_use,
            (select count(*) from enrolment where pool = p.name and used is null)::int as tokens,
            (select count(*) from node where pool = p.name and state <> 'gone')::int as nodes
            from pool p where %(name)s::text is null or p.name = %(name)s order by p.name limit {MAX_LISTED}""",
            {'name': name},
        ).fetchall()
    return {'pools': rows}


@router.post('/pools', response_model_exclude_none=True)
def set_pool(said: PoolSettings, operator: Operator, service: Service) -> AccountAnswer:
    """Change a pool, or with `create: true` make one. The price is that of machines to come."""
    return _set_account(service, operator, 'pool', said, said.columns)


@router.post('/pools/{name}/tokens')
def new_enrolments(name: str, said: TokensRequest, operator: Operator, service: Service) -> TokensAnswer:
    """Make enrolment tokens of a pool that let in one machine each, once."""
    _refuse_no_name(name)
    tokens = [new_token('enrol') for _ in range(said.num)]
    with service.database.transaction() as connection:
        if connection.execute('select 1 from pool where name = %s', [name]).fetchone() is None:
            raise RequestRejected(404, f'there is no pool {name}')
        connection.execute('insert into enrolment (token_hash, pool) select unnest(%s::bytea[]), %s', [list(map(digest, tokens)), name])
    _record(operator, f'make {said.num} enrolment tokens of pool {name}')
    return TokensAnswer(tokens=tokens)


@router.delete('/pools/{name}/token')
def revoke_pool(name: str, operator: Operator, service: Service) -> dict[str, str]:
    """Make all enrolment tokens useless; machines that are here stay until they leave."""
    with service.database.transaction() as connection:
        connection.execute('delete from enrolment where pool = %s and used is null', [name])
    return _revoke(service, operator, 'pool', name)


@router.get('/scale')
def scale(
    _: Operator, service: Service, max: Annotated[int, Query(ge=0, le=100_000)],
    wanted_hours: Annotated[float | None, Query(ge=0.01, le=10_000, allow_inf_nan=False)] = None,
    idle_sec: Annotated[float, Query(ge=0, le=86_400, allow_inf_nan=False)] = 600,
) -> dict[str, Any]:  # fmt: skip
    """Say how many machines the fleet wants, and which idle ones may leave: `fleet scale` acts on it, as the service knows no provider."""
    with service.database.transaction() as connection:
        return proposal(connection, ScalingLimits(max_nodes=max, wanted_hours=wanted_hours, idle_sec=idle_sec))


@router.get('/bill', tags=['asked by an owner'])
def bill_of_period(
    owner: Owner, service: Service, since: str = '', until: str = '', limit: Annotated[int, Query(ge=0, le=MAX_JOBS_BILLED)] = MAX_JOBS_BILLED
) -> dict[str, Any]:
    """Sum up what machines cost, of an owner's own jobs or for an operator of all. Times are ISO 8601, of UTC unless they say otherwise."""
    first, last = _time('since', since), _time('until', until)
    if first is not None and last is not None and first > last:
        raise RequestRejected(400, f'until: {until[:80]} is before since, {since[:80]}; swap them')
    with service.database.transaction() as connection:
        return bill(connection, None if owner.is_operator else owner.name, first, last, limit)


def _time(key: str, text: str) -> datetime | None:
    if not text:
        return None
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise RequestRejected(400, f'{key}: {text[:80]!r} is no time; write 2026-01-31 or 2026-01-31T18:00') from None
    return time if time.tzinfo else time.replace(tzinfo=UTC)


def _set_account(service: FleetService, operator: Account, table: str, said: AccountSettings, values: dict[str, Any]) -> AccountAnswer:
    """Insert or change the row of an owner or pool; names of columns are those of the models."""
    name = said.name
    with service.database.transaction() as connection:
        known = connection.execute(f'select 1 from {table} where name = %s for update', [name]).fetchone() is not None
        if known and said.create:
            raise RequestRejected(409, f'the {table} {name} is there already; leave --create out to change it')
        if not known and not said.create:
            raise RequestRejected(404, f'there is no {table} {name}; say --create to make one of that name')
        if not known and table == 'pool' and 'price_per_hour' not in values:
            raise RequestRejected(422, f'price_per_hour: the pool {name} is new; say what one of its machines costs in an hour, in dollars')
        answer = AccountAnswer(name=name, created=not known)
        shown = [f'{key}={f"{value:.10g}" if isinstance(value, float) else value}' for key, value in values.items()]
        if not known or said.new_token:
            answer.token = new_token(table)
            values['token_hash'] = digest(answer.token)
            shown.append('new token')
        if not known and table == 'owner':
            values['notice_key'] = secrets.token_bytes(32)
            answer.notice_key = values['notice_key'].hex()
        if not known:
            columns = ['name', *values]
            places = ', '.join(['%s'] * len(columns))
            connection.execute(f'insert into {table} ({", ".join(columns)}) values ({places})', [name, *values.values()])
        elif values:
            connection.execute(f'update {table} set {", ".join(f"{column} = %s" for column in values)} where name = %s', [*values.values(), name])
    _record(operator, f'{"change" if known else "create"} {table} {name}: {", ".join(shown) or "nothing"}')
    return answer


def _revoke(service: FleetService, operator: Account, table: str, name: str) -> dict[str, str]:
    _refuse_no_name(name)
    with service.database.transaction() as connection:
        row = connection.execute(f'update {table} set token_hash = %s where name = %s returning name', [secrets.token_bytes(32), name]).fetchone()
        if row is None:
            raise RequestRejected(404, f'there is no {table} {name}')
    _record(operator, f'revoke the token of {table} {name}')
    return {'name': name}


def _refuse_no_name(name: str) -> None:
    """Raises RequestRejected: nothing can have this name."""
    if not NAME.fullmatch(name):
        raise RequestRejected(404, f'there is nothing of the name {name[:80]!r}')


def _record(operator: Account, what: str) -> None:
    print(f'operator {operator.name}: {what}', flush=True)
