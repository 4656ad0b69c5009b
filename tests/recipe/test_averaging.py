import math

import numpy as np
import pytest

from diffusion.recipe import Duration, load_recipe
from diffusion.recipe.averaging import RAMP, Profile, coverage, sigma_rel_of
from diffusion.recipe.schema import Ema
from tests.recipe.test_load import BASE, SYNTHETIC, errors_of


def averaged(half_life, start=0, interval=1):
    return Ema(half_life=half_life and Duration(f'{half_life}ba'), start=Duration(f'{start}ba'), interval=Duration(f'{interval}ba'))


def test_the_half_life_is_edms():
    """EDM's training loop, an update a batch: beta = 0.5 ** (1 / min(half_life, 0.05 x batches so far)); ours is its integral."""
    expected = 1.0
    for batch in range(1000, 1500):
        expected *= 0.5 ** (1 / min(60, 0.05 * batch))
    assert Profile.of_half_life(60).kept(1000, 1500) == pytest.approx(expected, rel=0.01)
    assert Profile.of_half_life(60).kept(1000, 1200) * Profile.of_half_life(60).kept(1200, 1500) == pytest.approx(
        Profile.of_half_life(60).kept(1000, 1500), rel=1e-12
    )  # through the end of the ramp
    assert Profile.of_half_life(60).kept(5000, 5060) == pytest.approx(0.5)


@pytest.mark.parametrize(('half_life', 'start', 'batches'), [(6931, 20, 50), (30, 100, 600), (50, 990, 1000), (6931, 500_000, 550_000)])
def test_coverage_adds_up_the_weights_of_the_batches(half_life, start, batches):
    """Against the sum of what each update brought in and later ones left."""
    covered = coverage(averaged(half_life, start), batches)
    assert covered.start_weight == pytest.approx(Profile.of_half_life(half_life).kept(start, batches))
    newest, first = 0.0, batches
    while newest < 0.9 and first > start:
        newest += (1 - Profile.of_half_life(half_life).kept(first - 1, first)) * Profile.of_half_life(half_life).kept(first, batches)
        first -= 1
    assert covered.batches == pytest.approx(batches - first, abs=1)
    assert covered.share_of_run == covered.batches / batches


def test_gamma_is_that_of_the_paper():
    """Its section 3.1 and its own code: the largest root of gamma^3 + 7 gamma^2 + (16 - 1/sigma^2) gamma + 12 - 1/sigma^2."""
    for sigma_rel, gamma in ((0.05, 16.97), (0.10, 6.94)):
        assert Profile.of_sigma_rel(sigma_rel).gamma == pytest.approx(gamma, abs=5e-3)
    for sigma_rel in (0.01, 0.05, 0.2, 0.28):
        root = np.roots([1, 7, 16 - sigma_rel**-2, 12 - sigma_rel**-2]).real.max()
        assert Profile.of_sigma_rel(sigma_rel).gamma == pytest.approx(root, rel=1e-9)
        assert sigma_rel_of(root) == pytest.approx(sigma_rel, rel=1e-9)
    steps = np.arange(1, 100_001) / 100_000  # the definition: the standard deviation of the profile over a run of length 1
    weights = steps ** Profile.of_sigma_rel(0.1).gamma / (steps ** Profile.of_sigma_rel(0.1).gamma).sum()
    assert np.sqrt((weights * steps**2).sum() - (weights * steps).sum() ** 2) == pytest.approx(0.1, rel=1e-3)


def test_from_batch_to_batch_it_is_edm2s_beta():
    profile = Profile.of_sigma_rel(0.05)
    for batch in (1, 2, 10, 1000):
        assert profile.kept(batch - 1, batch) == pytest.approx((1 - 1 / batch) ** (profile.gamma + 1), rel=1e-12)


def test_a_growing_half_life_is_a_power_function():
    """One formula for both: until the half-life has grown, its profile is that of a width of 0.063."""
    half_life, power = Profile.of_half_life(6931), Profile.of_sigma_rel(sigma_rel_of(math.log(2) / RAMP - 1))
    assert sigma_rel_of(power.gamma) == pytest.approx(0.063, abs=5e-4)
    assert half_life.kept(1000, 5000) == pytest.approx(power.kept(1000, 5000), rel=1e-9)


@pytest.mark.parametrize('batches', [400, 10_000])
def test_coverage_of_a_power_function(batches):
    ema = Ema(sigma_rel=[0.1, 0.05], start=Duration('0ba'), interval=Duration('4ba'))
    covered = coverage(ema, batches)
    assert covered.share_of_run == pytest.approx(1 - 0.1 ** (1 / 7.94), abs=0.01)
    assert covered.start_weight == pytest.approx((4 / batches) ** 7.94, rel=1e-3)


def test_there_may_be_no_average():
    assert coverage(averaged(None), 100) is None
    assert coverage(averaged(10, 50), 49) is None
    assert coverage(averaged(10, 50), 50).batches == 1
    assert coverage(averaged(10, 0, 7), 6) is None


def test_an_average_of_the_network_at_its_start_is_refused_with_a_half_life_that_fits():
    long = ['train.duration=100000ba', 'ema.start=99000ba']
    (error,) = errors_of(*long)
    assert error.startswith('ema.half_life: 6931ba is long for the 1,000 batches from ema.start to the end of the run: 87% of the average would be')
    assert error.endswith('set ema.half_life=250ba or ema.start=72276ba or ema.half_life=null')
    for remedy in ('ema.half_life=250ba', 'ema.start=72276ba', 'ema.half_life=null'):
        load_recipe(BASE, [*SYNTHETIC, *long, remedy])
    load_recipe(BASE, [*SYNTHETIC, 'train.duration=50ba', 'optimizer.warmup=10ba', 'ema.start=20ba'])  # a short run needs no other half-life


def test_power_functions_contradict_what_they_cannot_do():
    power = ['ema.half_life=null', 'ema.sigma_rel=[0.05,0.1]']
    load_recipe(BASE, [*SYNTHETIC, *power, 'ema.start=0ba'])
    for overrides, expected in (
        (['ema.sigma_rel=[0.05]', 'ema.start=0ba'], 'ema.sigma_rel: [0.05] next to ema.half_life=6931ba; set ema.half_life=null or ema.sigma_rel=[]'),
        (power, 'ema.start: 500000ba cuts off the power functions of ema.sigma_rel, which begin with the run; set ema.start=0ba'),
        (['ema.half_life=null', 'ema.sigma_rel=[0.1,0.1]', 'ema.start=0ba'], 'ema.sigma_rel: [0.1, 0.1] names a width twice'),
        (['ema.half_life=null', 'ema.sigma_rel=[0.4]', 'ema.start=0ba'], 'ema.sigma_rel'),
        ([*power, 'ema.start=0ba', 'ema.interval=500000ba'], 'ema.interval: 500000ba is long for a run of 550,000 batches'),
    ):
        assert any(error.startswith(expected) for error in errors_of(*overrides)), expected
