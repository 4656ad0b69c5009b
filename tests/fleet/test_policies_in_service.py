"""The policies as the service applies them, over HTTP: slow machines, losses, quarantine and what returns from it, NaN twice."""

import pytest

from fleet.queue.database import connected
from tests.fleet.fleet import RECIPE, add_jobs, rows
from tests.fleet.test_service import Node, described, finish, service, tokens, url  # noqa: F401 # fixtures


@pytest.fixture(autouse=True)
def _storage(s3):
    pass


def job_row(url, lease):  # noqa: F811
    return rows(url, 'select state, cause, ended from job where id = %s', lease['job'])[0]


def node_state(url, name):  # noqa: F811
    return rows(url, 'select state from node where name = %s', name)[0]['state']


def test_a_slow_machine_gives_its_job_back_and_leaves(service, tokens, url):  # noqa: F811
    with connected(url) as connection:
        add_jobs(connection, 'ann', 22, num_steps=100)
    others = [Node(service, tokens['pool'], f'n{i}') for i in range(20)]
    for node in others:
        lease = node.claim()
        assert node.of(lease, 'renew', step=20, steps_per_sec=2.0) == 200
        finish(node, lease)
    slow = Node(service, tokens['pool'], 'slow')
    lease = slow.claim()
    renewal = {'epoch': 1, 'steps_per_sec': 0.9}
    assert slow.ask(f'/jobs/{lease["job"]}/renew', {**renewal, 'step': 9}).json()['action'] == 'continue'  # too early to tell
    answer = slow.ask(f'/jobs/{lease["job"]}/renew', {**renewal, 'step': 10}).json()
    assert answer['action'] == 'release'
    assert 'slow makes 0.9 steps/s, others with fake 2' in answer['reason']
    assert slow.put(lease, 10, 'f', b'ten') == 200
    assert slow.of(lease, 'publish', step=10, files={'f': described(b'ten')}) == 200
    assert slow.of(lease, 'end', exit_code=75, ending='released', step=10) == 200
    assert slow.claim() == 410
    assert node_state(url, 'slow') == 'draining'
    heir = others[0].claim()  # to the front of the queue
    assert (heir['job'], heir['epoch'], heir['checkpoint']['step']) == (lease['job'], 2, 10)


def test_a_machine_that_boasts_makes_no_other_leave(service, tokens, url):  # noqa: F811
    with connected(url) as connection:
        add_jobs(connection, 'ann', 10, num_steps=100)
    honest = [Node(service, tokens['pool'], f'n{i}') for i in range(3)]
    leases = [node.claim() for node in honest]
    for node, lease in zip(honest, leases, strict=True):
        assert node.of(lease, 'renew', step=20, steps_per_sec=2.0) == 200
    boaster = Node(service, tokens['pool'], 'boaster')
    with connected(url) as connection:
        connection.execute(
            """insert into attempt (job, epoch, node, session, gpu, recipe, price_per_hour, first_step, last_step, steps_per_sec, ended, ending)
            select j.id, -number, s.node, s.id, 'fake', %s, 1, 0, 1, 1e6, now(), 'stopped' from session s, generate_series(1, 300) number,
            (select id from job where state = 'queued' limit 1) j where s.node = 'boaster'""",
            [RECIPE],
        )
    for node, lease in zip(honest, leases, strict=True):
        assert node.ask(f'/jobs/{lease["job"]}/renew', {'epoch': 1, 'step': 21, 'steps_per_sec': 2.0}).json()['action'] == 'continue'
    assert boaster.claim() != 410


def test_jobs_that_failed_on_a_machine_return_when_it_is_quarantined(service, tokens, url):  # noqa: F811
    """It has finished a job, so its failures count; then it breaks. Each job fails for its owner, and is put back when the third tells why."""
    with connected(url) as connection:
        add_jobs(connection, 'ann', 4, {'limits': {'attempts': 1}})
    bad = Node(service, tokens['pool'], 'bad')
    finish(bad, bad.claim())
    failed = []
    for _ in range(2):
        lease = bad.claim()
        assert bad.of(lease, 'end', exit_code=70, message='CUDA error') == 200
        assert job_row(url, lease)['state'] == 'failed'
        failed.append(lease)
    lease = bad.claim()
    assert bad.of(lease, 'end', exit_code=70, message='CUDA error') == 200
    assert node_state(url, 'bad') == 'quarantined'
    for one in (*failed, lease):
        row = job_row(url, one)
        assert (row['state'], row['ended']) == ('queued', None)
        assert 'bad is quarantined' in row['cause']
    good = Node(service, tokens['pool'], 'good')
    for _ in range(3):
        finish(good, good.claim())
    assert {row['state'] for row in rows(url, 'select state from job')} == {'done'}
    assert bad.claim() == 410
    with_sum = (
        'select spent_dollars as spent, (select sum(extract(epoch from last_sign - started)) / 3600 * 0.324 from attempt)::float8 as sum from owner'
    )
    [bill] = rows(url, f"{with_sum} where name = 'ann'")
    assert bill['spent'] == pytest.approx(bill['sum'])  # failures on a broken machine are paid all the same


def test_losses_end_a_job(service, tokens, url):  # noqa: F811
    with connected(url) as connection:
        add_jobs(connection, 'ann', 1, {'limits': {'losses': 2}})
    for number in range(3):
        node = Node(service, tokens['pool'], f'n{number}')
        lease = node.claim()
        assert lease['epoch'] == number + 1
        assert node.ask('/leave').status_code == 200  # with the job in its hands
    row = job_row(url, lease)
    assert row['state'] == 'failed'
    assert row['cause'].startswith('3 machines vanished or broke down with it, limits.losses is 2')


def test_a_loss_that_is_nan_fails_on_the_second_machine(service, tokens, url):  # noqa: F811
    with connected(url) as connection:
        add_jobs(connection, 'ann', 1)
    one, two = Node(service, tokens['pool'], 'one'), Node(service, tokens['pool'], 'two')
    lease = one.claim()
    assert one.of(lease, 'end', exit_code=77, message='NaN at step 7', step=7) == 200
    assert one.claim() == 204  # not back to this one
    lease = two.claim()
    assert two.of(lease, 'end', exit_code=77, message='NaN at step 9', step=9) == 200
    row = job_row(url, lease)
    assert row['state'] == 'failed'
    assert row['cause'].startswith('the loss stayed NaN or infinite on 2 machines')
    assert row['cause'].count('NaN at step') == 2


def test_a_machine_that_claims_and_forgets_fails_no_job(service, tokens, url):  # noqa: F811
    """Such as a container that is killed whole, again and again. Twice for each of three jobs, and it is out."""
    with connected(url) as connection:
        add_jobs(connection, 'ann', 6)
    node = Node(service, tokens['pool'], 'looping')
    claims = 0
    while not isinstance(node.claim(), int) and claims < 100:
        claims += 1
        if claims % 2:
            node.enroll()  # its worker is started again
    assert claims == 6
    assert node_state(url, 'looping') == 'quarantined'
    assert {row['state'] for row in rows(url, 'select state from job')} == {'queued'}
    good = Node(service, tokens['pool'], 'good')
    for _ in range(6):
        finish(good, good.claim())


def test_a_retried_job_has_all_its_hours(service, tokens, url):  # noqa: F811
    with connected(url) as connection:
        add_jobs(connection, 'ann', 1, {'limits': {'hours': 1}})
    node = Node(service, tokens['pool'])
    lease = node.claim()
    assert lease['hours_left'] == pytest.approx(1, abs=0.01)
    with connected(url) as connection:
        connection.execute("update attempt set started = started - interval '2 hours'")
    assert node.of(lease, 'end', exit_code=75) == 200
    assert job_row(url, lease)['state'] == 'failed'
    assert service.ask('POST', f'/jobs/{lease["job"]}/retry', tokens['ann']).status_code == 200
    assert node.claim()['hours_left'] == pytest.approx(1, abs=0.01)
