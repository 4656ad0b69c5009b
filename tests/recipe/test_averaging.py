import pytest

from diffusion.recipe import Duration, load_recipe
from diffusion.recipe.averaging import coverage, kept
from diffusion.recipe.schema import Ema
from tests.recipe.test_load import BASE, SYNTHETIC, errors_of


def averaged(half_life, start=0, interval=1):
    return Ema(half_life and Duration(f'{half_life}ba'), Duration(f'{start}ba'), Duration(f'{interval}ba'))


def test_the_half_life_is_edms():
    """EDM's training loop, an update a batch: beta = 0.5 ** (1 / min(half_life, 0.05 x batches so far)); ours is its integral."""
    expected = 1.0
    for batch in range(1000, 1500):
        expected *= 0.5 ** (1 / min(60, 0.05 * batch))
    assert kept(60, 1000, 1500) == pytest.approx(expected, rel=0.01)
    assert kept(60, 1000, 1200) * kept(60, 1200, 1500) == pytest.approx(kept(60, 1000, 1500), rel=1e-12)  # through the end of the ramp
    assert kept(60, 5000, 5060) == pytest.approx(0.5)


@pytest.mark.parametrize(('half_life', 'start', 'batches'), [(6931, 20, 50), (30, 100, 600), (50, 990, 1000), (6931, 500_000, 550_000)])
def test_coverage_adds_up_the_weights_of_the_batches(half_life, start, batches):
    """Against the sum of what each update brought in and later ones left."""
    covered = coverage(averaged(half_life, start), batches)
    assert covered.start_weight == pytest.approx(kept(half_life, start, batches))
    newest, first = 0.0, batches
    while newest < 0.9 and first > start:
        newest += (1 - kept(half_life, first - 1, first)) * kept(half_life, first, batches)
        first -= 1
    assert covered.batches == pytest.approx(batches - first, abs=1)
    assert covered.share_of_run == covered.batches / batches


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
