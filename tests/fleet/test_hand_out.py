"""Who gets which job, each rule by itself and all of them against a brute force that sorts nothing."""

import random

import pytest

from tests.fleet.making import ban, job, node, owner
from tests.fleet.reference import choose

NOW = 1000.0
IMAGE = 'sha256:1'


def chosen(jobs, asking=None, bans=(), owners=None):
    owners = owners or [owner(name) for name in {one.owner for one in jobs}]
    found = choose(asking or node(), jobs, bans, {one.name: one for one in owners}, NOW)
    return found and found.id


@pytest.mark.parametrize('state', ['leased', 'done', 'failed', 'cancelled'])
def test_only_queued_jobs_are_handed_out(state):
    assert chosen([job('a', state=state)]) is None
    assert chosen([job('a', state=state), job('b', number=1)]) == 'b'


@pytest.mark.parametrize(('not_before', 'expected'), [(NOW - 1, 'a'), (NOW, 'a'), (NOW + 0.001, None)])
def test_a_job_waits_for_its_time(not_before, expected):
    assert chosen([job('a', not_before=not_before)]) == expected


@pytest.mark.parametrize(
    ('banned', 'expected'),
    [
        (ban('a', 'n', until=NOW + 1), None),
        (ban('a', 'n', until=NOW), 'a'),
        (ban('a', 'other', until=NOW + 1), 'a'),
        (ban('b', 'n', until=NOW + 1), 'a'),
    ],
)
def test_a_ban_is_of_one_job_one_machine_and_a_time(banned, expected):
    assert chosen([job('a')], bans=[banned]) == expected


@pytest.mark.parametrize('state', ['draining', 'quarantined', 'gone'])
def test_only_live_machines_get_jobs(state):
    assert chosen([job('a')], node(state=state)) is None


@pytest.mark.parametrize(
    ('needs', 'machine', 'expected'),
    [
        ({'gpu_gb': 24}, {'gpu_gb': 24.0}, 'a'),
        ({'gpu_gb': 24.1}, {'gpu_gb': 24.0}, None),
        ({'image': IMAGE}, {'image': IMAGE}, 'a'),
        ({'image': IMAGE}, {'image': 'sha256:2'}, None),
        ({}, {'image': IMAGE}, 'a'),
        ({'trusted': True}, {'trusted': True}, 'a'),
        ({'trusted': True}, {}, None),
        ({}, {'trusted': True}, 'a'),
    ],
)
def test_the_machine_has_what_the_job_needs(needs, machine, expected):
    assert chosen([job('a', needs=needs)], node(**machine)) == expected


@pytest.mark.parametrize(
    ('limits', 'expected'),
    [
        ({'max_leased': 2, 'num_leased': 1}, 'a'),
        ({'max_leased': 2, 'num_leased': 2}, None),
        ({'dollars_left': 0.0}, None),
        ({'dollars_left': 0.01}, 'a'),
    ],
)
def test_an_owner_has_limits(limits, expected):
    assert chosen([job('a')], owners=[owner(**limits)]) == expected


def test_what_has_begun_goes_first_whoever_owns_it():
    jobs = [job('fresh', 'small', number=0, priority=9), job('begun', 'big', number=1, epoch=1)]
    assert chosen(jobs, owners=[owner('small'), owner('big', num_leased=5)]) == 'begun'


def test_the_owner_with_the_fewest_leases_is_next_whatever_the_priority():
    jobs = [job('a', 'big', number=0, priority=9), job('b', 'small', number=1)]
    assert chosen(jobs, owners=[owner('big', num_leased=2), owner('small', num_leased=1)]) == 'b'


def test_priority_counts_among_the_jobs_of_one_owner():
    jobs = [job('a', 'one', number=0), job('b', 'one', number=1, priority=2), job('c', 'two', number=2, priority=3)]
    assert chosen(jobs) == 'b'  # of `one`; its jobs were submitted before those of `two`, whose priority says nothing about others
    assert chosen(jobs[:1] + jobs[2:]) == 'a'


def test_with_one_machine_two_owners_take_turns():
    jobs = [job(f'{name}{i}', name, number=i + 100 * (name == 'b')) for name in 'ab' for i in range(4)]
    last, got = {'a': 0.0, 'b': 0.0}, []
    for time in range(1, 9):
        got.append(chosen(jobs, owners=[owner(name, last_leased=last[name]) for name in 'ab']))
        last[got[-1][0]] = float(time)
        jobs = [one for one in jobs if one.id != got[-1]]
    assert got == ['a0', 'b0', 'a1', 'b1', 'a2', 'b2', 'a3', 'b3']


def beats(first, second, owners):
    """Whether the first of two jobs that may both be taken goes before the second; None: not directly comparable."""
    if (first.epoch > 0) != (second.epoch > 0):
        return first.epoch > 0
    if first.owner == second.owner:
        return first.priority > second.priority if first.priority != second.priority else first.number < second.number
    one, other = owners[first.owner], owners[second.owner]
    if one.num_leased != other.num_leased:
        return one.num_leased < other.num_leased
    return one.last_leased < other.last_leased if one.last_leased != other.last_leased else None


@pytest.mark.parametrize('seed', range(60))
def test_against_a_brute_force(seed):
    draw = random.Random(seed)
    owners = {name: owner(name, draw.choice([0, 2, 5]), draw.randrange(3), draw.choice([0.0, 1.0, 1.0]), draw.choice([0.0, 5.0])) for name in 'abc'}
    jobs = [
        job(str(i), draw.choice('abc'), i, draw.choice(['queued', 'queued', 'leased', 'done']), needs={'gpu_gb': draw.choice([0, 0, 48])},
            priority=draw.randrange(3), not_before=draw.choice([0.0, 0.0, 2000.0]), epoch=draw.choice([0, 0, 0, 1]))
        for i in range(draw.randrange(25))
    ]  # fmt: skip
    bans = [ban(draw.choice(jobs).id, draw.choice('nm'), until=draw.choice([500.0, 2000.0])) for _ in range(12) if jobs]
    possible = [
        one for one in jobs
        if one.state == 'queued' and one.not_before <= NOW and one.needs.gpu_gb <= 24 and owners[one.owner].dollars_left > 0
        and owners[one.owner].num_leased < owners[one.owner].max_leased
        and not [1 for each in bans if (each.job, each.node) == (one.id, 'n') and each.until > NOW]
    ]  # fmt: skip
    shuffled = draw.sample(jobs, len(jobs))
    found = choose(node(), shuffled, bans, owners, NOW)
    assert (found in possible) if possible else found is None
    assert not any(beats(other, found, owners) for other in possible if other is not found)
