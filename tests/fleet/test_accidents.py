"""What breaks at the worst moment: the service inside a transaction, a machine that fails everything, the last job's last machine."""

import os
import threading

import pytest

from fleet.queue.database import connected
from tests.fleet import storm_worker
from tests.fleet.fleet import Service, add_jobs, add_owner, add_pool, new_database, rows
from tests.fleet.test_service import Node, finish

PLACES = ('claim.picked', 'claim.written', 'publish.held', 'publish.written', 'end.signed', 'end.written')


@pytest.fixture
def url(postgres):
    return new_database(postgres)


@pytest.fixture
def pool(url):
    with connected(url) as connection:
        add_owner(connection, 'ann')
        return add_pool(connection)


@pytest.mark.parametrize('place', PLACES)
def test_the_service_is_killed_inside_a_transaction(place, url, pool, s3, monkeypatch):
    with connected(url) as connection:
        add_jobs(connection, 'ann', 3)
    monkeypatch.setenv('DIFFUSION_FAILPOINT', f'fleet.{place}:kill')
    service = Service(url)
    monkeypatch.delenv('DIFFUSION_FAILPOINT')
    revived = []

    def revive():
        service.process.wait()
        service.process.stdout.close()
        revived.append(True)
        service.start()

    reviver = threading.Thread(target=revive)
    reviver.start()
    machine = storm_worker.fork(service.address, pool, 'machine', idle_sec=2)
    try:
        assert os.waitpid(machine, 0)[1] == 0
        reviver.join()
    finally:
        service.kill()
    assert revived == [True]  # it was killed, once
    assert [row['state'] for row in rows(url, 'select state from job')] == ['done'] * 3
    endings = [row['ending'] for row in rows(url, 'select ending from attempt order by started')]
    assert endings.count('done') == 3
    # A transaction that was cut is no transaction: at most the attempt that was running is told twice.
    assert len(endings) <= 4
    spent = rows(
        url, 'select spent_dollars as spent, (select sum(extract(epoch from last_sign - started)) / 3600 * 0.324 from attempt) as sum from owner'
    )[0]
    assert spent['spent'] == pytest.approx(float(spent['sum']))


def test_a_machine_that_fails_everything_loses_no_job(url, pool, s3):
    with connected(url) as connection:
        add_jobs(connection, 'ann', 12, {'limits': {'attempts': 1}})
    service = Service(url)
    try:
        bad, good = Node(service, pool, 'bad'), Node(service, pool, 'good')
        finish(good, good.claim())  # others are known to work
        failed = 0
        while not isinstance(lease := bad.claim(), int):
            assert bad.of(lease, 'end', exit_code=70, message='CUDA error: an illegal memory access was encountered') == 200
            failed += 1
        assert lease == 410  # drained by itself
        assert failed == 3
        while not isinstance(lease := good.claim(), int):
            finish(good, lease)
    finally:
        service.kill()
    assert [row['state'] for row in rows(url, 'select state from job')] == ['done'] * 12
    node = rows(url, "select state, reason from node where name = 'bad'")[0]
    assert node['state'] == 'quarantined'
    assert '3 jobs failed on bad' in node['reason']


def test_a_machine_that_was_quarantined_is_so_after_a_restart(url, pool, s3):
    service = Service(url)
    try:
        bad = Node(service, pool, 'bad')
        with connected(url) as connection:
            connection.execute("update node set state = 'quarantined'")
        bad.enroll()
        assert bad.claim() == 410
    finally:
        service.kill()


def test_the_last_job_and_the_last_machine(url, pool, s3):
    """The only machine has failed it: after a while it may try again, without a person."""
    with connected(url) as connection:
        add_jobs(connection, 'ann', 1)
    service = Service(url)
    try:
        node = Node(service, pool)
        assert node.of(node.claim(), 'end', exit_code=70, message='once') == 200
        assert node.claim() == 204
        with connected(url) as connection:
            connection.execute("update ban set since = since - interval '16 minutes', until = until - interval '16 minutes'")
            connection.execute("update job set not_before = now() where state = 'queued'")
        for _ in range(100):
            if not isinstance(lease := node.claim(), int):
                break
            threading.Event().wait(0.1)
        finish(node, lease)
    finally:
        service.kill()
    assert rows(url, 'select state from job')[0]['state'] == 'done'
