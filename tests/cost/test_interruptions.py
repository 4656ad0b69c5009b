"""Interruptions and ways to pay: the exact model against its first order and against a simulation of events, one at a time."""

import dataclasses
import math
import random

import numpy as np
import pytest

from diffusion.cost.bill import InterruptedRun, Interruptions, PaymentPlan, PlanError, expected_stretch, payment_plan
from diffusion.cost.formulas import hours, overhead
from diffusion.cost.prices import Price, Prices, load_prices

NEVER = Interruptions(math.inf, 1800, 0, 0)


def price(dollars, name='gpu_hour.h100.on-demand'):
    return Price(name, dollars, 'GPU-hour', 'now', 'me')


def job(useful_hours=100.0, num_gpus=8, faults=NEVER):
    return InterruptedRun(((useful_hours, faults),), num_gpus)


def one_run_sec(work_sec, faults, between_sec, rng):
    """An event at a time, in plain Python."""
    wall = paid = saved = 0.0
    starting = 0.0
    while True:
        fails_after, clock = rng.expovariate(1 / between_sec), starting
        while clock + faults.interval_sec + faults.save_sec <= fails_after and saved < work_sec:
            clock += faults.interval_sec + faults.save_sec
            saved += faults.interval_sec
        if saved >= work_sec:
            return wall + clock, paid + clock
        wall += fails_after + faults.wait_sec
        paid += fails_after
        starting = faults.restart_sec


@pytest.mark.parametrize(('between_hours', 'restart_sec', 'wait_sec'), [(2.0, 600, 0), (0.7, 300, 900), (20.0, 60, 3600)])
def test_the_expectation_is_the_mean_of_events_one_by_one(between_hours, restart_sec, wait_sec):
    faults = Interruptions(between_hours * 3600, 1200, 60, restart_sec, wait_sec)
    run, rng = job(20.0, 8, faults), random.Random(1)
    events = np.array([one_run_sec(20 * 3600, faults, between_hours * 3600, rng) for _ in range(4000)]) / 3600
    for mean, sample in ((run.wall_hours, events[:, 0]), (run.paid_hours, events[:, 1])):
        assert abs(sample.mean() - mean) < 4 * sample.std() / math.sqrt(len(sample))


def test_the_first_order_is_the_limit_of_rare_failures():
    assert expected_stretch(1800, 30, math.inf, 600) == pytest.approx(1 + 30 / 1800, rel=1e-15)
    for between_sec, tolerance in ((1e5, 0.05), (1e6, 0.006), (1e7, 0.0006)):
        exact, first = expected_stretch(1800, 30, between_sec, 300, 300) - 1, overhead(1800, 30, between_sec, 300, 300)
        assert exact == pytest.approx(first, rel=tolerance)
        assert exact > first


def test_stretch_by_hand():
    """M = tau + C = R: e (e - 1) M / tau."""
    assert expected_stretch(900, 100, 1000, 600, 400) == pytest.approx(math.e * (math.e - 1) * 1000 / 900, rel=1e-14)
    assert expected_stretch(np.array([900.0, 1800.0]), 100, np.array([1000.0, math.inf]), 600, 400) == pytest.approx(
        [math.e * (math.e - 1) * 1000 / 900, 1900 / 1800]
    )


def test_a_run_that_never_ends_is_refused():
    with pytest.raises(PlanError, match='such a run never ends; save more often'):
        _ = job(10, 1000, Interruptions(3.6, 3600, 10, 60)).wall_hours
    with pytest.raises(PlanError, match='a save takes 300 s: save less often'):
        _ = job(10, 8, Interruptions(30.0, 2, 300, 60)).wall_hours


def test_a_run_that_mostly_saves_ends():
    """Two seconds of steps, then 300 of a save: 151 times as long without failures, which come every 6,250 hours."""
    assert job(10, 8, Interruptions(50_000.0 / 8 * 3600, 2, 300, 60)).wall_hours == pytest.approx(10 * 151, rel=1e-4)


def test_spot_that_is_never_interrupted_costs_its_price_ratio():
    on_demand, spot = PaymentPlan(price(4.0)).dollars(job()), PaymentPlan(price(1.0), is_spot=True).dollars(job())
    assert on_demand == 100 * 8 * 4.0
    assert spot == on_demand / 4
    assert job().wall_hours == 100


def test_spot_pays_when_its_discount_is_larger_than_what_it_loses():
    """Break-even: price ratio = ratio of stretches."""
    calm = Interruptions(50_000 / 64 * 3600, 1800, 30, 600)
    taken = dataclasses.replace(calm, between_sec=1 / (1 / 50_000 + 1 / 100) / 64 * 3600, wait_sec=1800)
    ratio = taken.paid_stretch / calm.paid_stretch
    even = PaymentPlan(price(4.0 / ratio), is_spot=True).dollars(job(100, 64, taken))
    assert even == pytest.approx(PaymentPlan(price(4.0)).dollars(job(100, 64, calm)))
    assert taken.wall_stretch > taken.paid_stretch  # waiting costs time and no money
    assert calm.wall_stretch == calm.paid_stretch


def test_you_pay_for_what_you_reserved():
    plan = PaymentPlan(price(3.0), price(5.0), 120)
    assert plan.dollars(job(100)) == 120 * 8 * 3.0
    assert plan.dollars(job(150)) == 8 * (120 * 3.0 + 30 * 5.0)
    assert PaymentPlan(price(3.0), price(5.0), 120, taken_over_share=0.5).dollars(job(100)) == 110 * 8 * 3.0
    assert PaymentPlan(price(3.0), price(5.0)).dollars(job(100)) == 120 * 8 * 3.0  # five whole days
    draws = plan.dollars(job(np.array([100.0, 150.0])))
    assert list(draws) == [120 * 8 * 3.0, 8 * (120 * 3.0 + 30 * 5.0)]


def test_a_prices_name_says_how_it_is_paid():
    prices = load_prices()
    spot, flat = prices['gpu_hour.h100.spot'], prices['gpu_hour.a100-40gb.flat']
    assert (payment_plan(spot, prices), payment_plan(flat, prices)) == (PaymentPlan(spot, is_spot=True), PaymentPlan(flat))
    assert payment_plan(prices['gpu_hour.a100-80gb.reserved-1y'], prices).reserved_hours == 8760
    assert payment_plan(price(2.0, 'gpu_hour.x.reserved-3y'), Prices({'gpu_hour.x.on-demand': price(3.0)})).reserved_hours == 3 * 8760
    with pytest.raises(PlanError, match=r'beyond the reservation\? add gpu_hour\.x\.on-demand'):
        payment_plan(price(2.0, 'gpu_hour.x.reserved-3y'), prices)
    block = prices['gpu_hour.h100.capacity-block']
    assert payment_plan(block, prices) == PaymentPlan(block, block, None)  # whole days
    with pytest.raises(PlanError, match='for how long'):
        payment_plan(price(2.0, 'gpu_hour.x.reserved'), prices)


def test_more_gpus_at_lower_efficiency_never_cost_fewer_gpu_hours():
    """Of steps, and of steps with faults: more GPUs meet more failures."""
    rng = random.Random(7)
    for _ in range(200):
        num_gpus, rate = rng.choice((1, 8, 32, 100)), rng.uniform(1, 1000)
        more, efficiency = rng.randint(1, 16), rng.uniform(0.2, 1.0)
        faults = Interruptions(rng.uniform(500, 1e5) * 3600 / num_gpus, rng.uniform(60, 7200), rng.uniform(0, 60), rng.uniform(0, 900))
        few = job(hours(1e6, rate), num_gpus, faults)
        many = job(hours(1e6, rate * more * efficiency), num_gpus * more, dataclasses.replace(faults, between_sec=faults.between_sec / more))
        assert many.useful_hours * many.num_gpus >= few.useful_hours * few.num_gpus * (1 - 1e-12)
        assert many.paid_hours * many.num_gpus >= few.paid_hours * few.num_gpus * (1 - 1e-12)
