"""Hours and dollars of jobs, budgets of owners."""

import pytest

from fleet.policies.limits import hours_left, may_lease, spent, why_stopped
from fleet.policies.rows import Ending
from tests.fleet.making import attempt, job, owner

HOUR = 3600.0


def test_golden_of_the_post():
    hours, dollars = spent(job(), [attempt(1, 'a', Ending.DONE, sec=62.01 * 60, price=0.324)])
    assert hours == pytest.approx(62.01 / 60)
    assert dollars == pytest.approx(0.3348, abs=1e-4)


def test_all_attempts_count_each_at_its_price():
    rows = [attempt(1, 'a', Ending.LOST, sec=HOUR, price=0.5), attempt(2, 'b', None, started=9999.0, sec=HOUR / 2, price=1.0)]
    assert spent(job(), rows) == (1.5, 1.0)
    assert spent(job(forgiven=1), rows) == (0.5, 0.5)
    assert hours_left(job(limits={'hours': 2.0, 'dollars': 9.0}), rows, 1.0) == 0.5
    assert hours_left(job(limits={'hours': 9.0, 'dollars': 1.25}), rows, 0.5) == 0.5
    assert hours_left(job(limits={'hours': 9.0, 'dollars': 1.25}), rows, 0.0) == 7.5
    assert hours_left(job(limits={'hours': 1.0}), rows, 1.0) == 0.0


@pytest.mark.parametrize(
    ('limits', 'left', 'said'),
    [
        ({'hours': 2.0, 'dollars': 2.0}, 5.0, None),
        ({'hours': 1.0, 'dollars': 2.0}, 5.0, 'limits.hours is 1'),
        ({'hours': 2.0, 'dollars': 0.5}, 5.0, 'limits.dollars is 0.5'),
        ({'hours': 2.0, 'dollars': 2.0}, 0.0, 'the budget of o is spent'),
        ({'hours': 1.0, 'dollars': 2.0}, 0.0, 'limits.hours'),
    ],
)
def test_a_running_attempt_stops_at_the_job_s_limit_or_without_money(limits, left, said):
    reason = why_stopped(job(limits=limits), [attempt(1, 'a', sec=HOUR, price=0.5)], owner(dollars_left=left))
    assert (reason is None) == (said is None)
    assert (said or '') in (reason or '')


@pytest.mark.parametrize(('fields', 'may'), [({}, True), ({'num_leased': 10}, False), ({'num_leased': 9}, True), ({'dollars_left': -0.1}, False)])
def test_leases_of_an_owner(fields, may):
    assert may_lease(owner(**fields)) == may
