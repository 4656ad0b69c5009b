"""Prometheus reads what the service says, with its own parser."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from fleet.queue.bills import bill


def samples(service):
    answer = service.get('/metrics')
    assert answer.headers['content-type'].startswith('text/plain; version=0.0.4')
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


def total(found, name, **labels):
    return sum(value for (key, *own), value in found.items() if key == name and set(labels.items()) <= set(own))


def test_figures_are_those_of_the_rows(service, made_up, connection):
    made_up.populate(60, 5)
    made_up.job('anna', age=3000)
    lapsed = connection.execute("select id from job where state = 'leased' limit 1").fetchone()['id']
    connection.execute("update job set lease_until = now() - interval '1 minute' where id = %s", [lapsed])
    for tries, next_try, delivered in ((1, 'now()', 'now()'), (2, 'now()', 'null'), (15, "'infinity'", 'null'), (15, "'infinity'", 'null')):
        connection.execute(
            f"insert into notice (job, url, body, tries, next_try, delivered) values (%s, '', '', {tries}, {next_try}, {delivered})", [lapsed]
        )
    found = samples(service)
    for row in connection.execute('select state, owner, count(*) as num from job group by state, owner'):
        assert total(found, 'fleet_jobs', state=row['state'], owner=row['owner']) == row['num']
    for row in connection.execute('select ending, count(*) as num from attempt where ended is not null group by ending'):
        assert total(found, 'fleet_attempts_total', ending=row['ending']) == row['num']
    assert total(found, 'fleet_attempts_total', ending='limit') == 0
    assert ('fleet_attempts_total', ('ending', 'limit')) in found  # a counter that is missing is no 0
    assert total(found, 'fleet_nodes', state='quarantined', pool='cloud') == 1
    assert total(found, 'fleet_queue_age_seconds') == pytest.approx(3000 * 60, abs=5)
    assert total(found, 'fleet_lapsed_leases') == 1
    assert total(found, 'fleet_dollars_total', of='attempts') == pytest.approx(bill(connection)['total']['dollars'])
    assert [total(found, 'fleet_notices', state=state) for state in ('delivered', 'waiting', 'given_up')] == [1, 1, 2]


def test_answers_are_counted_by_route(service, made_up):
    job = made_up.job('anna')
    service.get(f'/jobs/{job}', 'anna')
    service.get(f'/jobs/{job}', 'ben')
    service.get(f'/jobs/{job}', 'nobody')
    found = samples(service)
    for status in ('200', '404', '401'):
        assert total(found, 'fleet_requests_total', method='GET', path='/jobs/{job:uuid}', status=status) == 1
    assert total(samples(service), 'fleet_requests_total', path='/metrics') == 1


def test_an_empty_fleet_has_figures(service):
    found = samples(service)
    assert total(found, 'fleet_queue_age_seconds') == total(found, 'fleet_dollars_total') == 0


@pytest.mark.parametrize(('name', 'status'), [('anna', 403), ('nobody', 401)])
def test_only_operators_see_them(service, name, status):
    assert service.get('/metrics', name).status_code == status
