"""Slow machines are found by the median of others."""

import pytest

from fleet.policies.limits import reference_speed, why_slow
from fleet.policies.rows import Ending
from tests.fleet.making import attempt, job


def peers(num, speed=0.5, **fields):
    return [attempt(1, f'peer{i}', fields.pop('ending', Ending.DONE), job=f'p{i}', steps_per_sec=speed, **fields) for i in range(num)]


def running(speed, sec=180.0, steps=(0, 50)):
    return attempt(1, 'slow', sec=sec, steps=steps, steps_per_sec=speed)


def test_the_median_of_at_least_20_others_with_the_same_recipe_and_gpu():
    me = running(0.1)
    assert reference_speed(me, peers(19)) is None
    assert reference_speed(me, peers(20)) == 0.5
    assert reference_speed(me, [*peers(19), *peers(5, gpu='h100'), *peers(5, recipe='other'), attempt(1, 'x')]) is None
    assert reference_speed(me, [*peers(19), *[attempt(i, 'slow', Ending.DONE, job=f's{i}', steps_per_sec=9.0) for i in range(9)]]) is None
    speeds = [1.0] * 10 + [2.0] * 10 + [100.0] * 9  # the tail does not move it
    assert reference_speed(me, [attempt(1, f'q{i}', Ending.DONE, steps_per_sec=speed) for i, speed in enumerate(speeds)]) == 2.0


def test_a_machine_has_one_voice():
    """One that begins many attempts and boasts would otherwise make all others leave."""
    boasts = [attempt(i, 'boaster', Ending.DONE, job=f'b{i}', steps_per_sec=1e6) for i in range(100)]
    assert reference_speed(running(0.5), [*peers(5), *boasts]) == 0.5


@pytest.mark.parametrize('ending', [None, Ending.RELEASED, Ending.CRASHED])
def test_only_machines_that_finished_the_job_are_believed(ending):
    """25 invented machines that claimed 1e6 steps/s got an honest one drained."""
    boasts = [attempt(1, f'invented{i}', ending, job=f'b{i}', steps_per_sec=1e6) for i in range(25)]
    assert reference_speed(running(0.5), boasts) is None
    assert reference_speed(running(0.5), [*peers(20), *boasts]) == 0.5


@pytest.mark.parametrize(
    ('attempted', 'now', 'is_slow'),
    [
        (running(0.249), 180.0, True),
        (running(0.25), 180.0, False),
        (running(0.249), 179.0, False),
        (running(0.249, steps=(0, 140)), 10.0, True),  # 10 % of 1,400
        (running(0.249, steps=(0, 139)), 10.0, False),
        (running(0.249, steps=(700, 839)), 10.0, False),  # of this attempt
        (running(None), 999.0, False),
    ],
)
def test_below_half_after_three_minutes_or_a_tenth_of_the_job(attempted, now, is_slow):
    reason = why_slow(attempted, job(num_steps=1400), 0.5, now)
    assert bool(reason) == is_slow
    assert not is_slow or ('slow makes 0.249 steps/s' in reason and '0.5: below 0.5 of it' in reason)
    assert why_slow(attempted, job(num_steps=1400), None, now) is None


def test_a_job_of_unknown_length_is_looked_at_after_three_minutes():
    assert why_slow(running(0.1, steps=(0, 9999)), job(), 0.5, 100.0) is None
    assert why_slow(running(0.1), job(), 0.5, 180.0)
