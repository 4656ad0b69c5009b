"""Ways to encode side by side, against the second table of the Anyscale post."""

import dataclasses
import json
from functools import cache

import pytest

from diffusion.cost.assumptions import draw_all, load_assumptions
from diffusion.cost.encoders import PricedEncoder
from diffusion.cost.encoding import IN_STEP, OFFLINE, ONLINE, encoding_ways, ways_json
from diffusion.cost.encoding_rates import EncodingRate
from diffusion.cost.formulas import ONLINE_FACTOR
from diffusion.cost.prices import load_prices
from diffusion.cost.published import ANYSCALE_ENCODING
from diffusion.cost.text import encoding_table, encoding_text
from tests.cost.test_facts import PHASE_1, facts_of

EPOCH = 550_000 * 2048  # samples of the first phase: images of the post's epoch
PRICES = load_prices()
WITHOUT_STORAGE = ['storage.latent_months=0', 'online.headroom=0']


@cache
def phase_1(*overrides):
    """Read once: what changes in the tree while the tests run would otherwise come between two totals that are compared."""
    return facts_of(PHASE_1, *overrides)


def ways(images_per_sec, *overrides, one=ANYSCALE_ENCODING.images_per_sec, num_images=EPOCH, assume=WITHOUT_STORAGE, **of_facts):
    """32 A100 of the post, and A10G that encode."""
    facts = dataclasses.replace(phase_1(*overrides), num_images=num_images, **of_facts)
    encoder = PricedEncoder('a10g', one and EncodingRate(one, 'published', ANYSCALE_ENCODING.source), PRICES['gpu_hour.a10g.on-demand'])
    price, assumed = PRICES['gpu_hour.a100-80gb.on-demand'], draw_all(load_assumptions(overrides=assume))
    return encoding_ways(facts, images_per_sec, 32, encoder, price, assumed, PRICES)


def test_table_2_of_anyscale():
    """Published: 76.9 h and $14,753 offline, 76.8 h and $16,275 online with 40; the baseline, which is blank there, by its percentages."""
    found = ways(4068)
    in_step, online = found.way(IN_STEP), found.way(ONLINE)
    assert online.num_encoders == 40
    assert online.training_hours == pytest.approx(76.8, rel=0.0025)
    assert online.dollars == pytest.approx(16_275, rel=0.005)  # our hours are 76.915; the source's own are 0.2 % below its rate
    assert in_step.training_hours == pytest.approx(111.3, rel=0.015)  # our assumption by FLOP
    assert in_step.dollars == pytest.approx(18_187, rel=0.02)
    offline = ways(4068, one=EPOCH / (2183 / 1.212) / 3600).way(OFFLINE)
    assert offline.encoder_dollars == pytest.approx(2183)
    assert offline.training_hours == pytest.approx(76.9, rel=0.0025)
    assert offline.dollars == pytest.approx(14_753, rel=0.0025)


def test_offline_is_cheaper_from_the_second_epoch_on():
    """At the same rate and without storage one epoch costs the same; the images/s of training and the price of its GPUs do not matter."""
    one_epoch, two_epochs = ways(4068), ways(4068, num_images=EPOCH // 2)
    assert one_epoch.way(OFFLINE).dollars == pytest.approx(one_epoch.way(ONLINE).dollars)
    assert two_epochs.way(OFFLINE).dollars < two_epochs.way(ONLINE).dollars
    assert two_epochs.cheapest.name == OFFLINE
    assert two_epochs.offline_from(ONLINE) == ways(2034, num_images=EPOCH // 5).offline_from(ONLINE) == 2
    kept_long = ways(4068, num_images=EPOCH // 2, assume=['storage.latent_months=12'])
    assert kept_long.offline_from(ONLINE) == 3  # 12 months of storage cost more than one epoch of encoding


@pytest.mark.parametrize('other', [IN_STEP, ONLINE])
@pytest.mark.parametrize('one', [30, 101.7, 400])
def test_the_epoch_is_where_the_totals_cross(other, one):
    overrides = ['storage.latent_months=6', 'online.headroom=0']

    def saves(epochs):
        found = ways(4068, one=one, num_images=EPOCH / epochs, assume=overrides)
        return found.way(other).dollars - found.way(OFFLINE).dollars

    epoch = ways(4068, one=one, num_images=EPOCH / 4, assume=overrides).offline_from(other)
    totals = {number: saves(number) for number in range(1, 6)}  # by a dollar and more: no rounding decides
    assert all(total > 1 if number >= epoch else total < -1 for number, total in totals.items()), (epoch, totals)


def test_images_in_the_step_are_where_the_others_start_from():
    """Measured with the VAE in the step, training from latents is faster by the same factor; the other way round it is slower."""
    measured = ways(2806, 'data.kind=images')
    assert measured.way(IN_STEP).images_per_sec == 2806
    assert measured.way(OFFLINE).images_per_sec == pytest.approx(2806 * measured.stretch)
    again = ways(2806 * measured.stretch)
    assert [way.dollars for way in again.ways] == pytest.approx([way.dollars for way in measured.ways])


def test_fewer_encoders_than_keep_up_make_training_longer():
    found = ways(4068, 'data.kind=images', 'data.encoders={ray: {actors: 20, resource: A10G}}')
    online = found.way(ONLINE)
    assert (online.num_encoders, online.images_per_sec) == (20, pytest.approx(2034))
    assert online.training_dollars == pytest.approx(2 * found.way(OFFLINE).training_dollars)
    assert online.encoder_hours == pytest.approx(ways(4068).way(ONLINE).encoder_hours)


def test_what_is_not_known():
    counts = dataclasses.replace(facts_of().counts, encoders=None)
    assert ways(4068, counts=counts).stretch == ONLINE_FACTOR
    assert ways(4068, 'data.kind=synthetic') is None
    unknown = ways(4068, one=None)
    assert [way.name for way in unknown.ways] == [IN_STEP]
    assert 'images/s are not known' in encoding_text([unknown], 0.1)[0]


def test_the_table_and_the_json():
    found = ways(4068)
    table = encoding_table([found, found])
    assert '40 a10g' in table
    assert table.count('together') == 3
    assert all(len(line) <= 120 for line in table.splitlines())
    text = ' '.join(encoding_text([found], 0.1))
    assert '102 images/s (published: Anyscale' in text
    assert '1.47 times as long (assumed' in text
    parsed = json.loads(json.dumps(ways_json([found])))[0]
    assert parsed['cheapest'] == found.cheapest.name
    assert [way['name'] for way in parsed['ways']] == [IN_STEP, ONLINE, OFFLINE]
    assert parsed['ways'][1]['num_encoders'] == [40, 40, 40]
