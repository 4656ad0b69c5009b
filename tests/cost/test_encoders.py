"""Encoders next to training: how many keep up, what travels, what they cost, and where the images/s of one come from."""

import numpy as np
import pytest

from diffusion import check
from diffusion.cost.assumptions import draw_all, load_assumptions
from diffusion.cost.encoders import encoder_of, encoder_row, num_that_keep_up, online_fleet, priced_encoder, rate_of_gpu
from diffusion.cost.formulas import median
from diffusion.cost.hardware import PEAK_FLOPS
from diffusion.cost.prices import load_prices
from diffusion.cost.throughput import A10G_FLOP, A10G_IMAGES_PER_SEC
from diffusion.recipe import RecipeError
from diffusion.recipe.schema import Cost, RayEncoders
from tests.cost.test_facts import PHASE_1, facts_of

VAE_256, VAE_512 = 272_722_165_760, 1_116_658_466_816
ON_A10G = ['data.kind=images', 'data.encoders={ray: {actors: 8, resource: A10G}}']


def assumed(*overrides):
    return draw_all(load_assumptions(overrides=overrides))


def fleet(images_per_sec, *overrides, assume=()):
    facts, prices = facts_of(PHASE_1, *ON_A10G, *overrides), load_prices()
    encoder = encoder_of(facts, assumed(*assume), prices, prices['gpu_hour.a100-80gb'], 'a100-80gb')
    return online_fleet(facts, images_per_sec, encoder, assumed(*assume))


def of_100_a_sec(images_per_sec, *overrides):
    return fleet(images_per_sec, *overrides, assume=['online.images_per_encoder_sec=100'])


def test_as_many_encoders_as_keep_up_and_no_fewer():
    assert num_that_keep_up(1000, 100) == 10
    assert num_that_keep_up(1001, 100) == 11
    assert num_that_keep_up(1000, 100, headroom=0.1) == 11  # not 12 by an error of rounding
    rates = [of_100_a_sec(1000, f'data.encoders.ray.actors={num}').images_per_sec for num in (1, 9, 10, 40)]
    assert rates == [100, 900, 1000, 1000]


def test_figure_6_of_anyscale():
    """32 A100 with 40 A10G."""
    one, training = A10G_IMAGES_PER_SEC, 4068
    assert num_that_keep_up(training, one) == 40
    assert num_that_keep_up(5908, one) == 59  # with FSDP and compilation


def test_published_flop_are_those_that_are_counted():
    encoders = facts_of().counts.encoders
    assert pytest.approx(encoders.vae_flop + encoders.text_flop, rel=1e-4) == A10G_FLOP
    assert A10G_IMAGES_PER_SEC * A10G_FLOP / PEAK_FLOPS['a10g'] == pytest.approx(0.46, abs=0.005)


def test_traffic_of_a_sample():
    def sizes(*overrides):
        found = fleet(1000, *overrides, assume=['preparation.bytes_per_image=33000'])
        return found.out_bytes, found.back_bytes

    assert sizes() == (196_608, 32_768)
    assert sizes('data.encoders.ray.send=bytes', 'data.encoders.ray.moments=float16') == (33_000, 16_384)


def test_a_rate_is_assumed_or_published_or_scaled():
    sd2 = assumed('encoding.256.images_per_gpu_sec=170')

    def rate(gpu, px=256, flop=VAE_256):
        return rate_of_gpu(gpu, 'a100-80gb', px, flop, sd2)

    assert (rate('a100-80gb').how, rate('a100-80gb').note, rate('a100-80gb').images_per_sec) == ('assumed', 'encoding.256.images_per_gpu_sec', 170)
    assert rate('a10g').images_per_sec == pytest.approx(101.7 * 317.85 / 272.72, rel=1e-4)
    assert (rate('a10g').how, rate('a10g').amount) == ('assumed', '120')
    with_text = rate('a10g', flop=A10G_FLOP)
    assert (with_text.how, with_text.amount) == ('published', '102')
    assert rate('a10g', 512, VAE_512).images_per_sec == pytest.approx(28.95, abs=0.01)
    assert rate('h100').images_per_sec == pytest.approx(170 * 989 / 312)
    assert 'by peak FLOP/s' in rate('h100').note
    assert rate('gpu-of-nobody') is rate(None) is None


def test_a_measured_rate_counts_on_any_machine_but_not_for_encoding_beforehand():
    measured = ['online.images_per_encoder_sec=3']
    on_cores = fleet(60, 'data.encoders.ray.gpus=0', 'data.encoders.ray.resource=null', assume=measured)
    assert (on_cores.encoder.gpu, on_cores.num_needed) == ('CPU', 22)
    prices = load_prices()
    beforehand = encoder_of(facts_of(), assumed(*measured), prices, prices['gpu_hour.a100-80gb'], 'a100-80gb')
    assert beforehand.rate.note == 'encoding.256.images_per_gpu_sec'


def test_the_price_of_an_encoder_is_the_recipe_s_or_that_of_its_gpu():
    prices = load_prices()
    assert priced_encoder(RayEncoders(resource='A10G', gpus=0.5), Cost(), prices) == ('a10g', prices['gpu_hour.a10g.on-demand'], 0.5)
    assert priced_encoder(RayEncoders(resource='accelerator_type:A10G'), Cost(), prices)[0] == 'a10g'
    gpu, price, units = priced_encoder(RayEncoders(resource='A10G', gpus=0.5), Cost(price_per_encoder_hour=0.4), prices)
    assert (gpu, price.dollars, units) == ('a10g', 0.4, 1.0)
    assert priced_encoder(RayEncoders(resource='rack7'), Cost(), prices) == (None, None, 1.0)
    assert priced_encoder(RayEncoders(resource='A10G', gpus=0), Cost(), prices)[1] is None  # cores of that machine

    bill = encoder_row(RayEncoders(actors=8, resource='A10G', gpus=0.5), Cost(), 7200)
    assert bill.dollars == pytest.approx(8 * 2 * 0.5 * 1.212)
    assert encoder_row(RayEncoders(actors=8), Cost(), 7200).price is None


def test_a_price_of_encoders_that_are_not_there_is_refused():
    with pytest.raises(RecipeError, match=r'cost\.price_per_encoder_hour: has no effect without data\.encoders'):
        facts_of(PHASE_1, 'cost.price_per_encoder_hour=1')
    assert facts_of(PHASE_1, *ON_A10G, 'cost.price_per_encoder_hour=1').recipe.cost.price_per_encoder_hour == 1


def test_a_recipe_without_a_resource_encodes_on_the_gpu_that_is_assumed():
    found = fleet(500, 'data.encoders.ray.resource=null', 'data.encoders.ray.gpus=0.5', assume=['encoding.256.images_per_gpu_sec=170'])
    assert (found.encoder.gpu, found.encoder.rate.images_per_sec) == ('a100-80gb', 85)
    assert (found.encoder.price.name, found.encoder.units) == ('gpu_hour.a100-80gb.flat', 0.5)


def test_too_few_encoders_are_warned_of():
    found = of_100_a_sec(2000)
    assert (found.num_needed, found.images_per_sec, found.speed) == (22, 800, 0.4)
    assert found.mb_per_sec == (pytest.approx(800 * 0.196608), pytest.approx(800 * 0.032768))
    assert found.warnings('run') == [
        'run: 8 encoders are too few: training would run at about 40 % of its speed (given); set data.encoders.ray.actors=22'
    ]
    assert '8 on a10g; 22 keep up with 2,000 images/s of training (predicted) at 100 images/s each (given: online.images_per_encoder_sec)' in str(
        found
    )
    assert of_100_a_sec(800).warnings('run') == []


def test_what_is_not_known_is_said():
    found = fleet(2000, 'data.encoders.ray.gpus=0', 'data.encoders.ray.resource=null')
    assert (found.num_needed, found.speed) == (None, 1)
    assert 'nobody has measured one' in str(found)
    (warning,) = found.warnings('run')
    assert 'not in the bill: give cost.price_per_encoder_hour' in warning


def test_the_gpu_of_training_has_no_vae_in_its_step():
    in_step, elsewhere = facts_of(PHASE_1, 'data.kind=images'), facts_of(PHASE_1, *ON_A10G)
    assert (in_step.encodes_images, elsewhere.encodes_images, facts_of().online) == (True, False, None)
    assert in_step.encoder_flop - elsewhere.encoder_flop == VAE_256


def test_check_says_how_many_keep_up():
    (line,), (warning,) = check.encoders_of(facts_of(PHASE_1, *ON_A10G).recipe, 32)
    assert line.startswith('encoders: 8 on a10g; ')
    assert '(predicted)' in line
    assert '120 images/s each (assumed' in line
    assert 'MB/s out (pixels)' in line
    assert 'training would run at about' in warning
    (line,), warnings = check.encoders_of(facts_of(PHASE_1, *ON_A10G, 'cost.gpu=null', 'cost.price_per_gpu_hour=null').recipe, 32)
    assert 'not predicted: cost.gpu names no GPU' in line
    assert warnings == []
    assert check.encoders_of(facts_of().recipe, 32) == ([], [])


def test_draws_stay_draws():
    found = of_100_a_sec(np.linspace(900, 1100, 50))
    assert found.num_needed == 11
    assert np.all(np.asarray(found.images_per_sec) == 800)
    assert median(found.mb_per_sec[1]) == pytest.approx(800 * 0.032768)
