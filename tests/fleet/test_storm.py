"""Machines that are killed and stopped at random, while the service and the database restart: every job is done, once."""

import logging
import os
import random
import signal
import time
from contextlib import suppress
from itertools import pairwise
from statistics import median

import pytest

from tests.fleet import storm_worker
from tests.fleet.fleet import RECIPE, Service, add_jobs, add_owner, add_pool, new_database, rows

LEASE_SEC, POLL_SEC, MARGIN_SEC = 1.5, 0.5, 1.0
ACCIDENTS_A_JOB = 0.22


@pytest.mark.parametrize('num_jobs', [100, pytest.param(1000, marks=pytest.mark.long)])
@pytest.mark.timeout(900)
def test_storm(num_jobs, postgres, s3, monkeypatch):
    logging.getLogger('werkzeug').setLevel(logging.ERROR)
    monkeypatch.setenv('S3_ENDPOINT_URL', f'http://127.0.0.1:{s3.proxy.target_port}')  # past the proxy: half the work
    from fleet.queue.database import connected

    url = new_database(postgres)
    with connected(url) as connection:
        add_owner(connection, 'owner')
        pool = add_pool(connection)
        add_jobs(connection, 'owner', num_jobs, {'limits': {'losses': 1000}})
    service = Service(url, **{'lease-sec': LEASE_SEC, 'renew-sec': 0.5, 'poll-sec': POLL_SEC})
    num_refusing = 5 if num_jobs == 1000 else 1
    storm = Storm(service.address, pool, 20, num_refusing, seed=num_jobs, num_done=lambda: done(url))
    outages = []
    try:
        for share in (0.3, 0.6):
            storm.run_until(share * num_jobs)
            outages.append(restart(service.kill, service.start) if share < 0.5 else restart(postgres.kill, postgres.start))
        storm.run_until(num_jobs)
    finally:
        storm.stop()
        service.kill()
    attempts = rows(url, 'select job, epoch, ending, node, extract(epoch from started)::float8 as started, '
                         'extract(epoch from last_sign)::float8 as last_sign from attempt order by job, epoch')  # fmt: skip
    by_job = {}
    for attempt in attempts:
        by_job.setdefault(attempt['job'], []).append(attempt)
    assert len(by_job) == num_jobs
    hand_overs = []
    for tries in by_job.values():
        assert [attempt['epoch'] for attempt in tries] == list(range(1, len(tries) + 1))
        assert {attempt['ending'] for attempt in tries[:-1]} <= {'lost', 'recipe'}
        assert tries[-1]['ending'] == 'done'
        for lost, following in pairwise(tries):
            if lost['ending'] == 'recipe':
                continue
            assert following['started'] > lost['last_sign']
            outage = sum(max(0, min(end, following['started']) - max(start, lost['last_sign'])) for start, end in outages)
            hand_overs.append(following['started'] - lost['last_sign'] - outage)
    print(f'{num_jobs} done, {len(attempts)} claims, {storm.num_kills} kills, {storm.num_stops} stops, '
          f'hand-over {median(hand_overs):.2f} s in the middle, {max(hand_overs):.2f} s at most, {storm.seconds:.0f} s')  # fmt: skip
    assert storm.num_kills >= num_jobs / 20
    assert storm.num_stops >= num_jobs / 40
    assert len(hand_overs) >= num_jobs / 50
    assert median(hand_overs) <= LEASE_SEC + POLL_SEC + MARGIN_SEC  # the longest also says how busy this machine is
    # Each machine that answered 64 to everything is out, after a few jobs of which none has failed.
    refusing = rows(
        url,
        "select state, (select count(*) from attempt where node = name and ending = 'recipe') as num from node where starts_with(name, 'refusing-')",
    )
    assert [row['state'] for row in refusing] == ['quarantined'] * num_refusing
    print('jobs refused by each machine that refuses all:', sorted(row['num'] for row in refusing))
    # The bill is the sum of the attempts, and every result belongs to the attempt that is said to have made it.
    spent = rows(url, 'select spent_dollars from owner')[0]['spent_dollars']
    assert spent == pytest.approx(sum(attempt['last_sign'] - attempt['started'] for attempt in attempts) / 3600 * 0.324)
    for job in rows(url, 'select id, epoch, results from job'):
        assert job['results']['epoch'] == job['epoch'] == len(by_job[job['id']])


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_ten_thousand_jobs_through_the_api_are_drained_by_two_hundred_machines(postgres, s3, monkeypatch):
    """Submitted as `fleet submit` does, a seed and a caption each; on the way 20 machines are killed, and the service once."""
    num_jobs, num_machines, lease_sec = 10_000, 200, 15.0
    logging.getLogger('werkzeug').setLevel(logging.ERROR)
    monkeypatch.setenv('S3_ENDPOINT_URL', f'http://127.0.0.1:{s3.proxy.target_port}')
    from fleet.client.http import FleetClient
    from fleet.client.submission import submit_jobs
    from fleet.queue.database import connected

    url = new_database(postgres)
    with connected(url) as connection:
        owner, pool = add_owner(connection, 'owner', max_queued=num_jobs), add_pool(connection)
    service = Service(url, **{'lease-sec': lease_sec, 'renew-sec': 3, 'poll-sec': 2})
    photos = {'url': 's3://bucket/fleet/owners/owner/inputs/photos.tar', 'sha256': '0' * 64, 'bytes': 0}
    jobs = [
        {'recipe': RECIPE, 'name': f'job-{number}', 'inputs': {'subject': photos}, 'limits': {'losses': 1000},
         'overrides': {'seed': number, 'data.streams.subject.photos.caption': f'a photo of dog {number}'}}
        for number in range(num_jobs)
    ]  # fmt: skip
    began = time.monotonic()
    ids = submit_jobs(FleetClient(service.address, owner), jobs, '', lambda line: None)
    submitted = time.monotonic()
    assert len(set(ids)) == num_jobs
    machines = {storm_worker.fork(service.address, pool, f'machine-{number}', 30, checkpoints=()) for number in range(num_machines)}
    killed, outages = set(), []
    try:
        while (num := done(url)) < num_jobs:
            if len(killed) < 20 and num > 400 * (len(killed) + 1):
                killed.add(machine := (machines - killed).pop())
                os.kill(machine, signal.SIGKILL)
            if not outages and num > num_jobs / 2:
                outages.append(restart(service.kill, service.start))
            time.sleep(0.5)
        drained = time.monotonic()
    finally:
        for machine in machines:
            os.kill(machine, signal.SIGKILL)
            os.waitpid(machine, 0)
        service.kill()
    attempts = rows(url, 'select job::text, epoch, ending, extract(epoch from last_sign - started)::float8 as sec from attempt order by job, epoch')
    endings = {}
    for attempt in attempts:
        endings.setdefault(attempt['job'], []).append(attempt['ending'])
    assert endings.keys() == set(ids)
    assert all(tries[-1] == 'done' and set(tries[:-1]) <= {'lost'} for tries in endings.values())
    for job in rows(url, 'select id::text, name, epoch, results, spec from job'):
        assert job['results']['epoch'] == job['epoch'] == len(endings[job['id']])
        assert job['name'] == f'job-{job["spec"]["overrides"]["seed"]}'
    assert rows(url, 'select spent_dollars from owner')[0]['spent_dollars'] == pytest.approx(sum(a['sec'] for a in attempts) / 3600 * 0.324)
    print(f'{num_jobs:,} jobs: submitted in {submitted - began:.0f} s, drained by {num_machines} machines in {drained - submitted:.0f} s, '
          f'{len(attempts):,} claims, {len(killed)} machines killed')  # fmt: skip


def done(url):
    with suppress(Exception):  # during an outage
        return rows(url, "select count(*) as num from job where state = 'done'")[0]['num']
    return 0


def restart(kill, start):
    began = time.time()
    kill()
    time.sleep(0.5)
    start()
    return began, time.time() + POLL_SEC


class Storm:
    """Keeps `num_workers` machines alive, and kills or stops one of them for every few jobs that are done, however fast this machine is. The first
    ones refuse every job and are left alone."""

    def __init__(self, address, pool, num_workers, num_refusing, seed, num_done):
        self.address, self.pool, self.rng, self.num_done = address, pool, random.Random(seed), num_done
        self.num_kills = self.num_stops = self.num_started = 0
        self.machines: dict[int, str] = {}
        self.resume_at: dict[int, float] = {}
        self.killed: set[int] = set()
        self.num_workers, self.began = num_workers, time.monotonic()
        for number in range(num_refusing):
            self.machines[storm_worker.fork(address, pool, f'refusing-{number}', idle_sec=60, refuses=True)] = 'refusing'
        self.seconds = 0.0

    def run_until(self, wanted):
        while (num := self.num_done()) < wanted:
            self.keep()
            time.sleep(0.1)
            others = (machine for machine, name in self.machines.items() if name != 'refusing')
            idle = [machine for machine in others if machine not in self.resume_at and machine not in self.killed]
            if idle and self.num_kills + self.num_stops < ACCIDENTS_A_JOB * num + 5:
                machine = self.rng.choice(idle)
                if self.rng.random() < 0.75:
                    os.kill(machine, signal.SIGKILL)
                    self.killed.add(machine)
                    self.num_kills += 1
                else:
                    os.kill(machine, signal.SIGSTOP)
                    self.resume_at[machine] = time.monotonic() + LEASE_SEC * self.rng.uniform(1.2, 2)
                    self.num_stops += 1
        self.seconds = time.monotonic() - self.began

    def keep(self):
        for machine in [machine for machine, when in self.resume_at.items() if when < time.monotonic()]:
            os.kill(machine, signal.SIGCONT)
            del self.resume_at[machine]
        for machine in list(self.machines):
            ended, status = os.waitpid(machine, os.WNOHANG)
            if ended:
                assert status in (0, signal.SIGKILL), status
                self.machines.pop(machine)
                self.killed.discard(machine)
        while len(self.machines) < self.num_workers:
            self.num_started += 1
            name = f'machine-{self.num_started}'
            self.machines[storm_worker.fork(self.address, self.pool, name)] = name

    def stop(self):
        for machine in self.machines:
            os.kill(machine, signal.SIGKILL)
            os.waitpid(machine, 0)
