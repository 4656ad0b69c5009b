"""A bill is the sum of its attempts, and with idle time what a provider bills."""

from datetime import UTC, datetime, timedelta

import pytest

from fleet.client.tables import bill_lines
from fleet.queue.bills import bill

SEC = 1 / 3600 * 0.324  # dollars


def test_the_published_job(made_up, connection):
    """The mean job of the SaladCloud post: 62.01 minutes at $0.324 an hour for 1,400 steps are $0.3348 and $0.00023918 a step."""
    made_up.node('salad-1', since=62.01, last=0)
    job = made_up.job('anna', 'timber', 'done', 70, 0, epoch=1)
    made_up.attempt(job, 1, 'salad-1', 62.01, 0, (0, 1400), 'done', start_min=2)
    answer = bill(connection)
    assert answer['total']['dollars'] == pytest.approx(0.3348, abs=0.00006)
    (row,) = answer['jobs']
    assert row['dollars_per_step'] == pytest.approx(0.00023918, abs=1e-7)
    assert (row['lost_steps'], row['attempts'], row['name']) == (0, 1, 'timber')
    assert answer['total']['start_hours'] == pytest.approx(2 / 60)
    assert answer['total']['idle_hours'] == pytest.approx(0, abs=1e-4)  # rows are written one after the other
    assert '$0.3349 for 1 attempt at 1 job' in bill_lines(answer)[0] or '$0.3348' in bill_lines(answer)[0]


def test_sums_are_those_of_attempts_and_of_sessions(made_up, connection):
    made_up.pool('lab', 1.5)
    made_up.populate(60, 5)
    made_up.node('lab-1', since=300, last=10, pool='lab')
    job = made_up.job('ben', state='done', ended=10, epoch=2)
    made_up.attempt(job, 1, 'lab-1', 200, 150, (0, 400), 'lost', start_min=None)
    made_up.attempt(job, 2, 'lab-1', 100, 10, (300, 1400), 'done', start_min=5)
    answer = bill(connection)
    attempts = connection.execute('select extract(epoch from last_sign - started)::float8 as sec, price_per_hour as price from attempt').fetchall()
    assert answer['total']['dollars'] == pytest.approx(sum(row['sec'] * row['price'] for row in attempts) / 3600, abs=len(attempts) * SEC)
    sessions = connection.execute(
        "select extract(epoch from last_seen - started)::float8 / 3600 as hours from session where node = 'lab-1'"
    ).fetchone()
    (lab,) = [pool for pool in answer['pools'] if pool['pool'] == 'lab']
    assert lab['session_hours'] == pytest.approx(sessions['hours'], rel=1e-4)  # rows are written one after the other, and signs of attempts count
    assert lab['hours'] == pytest.approx((50 + 90) / 60)
    assert lab['idle_hours'] == pytest.approx((290 - 140) / 60, rel=1e-4)
    assert lab['start_hours'] == pytest.approx((50 + 5) / 60)  # the first attempt never came to a step
    assert lab['idle_dollars'] + lab['dollars'] == pytest.approx(lab['session_dollars']) == pytest.approx(290 / 60 * 1.5, rel=1e-4)
    for sums in (answer['owners'], answer['pools'], answer['jobs']):
        assert sum(row['dollars'] for row in sums) == pytest.approx(answer['total']['dollars'])
    (row,) = [row for row in answer['jobs'] if row['id'] == job]
    assert row['lost_steps'] == 100  # 300 to 400


def test_steps_after_the_checkpoint_are_lost_while_the_job_waits(made_up, connection):
    made_up.node('salad-1')
    job = made_up.job('anna', step=200, epoch=1)
    made_up.attempt(job, 1, 'salad-1', 60, 20, (0, 260), 'lost')
    assert bill(connection)['jobs'][0]['lost_steps'] == 60


def test_periods_add_up(made_up, connection):
    made_up.node('salad-1', since=300, last=0)
    job = made_up.job('anna', state='done', ended=30, epoch=1)
    made_up.attempt(job, 1, 'salad-1', 240, 30, (0, 1400), 'done', start_min=20)
    middle = datetime.now(UTC) - timedelta(minutes=100)
    first, second, whole = (bill(connection, **period)['total'] for period in ({'until': middle}, {'since': middle}, {}))
    for key in ('hours', 'dollars', 'start_dollars', 'session_dollars', 'idle_hours'):
        assert first[key] + second[key] == pytest.approx(whole[key], rel=1e-3), key
    assert first['hours'] == pytest.approx(140 / 60, rel=1e-3)
    assert (second['start_dollars'], first['idle_hours']) == (0, pytest.approx(1, rel=1e-3))


def test_owners_see_their_own(service, made_up):
    made_up.populate(30, 3)
    everything, own = service.get('/bill').json(), service.get('/bill', 'anna').json()
    assert [row['owner'] for row in own['owners']] == ['anna'] == sorted({row['owner'] for row in own['jobs']})
    assert 'session_dollars' not in own['total']
    (expected,) = [row['dollars'] for row in everything['owners'] if row['owner'] == 'anna']
    assert own['total']['dollars'] == pytest.approx(expected)
    few = service.get('/bill?limit=2').json()
    assert (len(few['jobs']), few['jobs_left_out']) == (2, everything['total']['jobs'] - 2)
    assert few['total'] == everything['total']
    text = '\n'.join(bill_lines(few))
    assert 'as a provider bills' in text
    assert 'left out; they are in the sums' in text


@pytest.mark.parametrize('query', ['since=yesterday', 'limit=-1', 'limit=9999', 'until=2025-01-01&since=2026-01-01'])
def test_what_is_no_period_is_refused(service, query):
    answer = service.get(f'/bill?{query}')
    assert answer.status_code == 400
    assert query.partition('&')[0].partition('=')[2] in answer.json()['error']


def test_an_empty_fleet_costs_nothing(service):
    answer = service.get('/bill?since=2026-01-01').json()
    assert answer['total']['session_dollars'] == answer['total']['dollars'] == 0
    assert bill_lines(answer)
