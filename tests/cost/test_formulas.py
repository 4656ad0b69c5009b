import math

import pytest

from diffusion.cost.formulas import SD2_BASE, dollars, gpu_hours, hours
from diffusion.cost.published import ANYSCALE, MOSAICML_TWO_PHASE


def test_sample_counts_of_sd2_base():
    assert [phase.num_samples for phase in SD2_BASE] == [1_126_400_000, 1_740_800_000]


@pytest.mark.parametrize(
    ('num_gpus', 'published_days', 'published_dollars'),
    [(8, 81.33, 31_230), (16, 40.42, 31_043), (32, 20.06, 30_805), (64, 10.14, 31_146), (128, 5.51, 33_874)],
)
def test_the_published_two_phase_table(num_gpus, published_days, published_dollars):
    """mosaicml/diffusion README; the printed dollars are rounded down, the days to two digits."""
    row = next(row for row in MOSAICML_TWO_PHASE if row.num_gpus == num_gpus)
    assert row.hours(SD2_BASE) / 24 == pytest.approx(published_days, rel=7e-4)
    assert math.floor(row.dollars(SD2_BASE)) == published_dollars


def test_anyscales_total():
    """Table 4: 13,165 A100-hours, $67,405 on demand."""
    assert ANYSCALE.gpu_hours(SD2_BASE) == pytest.approx(13_165, abs=1)
    assert ANYSCALE.dollars(SD2_BASE) == pytest.approx(67_405, rel=1e-4)


def test_formulas():
    assert hours(3600 * 50, 50) == 1
    assert dollars(gpu_hours(2, 8), 1.5) == 24
