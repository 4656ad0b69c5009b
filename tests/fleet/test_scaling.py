"""How many machines, and who may leave."""

import pytest

from fleet.policies.hand_out import ScalingLimits, nodes_to_drain, num_takeable, wanted_nodes
from tests.fleet.making import job, node, owner

LIMITS = ScalingLimits(max_nodes=40, wanted_hours=10.0)


@pytest.mark.parametrize(
    ('leased', 'takeable', 'stranded', 'live', 'hours', 'wanted'),
    [
        (0, 0, 0, 0, 0.0, 0),
        (3, 4, 0, 3, None, 7),
        (30, 970, 0, 30, None, 40),
        (30, 970, 0, 30, 1000.0, 40),
        (30, 970, 0, 30, 95.0, 10),
        (30, 970, 0, 30, 100.0, 10),
        (30, 970, 0, 30, 100.1, 11),
        (1, 0, 0, 1, 0.2, 1),
        (0, 1, 1, 2, 1.0, 3),  # two machines, both banned from the last job
        (40, 1, 1, 40, 900.0, 40),
    ],
)
def test_wanted(leased, takeable, stranded, live, hours, wanted):
    assert wanted_nodes(leased, takeable, stranded, live, hours, LIMITS) == wanted


def test_takeable_jobs_are_those_that_a_new_machine_could_take():
    owners = {'a': owner('a', max_leased=5, num_leased=3), 'b': owner('b', dollars_left=0.0), 'c': owner('c', max_leased=100)}
    jobs = [
        *[job(f'a{i}', 'a') for i in range(9)],  # 2 leases are left
        *[job(f'b{i}', 'b') for i in range(9)],  # no money
        *[job(f'c{i}', 'c') for i in range(4)],
        job('later', 'c', not_before=101.0), job('running', 'c', state='leased'), job('huge', 'c', needs={'gpu_gb': 80}),
    ]  # fmt: skip
    assert num_takeable(jobs, node(), owners, 100.0, enough=40) == 6
    assert num_takeable(jobs, node(), owners, 100.0, enough=5) == 5
    assert num_takeable(jobs, node(gpu_gb=80.0), owners, 101.0, enough=40) == 8


@pytest.mark.parametrize(('wanted', 'drained'), [(5, []), (4, []), (3, ['old']), (2, ['old', 'older']), (0, ['old', 'older'])])
def test_only_idle_machines_leave_and_the_longest_idle_first(wanted, drained):
    nodes = [node('busy'), node('young'), node('older'), node('old'), node('out', 'quarantined'), node('leaving', 'draining')]
    idle = {'young': 401.0, 'older': 200.0, 'old': 100.0, 'out': 1.0, 'leaving': 1.0}
    assert nodes_to_drain(nodes, idle, wanted, 1000.0, LIMITS) == drained


def test_a_fleet_without_work_is_gone_after_ten_minutes():
    nodes, idle = [node('a'), node('b')], {'a': 0.0, 'b': 60.0}
    assert [nodes_to_drain(nodes, idle, 0, now, LIMITS) for now in (599.0, 600.0, 660.0)] == [[], ['a'], ['a', 'b']]
