"""The last job, which every machine has failed, does not wait for a person."""

import pytest

from fleet.policies.hand_out import stranded
from tests.fleet.making import DAY, ban, job, node

BOTH = [ban(node='a', since=100.0, until=DAY), ban(node='b', since=400.0, until=DAY)]


def found(now, bans=BOTH, nodes='ab', jobs=None, **states):
    rows = [node(name, states.get(name, 'live')) for name in nodes]
    return [(one.job.id, one.lift and one.lift.node) for one in stranded(jobs or [job()], rows, bans, now)]


@pytest.mark.parametrize(('now', 'lifted'), [(400.0, None), (1299.0, None), (1300.0, 'a')])
def test_the_oldest_ban_is_lifted_a_quarter_of_an_hour_after_the_last_machine_was_banned(now, lifted):
    assert found(now) == [('j', lifted)]


def test_as_long_as_a_machine_may_take_it_nothing_happens():
    assert found(9000.0, nodes='abc') == []
    assert found(9000.0, BOTH[:1]) == []
    assert found(9000.0, nodes='abc', c='draining') == [('j', 'a')]
    assert found(9000.0, nodes='abc', c='gone') == [('j', 'a')]
    assert found(DAY, nodes='ab') == []  # bans that have lapsed
    assert found(9000.0, nodes='', jobs=[job()]) == []
    assert found(9000.0, jobs=[job(state='leased')]) == []
    assert found(9000.0, jobs=[job('other')]) == []


def test_machines_that_the_job_does_not_fit_cannot_save_it():
    rows = [node('a'), node('b'), node('small', gpu_gb=8.0)]
    [one] = stranded([job(needs={'gpu_gb': 16})], rows, BOTH, 9000.0)
    assert one.lift == BOTH[0]


def test_a_ban_of_a_machine_that_is_gone_is_not_lifted():
    bans = [ban(node='old', since=1.0, until=DAY), *BOTH]
    assert found(9000.0, bans) == [('j', 'a')]
