"""Interruptions and ways to pay: the exact model against its first order and against a simulation of events, one at a time."""

import dataclasses
import math
import random

import numpy as np
import pytest

from diffusion.cost.bill import InterruptedWork, PlanError, expected_hours, payments, reserved
from diffusion.cost.formulas import hours, overhead
from diffusion.cost.prices import Price, Prices, load_prices

NEVER = InterruptedWork(100.0, math.inf, 1800, 0, 0)


def price(dollars, name='gpu_hour.h100.on-demand'):
    return Price(name, dollars, 'GPU-hour', 'now', 'me')


def dollars(work, at, reservation=None, num_gpus=8, taken_over_share=0.0):
    """Expected dollars of a run alone."""
    paid_hours, wall_hours = expected_hours([work], num_gpus)
    return sum(due * each.dollars for _, due, each in payments(reservation, at, paid_hours * num_gpus, wall_hours, num_gpus, taken_over_share))


def one_run_sec(work_sec, faults, rng):
    """An event at a time, in plain Python."""
    wall = paid = saved = 0.0
    starting = 0.0
    while True:
        fails_after, clock = rng.expovariate(1 / faults.between_sec), starting
        while clock + faults.interval_sec + faults.save_sec <= fails_after and saved < work_sec:
            clock += faults.interval_sec + faults.save_sec
            saved += faults.interval_sec
        if saved >= work_sec:
            return paid + clock, wall + clock
        wall += fails_after + faults.wait_sec
        paid += fails_after
        starting = faults.restart_sec


@pytest.mark.parametrize(('between_hours', 'restart_sec', 'wait_sec'), [(2.0, 600, 0), (0.7, 300, 900), (20.0, 60, 3600)])
def test_the_expectation_is_the_mean_of_events_one_by_one(between_hours, restart_sec, wait_sec):
    work, rng = InterruptedWork(20.0, between_hours * 3600, 1200, 60, restart_sec, wait_sec), random.Random(1)
    events = np.array([one_run_sec(20 * 3600, work, rng) for _ in range(4000)]) / 3600
    for mean, sample in zip(expected_hours([work], 8), events.T, strict=True):
        assert abs(sample.mean() - mean) < 4 * sample.std() / math.sqrt(len(sample))


def test_the_first_order_is_the_limit_of_rare_failures():
    assert InterruptedWork(1, math.inf, 1800, 30, 600).paid_stretch == pytest.approx(1 + 30 / 1800, rel=1e-15)
    for between_sec, tolerance in ((1e5, 0.05), (1e6, 0.006), (1e7, 0.0006)):
        exact, first = InterruptedWork(1, between_sec, 1800, 30, 600).paid_stretch - 1, overhead(1800, 30, between_sec, 300, 300)
        assert exact == pytest.approx(first, rel=tolerance)
        assert exact > first


def test_stretch_by_hand():
    """M = tau + C = R: e (e - 1) M / tau."""
    work = InterruptedWork(1, np.array([1000.0, math.inf]), np.array([900.0, 1800.0]), 100, 1000)
    assert work.paid_stretch == pytest.approx([math.e * (math.e - 1) * 1000 / 900, 1900 / 1800], rel=1e-14)


def test_a_run_that_never_ends_is_refused():
    with pytest.raises(PlanError, match='such a run never ends; save more often'):
        expected_hours([InterruptedWork(10, 3.6, 3600, 10, 60)], 1000)
    with pytest.raises(PlanError, match='a save takes 300 s: save less often'):
        expected_hours([NEVER, InterruptedWork(10, 30.0, 2, 300, 60)], 8)


def test_a_run_that_mostly_saves_ends():
    """Two seconds of steps, then 300 of a save: 151 times as long without failures, which come every 6,250 hours."""
    assert expected_hours([InterruptedWork(10, 50_000.0 / 8 * 3600, 2, 300, 60)], 8)[1] == pytest.approx(10 * 151, rel=1e-4)


def test_spot_pays_when_its_discount_is_larger_than_what_it_loses():
    """Break-even: price ratio = ratio of stretches."""
    calm = InterruptedWork(100.0, 50_000 / 64 * 3600, 1800, 30, 600)
    taken = dataclasses.replace(calm, between_sec=1 / (1 / 50_000 + 1 / 100) / 64 * 3600, wait_sec=1800)
    ratio = taken.paid_stretch / calm.paid_stretch
    assert dollars(taken, price(4.0 / ratio), num_gpus=64) == pytest.approx(dollars(calm, price(4.0), num_gpus=64))
    assert taken.wall_stretch > taken.paid_stretch  # waiting costs time and no money
    assert calm.wall_stretch == calm.paid_stretch
    assert dollars(NEVER, price(4.0)) == 100 * 8 * 4.0


def test_you_pay_for_what_you_reserved():
    own, beyond, longer = price(3.0), (120, price(5.0)), dataclasses.replace(NEVER, hours=150)
    assert dollars(NEVER, own, beyond) == 120 * 8 * 3.0
    assert dollars(longer, own, beyond) == 8 * (120 * 3.0 + 30 * 5.0)
    assert dollars(NEVER, own, beyond, taken_over_share=0.5) == 110 * 8 * 3.0
    assert dollars(NEVER, own, (None, price(5.0))) == 120 * 8 * 3.0  # five whole days
    draws = dollars(dataclasses.replace(NEVER, hours=np.array([100.0, 150.0])), own, beyond)
    assert list(draws) == [120 * 8 * 3.0, 8 * (120 * 3.0 + 30 * 5.0)]


def test_a_prices_name_says_how_it_is_paid():
    prices = load_prices()
    assert reserved(prices['gpu_hour.h100.spot'], prices) is reserved(prices['gpu_hour.a100-40gb.flat'], prices) is None
    assert reserved(prices['gpu_hour.a100-80gb.reserved-1y'], prices) == (8760, prices['gpu_hour.a100-80gb.on-demand'])
    assert reserved(price(2.0, 'gpu_hour.x.reserved-3y'), Prices({'gpu_hour.x.on-demand': price(3.0)})) == (3 * 8760, price(3.0))
    block = prices['gpu_hour.h100.capacity-block']
    assert reserved(block, prices) == (None, block)  # whole days
    with pytest.raises(PlanError, match=r'beyond the reservation\? add gpu_hour\.x\.on-demand'):
        reserved(price(2.0, 'gpu_hour.x.reserved-3y'), prices)
    with pytest.raises(PlanError, match='for how long'):
        reserved(price(2.0, 'gpu_hour.x.reserved'), prices)


def test_more_gpus_at_lower_efficiency_never_cost_fewer_gpu_hours():
    """Of steps, and of steps with faults: more GPUs meet more failures."""
    rng = random.Random(7)
    for _ in range(200):
        num_gpus, rate = rng.choice((1, 8, 32, 100)), rng.uniform(1, 1000)
        more, efficiency = rng.randint(1, 16), rng.uniform(0.2, 1.0)
        faults = rng.uniform(500, 1e5) * 3600 / num_gpus, rng.uniform(60, 7200), rng.uniform(0, 60), rng.uniform(0, 900)
        few = InterruptedWork(hours(1e6, rate), *faults)
        many = dataclasses.replace(few, hours=hours(1e6, rate * more * efficiency), between_sec=few.between_sec / more)
        assert many.hours * more >= few.hours * (1 - 1e-12)
        assert expected_hours([many], num_gpus * more)[0] * more >= expected_hours([few], num_gpus)[0] * (1 - 1e-12)
