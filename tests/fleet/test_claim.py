"""The claim in SQL against the pure function that says whose turn it is, over random queues."""

import random

import pytest

from fleet.policies.rows import NodeState
from fleet.queue import leases, reading
from fleet.queue.database import connected
from fleet.queue.leases import LeaseSettings
from tests.fleet.fleet import add_jobs, add_owner, add_pool, new_database
from tests.fleet.reference import choose

NODES = {'small': (8, 'image-a', 'strangers'), 'large': (24, 'image-b', 'strangers'), 'own': (80, 'image-a', 'own')}
OWNERS = ('ann', 'bob', 'cem')


@pytest.fixture(scope='module')
def url(postgres):
    return new_database(postgres)


def fill(connection, rng):
    """Random owners, machines, jobs, leases, attempts and bans; returns the sessions of the machines."""
    connection.execute("insert into recipe values ('a.yaml', '1'), ('b.yaml', '2')")
    for pool in ('strangers', 'own'):
        add_pool(connection, pool, trusted=pool == 'own', price=rng.choice((0.3, 30)))
    for name in OWNERS:
        add_owner(connection, name, max_leased=rng.choice((0, 1, 2, 50)), budget_dollars=rng.choice((0.001, 0.5, 100)))
        connection.execute("update owner set last_leased = now() - %s * interval '1 second' where name = %s", [rng.randrange(3), name])
    sessions = {}
    for name, (gpu_gb, image, pool) in NODES.items():
        recipes = rng.choice(('{"a.yaml": "1", "b.yaml": "2"}', '{"a.yaml": "1", "b.yaml": "older"}'))
        connection.execute(
            "insert into node (name, pool, gpu, gpu_gb, image, recipes) values (%s, %s, 'fake', %s, %s, %s)", [name, pool, gpu_gb, image, recipes]
        )
        query = 'insert into session (node, token_hash, price_per_hour) select %s, %s, price_per_hour from pool where name = %s returning id'
        sessions[name] = connection.execute(query, [name, name.encode(), pool]).fetchone()['id']
    for _ in range(rng.randrange(14)):
        epoch = rng.choice((0, 0, 1, 2))
        add_jobs(
            connection, rng.choice(OWNERS), 1, priority=rng.choice((0, 0, 5)), epoch=epoch, gpu_gb=rng.choice((0, 8, 24)),
            image=rng.choice((None, None, 'image-a', 'image-b')), trusted=rng.random() < 0.2, recipe=rng.choice(('a.yaml', 'b.yaml')),
        )  # fmt: skip
    for row in connection.execute('select id, owner from job order by number').fetchall():
        state = rng.choice(('queued', 'queued', 'queued', 'leased', 'done', 'later'))
        if state == 'leased':
            node = rng.choice(('elsewhere-1', 'elsewhere-2'))
            connection.execute("insert into node (name, pool, gpu, gpu_gb) values (%s, 'own', 'fake', 8) on conflict do nothing", [node])
            session = connection.execute(
                'insert into session (node, token_hash, price_per_hour, ended) values (%s, %s, 30, now()) returning id', [node, rng.randbytes(9)]
            ).fetchone()['id']
            connection.execute(
                "update job set state = 'leased', node = %s, lease_until = now() + interval '1 minute', epoch = epoch + 1 where id = %s",
                [node, row['id']],
            )
            connection.execute(
                """insert into attempt (job, epoch, node, session, gpu, recipe, price_per_hour, first_step, last_step, started)
                select id, epoch, %s, %s, 'fake', recipe, 30, 0, 0, now() - %s * interval '1 second' from job where id = %s""",
                [node, session, rng.choice((1, 100)), row['id']],
            )
        elif state == 'done':
            connection.execute("update job set state = 'done', ended = now() where id = %s", [row['id']])
        elif state == 'later':
            connection.execute("update job set not_before = now() + interval '1 minute' where id = %s", [row['id']])
        for node in NODES:
            if rng.random() < 0.2:
                until = rng.choice((-1, 60))
                connection.execute(
                    "insert into ban (job, node, until, reason) values (%s, %s, now() + %s * interval '1 second', '')", [row['id'], node, until]
                )
    return sessions


@pytest.mark.parametrize('seed', range(60))
def test_the_claim_hands_out_what_the_policy_says(seed, url):
    rng = random.Random(seed)
    with connected(url) as connection:
        sessions = fill(connection, rng)
        for _ in range(4):
            name = rng.choice(list(NODES))
            node = reading.nodes(connection, 'n.name = %s', name)[0]
            if rng.random() < 0.1:
                connection.execute("update node set state = 'draining' where name = %s", [name])
                node = reading.nodes(connection, 'n.name = %s', name)[0]
                assert node.state is NodeState.DRAINING
            leases.take_back(connection, 'j.node = %s', name)  # as a claim does first
            owners = {owner.name: owner for owner in reading.owners(connection)}
            expected = choose(node, reading.jobs(connection, 'true'), reading.bans(connection), owners, reading.now(connection))
            got = leases.claim(connection, name, sessions[name], LeaseSettings())
            assert (None if got is None else str(got['id'])) == (None if expected is None else expected.id)
        connection.rollback()


def test_random_queues_are_handed_out_in_part(url):
    """Else the comparison above would compare nothing with nothing."""
    claims = [0, 0]
    for seed in range(20):
        rng = random.Random(seed)
        with connected(url) as connection:
            sessions = fill(connection, rng)
            for name in NODES:
                claims[leases.claim(connection, name, sessions[name], LeaseSettings()) is not None] += 1
            connection.rollback()
    assert min(claims) > 12
