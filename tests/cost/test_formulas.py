import math

import pytest

from diffusion.cost.formulas import SD2_BASE, Phase, hours, run_hours
from diffusion.cost.throughput import ANYSCALE, MLPERF, MOSAICML_TWO_PHASE


def test_sample_counts_of_sd2_base():
    assert [phase.num_samples for phase in SD2_BASE] == [1_126_400_000, 1_740_800_000]


def test_an_amount_of_samples_in_words():
    amounts = [phase.amount for phase in (*SD2_BASE, Phase(256, 204_800_000), Phase(512, 999_999_999), Phase(64, 16_000))]
    assert amounts == [
        '1.13 billion samples at 256 px', '1.74 billion samples at 512 px', '204.8 million samples at 256 px', '1,000 million samples at 512 px',
        '16,000 samples at 64 px',
    ]  # fmt: skip


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
    assert ANYSCALE.hours(SD2_BASE) * ANYSCALE.num_gpus == pytest.approx(13_165, abs=1)
    assert ANYSCALE.dollars(SD2_BASE) == pytest.approx(67_405, rel=1e-4)


def test_formulas():
    assert hours(3600 * 50, 50) == 1
    assert run_hours(SD2_BASE, {256: 1e6, 512: 2e6}) == pytest.approx((1_126_400_000 / 1e6 + 1_740_800_000 / 2e6) / 3600)


def test_a_row_without_a_price_has_no_dollars():
    assert MLPERF[0].hours(SD2_BASE[1:]) == pytest.approx(1_740_800_000 / 580 / 3600)
    with pytest.raises(ValueError, match='Dell names no price'):
        MLPERF[0].dollars(SD2_BASE[1:])
