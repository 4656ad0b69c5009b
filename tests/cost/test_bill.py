"""The bill: published totals, every line by hand, and what must hold whatever is assumed."""

import dataclasses
import json
import math
import random

import numpy as np
import pytest

from diffusion.cost.assumptions import draw_all, load_assumptions
from diffusion.cost.bill import PlanError, TrainingJob, TrainingPhase, make_bill, ways_to_pay
from diffusion.cost.encoders import PricedEncoder
from diffusion.cost.formulas import ONLINE_FACTOR, SD2_BASE, Phase, median, quantiles
from diffusion.cost.prices import load_prices
from diffusion.cost.text import bill_table, groups_table, plans_table
from diffusion.cost.throughput import MOSAICML_TWO_PHASE

# Numbers that make each line easy to work out; nothing is uncertain.
BY_HAND = [
    'preparation={num_images: 1e6, kept_share: 0.5, downloaded_share: 0.8, bytes_per_image: 1e5, urls_per_machine_hour: 1e5, images_per_machine_hour: 4e4}',
    'encoding.256={num_images: 1e6, images_per_gpu_sec: 100, gpu: gpu_hour.a10g.on-demand}',
    'encoding.512={num_images: 5e5, images_per_gpu_sec: 25, gpu: null}',
    'storage={crawl_months: 1, image_shard_months: 2, latent_months: 3, checkpoint_months: 10}',
    'network={shard_bytes: 1e7, downloads_per_epoch: 2, egress: egress_gb.s3-internet}',
    'faults={gpu_hours_between_failures: 1e12, save_sec: 0, restart_sec: 0, notice_sec: 0, gpu_hours_between_interruptions: 100, wait_sec: 0}',
    'work={evaluation_share: 0.01, experiments_share: 0.5, taken_over_share: 0, person_months: 2}',
]


def phases(kind='latents'):
    rates, sizes = {256: 1000.0, 512: 400.0}, {256: 20_000, 512: 60_000}
    return tuple(
        TrainingPhase(f'phase-{size}', Phase(size, num), rates[size], 'measured', sizes[size], 1e10, 4, 1800, 50_000, kind)
        for size, num in ((256, 7_200_000), (512, 2_880_000))
    )


def assumed(overrides=(), num_draws=4000):
    return draw_all(load_assumptions(overrides=overrides), num_draws)


def bill(overrides=(), kind='latents', price='gpu_hour.h200.on-demand', job=None, num_draws=4000):
    prices = load_prices()
    return make_bill(job or TrainingJob(phases(kind), 8), assumed(overrides, num_draws), prices, prices[price])


def by_name(bill):
    assert len({line.what for line in bill.rows}) == len(bill.rows)
    return {line.what: line for line in bill.rows}


def test_every_line_by_hand():
    found = bill(BY_HAND)
    expected = {  # quantity, dollars each
        'download': (1e6 / 0.5 / 0.8 / 1e5, 0.68),
        'convert to shards': (2e6 / 4e4, 0.68),
        'encode 256 px': (1e6 / 100 / 3600, 1.212),
        'encode 512 px': (5e5 / 25 / 3600, 2.00),
        'training, phase-256': (2 * 8, 2.00),  # 7.2 million at 1000/s are 2 hours
        'training, phase-512': (2 * 8, 2.00),
        'saves, failures and restarts': (0, 2.00),
        'evaluation and samples': (0.32, 2.00),
        'experiments and failed runs': (16, 2.00),
        'store the crawl': (0.2 * 1, 23),  # 2 million of 100 kB
        'store image shards': (0.1 * 2, 23),
        'store latents of 256 px': (0.02 * 3, 23),
        'store latents of 512 px': (0.03 * 3, 23),
        'store checkpoints, phase-256': (0.04 * 10, 23),
        'store checkpoints, phase-512': (0.04 * 10, 23),
        'PUT requests': ((1e11 + 2e10 + 3e10) / 1e7 / 1000, 0.005),
        # Encoding reads the image shards once, 7.2 epochs of 20 GB and 5.76 of 30 GB are fetched twice.
        'GET requests': ((1e11 + 2 * 7.2 * 2e10 + 2 * 5.76 * 3e10) / 1e7 / 1000, 0.0004),
        'egress': (100 + 2 * 7.2 * 20 + 2 * 5.76 * 30, 0.09),
        'people': (2, 15_000),
    }
    lines = by_name(found)
    assert list(lines) == list(expected)
    for name, (quantity, dollars) in expected.items():
        assert lines[name].quantity == pytest.approx(quantity, rel=1e-6, abs=1e-5), name
        assert lines[name].price.dollars == dollars, name
    assert found.dollars == pytest.approx(sum(quantity * dollars for quantity, dollars in expected.values()), rel=1e-6)
    assert found.wall_hours == pytest.approx(4 * 1.01)
    assert found.gpu_hours == pytest.approx(32 + 0.32 + 16 + 1e6 / 100 / 3600 + 5e5 / 25 / 3600, rel=1e-6)


def published_job(num_gpus):
    row = next(row for row in MOSAICML_TWO_PHASE if row.num_gpus == num_gpus)
    made = [
        TrainingPhase(f'sd2-base-{part.resolution}', part, row.images_per_sec[part.resolution], row.source, 16_500, 1e10, 3, 1800, 5e4)
        for part in SD2_BASE
    ]
    return TrainingJob(tuple(made), num_gpus)


def test_training_with_the_published_encoding():
    """mosaicml/diffusion: 790 million images took 3,784 A100-hours, for both sizes at once; 128 GPUs: $41,443 = 20,721 A100-hours = 6.745 days of 128."""
    rate = 790e6 / 3784 / 3600
    once = ['encoding.256.num_images=790e6', f'encoding.256.images_per_gpu_sec={rate!r}', 'encoding.512.num_images=0', 'encoding.256.gpu=null']
    found = bill(once, job=published_job(128), price='gpu_hour.a100-40gb.flat')
    dollars = found.of('steps') + found.of('encoding')
    assert dollars == pytest.approx(41_443, abs=1)
    assert dollars / 2 == pytest.approx(20_721, abs=1)
    assert dollars / 2 / 128 / 24 == pytest.approx(6.745, abs=0.001)
    assert found.of('steps') * ONLINE_FACTOR == pytest.approx(47_425, abs=1)


def test_encoders_next_to_training_are_paid_for_all_of_its_time():
    """2 hours of steps, 1 % of evaluation and no failures; 10 encoders of half an A10G each."""
    fed = dataclasses.replace(phases('images')[0], encoder=PricedEncoder('a10g', None, load_prices()['gpu_hour.a10g'], 0.5), num_encoders=10)
    found = bill(BY_HAND, job=TrainingJob((fed, phases('images')[1]), 8))
    line = by_name(found)['encoders, phase-256']
    assert (line.group, line.price.dollars) == ('encoding', 1.212)
    assert line.quantity == pytest.approx(2 * 1.01 * 10 * 0.5, rel=1e-6)
    assert line.dollars == pytest.approx(found.of('encoding'))
    failing = bill([*BY_HAND, 'faults.gpu_hours_between_failures=100', 'faults.notice_sec=600'], job=TrainingJob((fed,), 8))
    assert by_name(failing)['encoders, phase-256'].quantity > 1.01 * line.quantity
    unpriced = dataclasses.replace(fed, encoder=PricedEncoder('CPU', None, None))
    assert not bill(BY_HAND, job=TrainingJob((unpriced,), 8)).of('encoding')


def test_the_total_is_the_sum_of_the_lines_whatever_is_assumed():
    rng, prices = random.Random(5), load_prices()
    offers = ['gpu_hour.a100-80gb.on-demand', 'gpu_hour.a100-80gb.reserved-1y', 'gpu_hour.a100-80gb.spot', 'gpu_hour.h200.capacity-block']
    for _ in range(25):
        overrides = [
            f'encoding.256.images_per_gpu_sec={[low := rng.uniform(50, 300), low * rng.uniform(1, 2)]}',
            f'storage.latent_months={rng.uniform(0, 12)}',
            f'work.experiments_share={rng.uniform(0, 2)}',
            f'network.downloads_per_epoch={rng.randint(1, 4)}',
            f'faults.save_sec={rng.uniform(0, 60)}',
        ]
        found = bill(overrides, kind=rng.choice(('latents', 'images', 'synthetic')), price=rng.choice(offers), num_draws=200)
        total = sum(np.asarray(line.quantity) * line.price.dollars for line in found.rows)
        assert np.allclose(found.dollars, total, rtol=1e-12)
        assert sum(found.share(line.dollars) for line in found.rows) == pytest.approx(1)
        assert all(np.all(np.asarray(line.quantity) >= -1e-9) for line in found.rows)
        assert all(line.price.date and line.price.source for line in found.rows)
        p10, p50, p90 = quantiles(found.dollars)
        assert p10 <= p50 <= p90
        assert all(json.loads(json.dumps(line.values))['formula'] for line in found.rows)
        assert prices  # read once


def test_what_kind_of_data_decides_which_lines_there_are():
    assert not [name for name in by_name(bill(kind='images')) if 'latents' in name or 'encode' in name]
    synthetic = set(by_name(bill(kind='synthetic')))
    assert synthetic == {'training, phase-256', 'training, phase-512', 'saves, failures and restarts', 'evaluation and samples',
                         'experiments and failed runs', 'store checkpoints, phase-256', 'store checkpoints, phase-512', 'people'}  # fmt: skip
    there = by_name(bill(['preparation.downloaded_share=null']))
    assert not {'download', 'store the crawl'} & set(there)
    twice = TrainingJob((phases()[0], dataclasses.replace(phases()[0], name='again')), 8)
    assert [line.what for line in bill(job=twice).rows].count('encode 256 px') == 1


def test_reservations_are_paid_whether_used_or_not():
    certain = [*BY_HAND, 'encoding.512.gpu=gpu_hour.a10g.on-demand']
    found = by_name(bill(certain, price='gpu_hour.a100-80gb.reserved-1y'))
    used = 32 + 0.32 + 16
    assert found['reserved, not used'].quantity == pytest.approx(8 * 8760 - used, rel=1e-9)
    assert found['beyond the reservation'].quantity == 0
    total = sum(line.dollars for line in found.values() if line.price.name == 'gpu_hour.a100-80gb.reserved-1y')
    assert total == pytest.approx(8 * 8760 * 3.0012)
    assert by_name(bill([*certain, 'work.taken_over_share=1'], price='gpu_hour.a100-80gb.reserved-1y'))['reserved, not used'].quantity == 0


def test_what_outlasts_a_reservation_is_on_demand():
    long = TrainingJob((dataclasses.replace(phases()[0], phase=Phase(256, 7_200_000 * 6000)),), 8)  # 12,000 hours of 8,760 reserved
    certain = [*BY_HAND, 'work={evaluation_share: 0, experiments_share: 0}']
    found = bill(certain, price='gpu_hour.a100-80gb.reserved-1y', job=long)
    lines = by_name(found)
    assert lines['reserved, not used'].quantity == 0
    assert lines['beyond the reservation'].price.dollars == pytest.approx(5.12 - 3.0012)
    gpu_dollars = sum(lines[name].dollars for name in ('training, phase-256', 'saves, failures and restarts', 'beyond the reservation'))
    assert gpu_dollars == pytest.approx(8 * (8760 * 3.0012 + (12_000 - 8760) * 5.12), rel=1e-6)
    used = sum(line.quantity for name, line in lines.items() if line.price.unit == 'GPU-hour' and name != 'beyond the reservation')
    assert found.gpu_hours == pytest.approx(used)  # those beyond are counted once


def test_plans_side_by_side():
    prices, job = load_prices(), published_job(128)
    by_offer = {row.price.offer: row for row in ways_to_pay(job, assumed(), prices, prices.plans('a100-80gb').values())}
    assert list(by_offer) == ['on-demand', 'reserved-1y', 'flat', 'spot']
    assert median(by_offer['on-demand'].dollars) == pytest.approx(median(by_offer['flat'].dollars) * 5.12 / 2)
    assert median(by_offer['flat'].dollars) > 33_874  # the steps alone
    assert by_offer['reserved-1y'].dollars == pytest.approx(128 * 8760 * 3.0012)
    assert np.all(by_offer['spot'].quantity > by_offer['flat'].quantity)
    hopeless = assumed(['faults.gpu_hours_between_interruptions=1'])
    rows = ways_to_pay(job, hopeless, prices, prices.plans('a100-80gb').values())
    assert (rows[-1].quantity, 'never ends' in rows[-1].formula) == (None, True)
    assert 'never ends' in plans_table(rows)
    with pytest.raises(PlanError, match='never ends'):
        make_bill(job, hopeless, prices, prices['gpu_hour.a100-80gb.spot'])


def test_interruptions_of_a_spot_market_are_added_to_the_failures():
    """Rates of Poisson processes add up; there is a wait for machines on spot alone."""
    prices, often = load_prices(), assumed(['faults={gpu_hours_between_failures: 50_000, gpu_hours_between_interruptions: 100, wait_sec: 1800}'])
    for offer, gpu_hours_between, wait_sec in (('spot', 1 / (1 / 50_000 + 1 / 100), 1800), ('on-demand', 50_000, 0)):
        parts = TrainingJob(phases(), 8).interrupted(often, prices[f'gpu_hour.h200.{offer}'])
        assert [(part.between_sec, part.wait_sec) for part in parts] == [(pytest.approx(gpu_hours_between * 3600 / 8), wait_sec)] * 2


def test_failures_come_from_the_recipe_unless_assumed():
    rare, often = (bill([f'faults.gpu_hours_between_failures={value}']) for value in ('null', 100))
    assert median(by_name(often)['saves, failures and restarts'].quantity) > median(by_name(rare)['saves, failures and restarts'].quantity)
    assert 'a failure every 6,250 h' in by_name(rare)['saves, failures and restarts'].formula  # 50,000 / 8


def test_saves_failures_and_restarts_by_hand():
    """8 GPUs that fail every 80 hours each: M = 10 h; tau = 1800 s, C = 30 s, R = 200 s, D = 100 s."""
    found = bill([*BY_HAND, 'faults={gpu_hours_between_failures: 80, save_sec: 30, restart_sec: 200, notice_sec: 100}'])
    stretch = 36_000 / 1800 * math.exp(300 / 36_000) * (math.exp(1830 / 36_000) - 1)
    assert by_name(found)['saves, failures and restarts'].quantity == pytest.approx(32 * (stretch - 1), rel=1e-9)
    assert found.wall_hours == pytest.approx(4 * (stretch + 0.01), rel=1e-9)


def test_a_resolution_that_nothing_is_assumed_of():
    odd = TrainingJob((dataclasses.replace(phases()[0], phase=Phase(64, 1000)),), 1)
    found = bill(job=odd)
    assert 'data' not in found.groups
    assert 'encoding' not in found.groups
    assert {line.what for line in found.rows if line.group == 'storage'} == {'store checkpoints, phase-256'}
    assert by_name(found)['GET requests'].quantity == 1000 * 20_000 / 67_108_864 / 1000  # what training reads is known
    [missing] = found.not_counted
    assert missing.startswith('phase-256: its images, their encoding and their storage, for nothing is assumed of how many there are of 64 px')
    assert '--assume preparation.num_images=N' in missing
    both = bill(job=TrainingJob((*odd.phases, phases()[1]), 1))
    assert {'download', 'encode 512 px', 'store latents of 512 px'} <= set(by_name(both))
    assert 'encode 64 px' not in by_name(both)
    assert both.not_counted[0].startswith('phase-256: encoding and storage of its latents, for nothing')
    assert not bill().not_counted


@pytest.mark.parametrize(
    ('num_bytes', 'save_bytes', 'save_sec'), [(67e6, '10e9', 0.201), (10.39e9, '10e9', 30), (41e9, '10e9', 30), (67e6, 'null', 30)]
)
def test_small_checkpoints_take_their_share_of_a_save(num_bytes, save_bytes, save_sec):
    job = TrainingJob((dataclasses.replace(phases()[0], checkpoint_bytes=num_bytes),), 8)
    [part] = job.interrupted(assumed(['faults.save_sec=30', f'faults.save_bytes={save_bytes}']), load_prices()['gpu_hour.h200.on-demand'])
    assert part.save_sec == pytest.approx(save_sec, rel=1e-12)


def test_more_latents_than_images_are_refused():
    with pytest.raises(PlanError, match='encoding.512.num_images is 500,000, more than the 1,000 images of preparation.num_images'):
        bill([*BY_HAND, 'preparation.num_images=1000', 'encoding.256.num_images=null'])


def test_saves_that_take_longer_than_the_steps_are_warned_of():
    often = TrainingJob((dataclasses.replace(phases()[0], save_interval_sec=0.2),), 8)
    [warning] = bill([*BY_HAND, 'faults.save_sec=30'], job=often).warnings
    assert warning.startswith('phase-256: a save takes 30 s, longer than the 0.2 s of steps between two (measured images/s): save less often')
    assert not bill().warnings


def test_the_printed_bill():
    found = bill(BY_HAND)
    table = bill_table(found)
    assert table.splitlines()[0].split('|')[1].strip() == 'what'
    assert table.splitlines()[-1].startswith('| total')
    assert f'${float(found.dollars):,.0f}' in table.splitlines()[-1]
    stored = sum(line.dollars for line in found.rows if line.group == 'storage')
    assert f'${stored:,.0f}' in groups_table(found).partition('| storage ')[2].partition('\n')[0]
    assert 'p90' not in table
    assert 'p90' in bill_table(bill())
    formula = by_name(found)['training, phase-256'].formula
    assert formula.startswith('7,200,000 samples / 1,000 images/s (measured) / 3600 x 8 GPUs')
