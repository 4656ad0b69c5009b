"""`GET /metrics`: figures for Prometheus, read from the database when they are asked for; only requests are counted by each process for itself."""

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

from fastapi import APIRouter, Response
from fastapi.responses import PlainTextResponse
from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from fleet.policies.rows import Ending, JobState, NodeState
from fleet.queue.database import Connection
from fleet.service.gate import GatedRoute, Operator, Service

CONTENT_TYPE = 'text/plain; version=0.0.4; charset=utf-8'

router = APIRouter(route_class=GatedRoute, tags=['asked by an operator'])


@router.get('/metrics', response_class=PlainTextResponse)
def metrics(_: Operator, service: Service) -> Response:
    """Show figures for Prometheus; requests are those of this process."""
    with service.database.transaction() as connection:
        found = list(figures(connection))
    of_fleet = generate_latest(SimpleNamespace(collect=lambda: found))  # type: ignore[arg-type] # whatever has `collect` will do
    return Response(of_fleet + generate_latest(service.registry), media_type=CONTENT_TYPE)


def figures(connection: Connection) -> Iterable[Metric]:
    """Yield what the database says now."""
    jobs = GaugeMetricFamily('fleet_jobs', 'Jobs by state.', labels=['state', 'owner'])
    for row in connection.execute('select state, owner, count(*) as num from job group by state, owner'):
        jobs.add_metric([JobState(row['state']), row['owner']], row['num'])
    yield jobs

    queue = _row(
        connection,
        """select coalesce(extract(epoch from now() - min(created) filter (where state = 'queued' and not_before <= now())), 0)::float8 as age,
        count(*) filter (where state = 'leased' and lease_until < now()) as lapsed from job where state in ('queued', 'leased')""",
    )
    yield GaugeMetricFamily('fleet_queue_age_seconds', 'Since the oldest job that waits was submitted.', queue['age'])
    yield GaugeMetricFamily(
        'fleet_lapsed_leases', 'Leases that have lapsed and that no sweeper has ended yet: above 0 for long, none sweeps.', queue['lapsed']
    )

    attempts = CounterMetricFamily('fleet_attempts', 'Attempts that have ended.', labels=['ending'])
    endings = dict.fromkeys(map(str, Ending), 0)
    for row in connection.execute('select ending, count(*) as num from attempt where ended is not null group by ending'):
        endings[row['ending']] = row['num']
    for ending, num in endings.items():
        attempts.add_metric([ending], num)
    yield attempts

    nodes = GaugeMetricFamily('fleet_nodes', 'Machines by state.', labels=['state', 'pool'])
    for row in connection.execute('select state, pool, count(*) as num from node group by state, pool'):
        nodes.add_metric([NodeState(row['state']), row['pool']], row['num'])
    yield nodes

    dollars = CounterMetricFamily(
        'fleet_dollars', 'Dollars for machines: of attempts, and of whole stays of machines, which providers bill.', labels=['of']
    )
    for of, query in (
        ('attempts', 'select coalesce(sum(dollars), 0) as dollars from attempt'),
        ('stays', 'select coalesce(sum(extract(epoch from last_seen - started)::float8 * price_per_hour), 0) / 3600 as dollars from session'),
    ):
        dollars.add_metric([of], _row(connection, query)['dollars'])
    yield dollars

    notices = GaugeMetricFamily('fleet_notices', 'Notices of ended jobs.', labels=['state'])
    counts = _row(
        connection,
        """select count(*) filter (where delivered is not null) as delivered,
        count(*) filter (where delivered is null and next_try = 'infinity') as given_up,
        count(*) filter (where delivered is null and next_try < 'infinity') as waiting from notice""",
    )
    for state, num in counts.items():
        notices.add_metric([state], num)
    yield notices


def _row(connection: Connection, query: str) -> dict[str, Any]:
    row = connection.execute(query).fetchone()
    assert row is not None
    return row
