"""Units, draws and numbers in words; what the formulas make of published tables is in test_published.py."""

import numpy as np
import pytest

from diffusion.cost.formulas import (
    SD2_BASE,
    Phase,
    draw,
    hours,
    is_uncertain,
    median,
    quantiles,
    range_problem,
    run_hours,
    spread_text,
    two_digits,
)


def test_an_amount_of_samples_in_words():
    amounts = [phase.amount for phase in (*SD2_BASE, Phase(256, 204_800_000), Phase(512, 999_999_999), Phase(64, 16_000))]
    assert amounts == [
        '1.13 billion samples at 256 px', '1.74 billion samples at 512 px', '204.8 million samples at 256 px', '1,000 million samples at 512 px',
        '16,000 samples at 64 px',
    ]  # fmt: skip


def test_hours():
    assert hours(3600 * 50, 50) == 1
    assert run_hours(SD2_BASE, {256: 1e6, 512: 2e6}) == pytest.approx((1_126_400_000 / 1e6 + 1_740_800_000 / 2e6) / 3600)


def test_draws_have_the_quantiles_of_their_distributions():
    """Uniform: linear; triangular(0, 1, 4): F(x) = x^2 / 4 up to 1, then 1 - (4 - x)^2 / 12."""
    uniform, triangular = draw([2, 12], 'a'), draw([0, 1, 4], 'a')
    assert quantiles(uniform) == pytest.approx((3, 7, 11), abs=0.01)
    assert uniform.mean() == pytest.approx(7, rel=1e-9)
    assert uniform.var() == pytest.approx(100 / 12, rel=1e-3)
    assert quantiles(triangular) == pytest.approx((np.sqrt(0.4), 4 - np.sqrt(6), 4 - np.sqrt(1.2)), abs=0.01)
    assert triangular.mean() == pytest.approx(5 / 3, rel=1e-4)
    assert triangular.min() >= 0
    assert triangular.max() <= 4
    for edge in ([0, 0, 4], [0, 4, 4]):  # likely at an end
        assert draw(edge, 'a').mean() == pytest.approx(sum(edge) / 3, rel=1e-4)


def test_numbers_have_draws_of_their_own_that_never_change():
    first, again, other = draw([0, 1], 'a'), draw([0, 1], 'a'), draw([0, 1], 'b')
    assert np.array_equal(first, again)
    assert abs(np.corrcoef(first, other)[0, 1]) < 0.06
    assert not np.array_equal(first, draw([0, 1], 'a', seed=1))


def test_a_point_stays_a_point():
    for value in (5, 5.0, [5, 5], [5, 5, 5]):
        assert isinstance(draw(value, 'a'), float)
        assert not is_uncertain(draw(value, 'a'))
    assert quantiles(5.0) == (5, 5, 5)


def test_the_sum_of_symmetric_ranges_has_its_median_at_the_sum_of_their_middles():
    rng = np.random.default_rng(3)
    for _ in range(20):
        total, middles = 0.0, 0.0
        for name in 'abcdef':
            middle, width, factor = rng.uniform(5, 50), rng.uniform(0.1, 5), rng.uniform(1, 9)
            value = [middle - width, middle + width] if rng.random() < 0.5 else [middle - width, middle, middle + width]
            total, middles = total + factor * draw(value, name), middles + factor * middle
        assert median(total) == pytest.approx(middles, rel=0.005)
        assert total.mean() == pytest.approx(middles, rel=1e-6)


@pytest.mark.parametrize(
    'wrong', ['5', True, [True, 2], [1], [], [1, 2, 3, 4], [2, 1], [1, 3, 2], None, float('inf'), float('nan'), {'a': 1}, [[1, 2]]]
)
def test_what_is_neither_a_number_nor_a_range(wrong):
    assert range_problem(wrong)


def test_what_is():
    assert not any(range_problem(value) for value in (0, 5.5, -1, [1, 2], [1, 1, 2], [1.0, 1.5, 2]))


def test_numbers_for_a_person():
    assert spread_text(1234.5) == '1,234'
    assert spread_text(0.01234) == '0.0123'
    assert spread_text(3) == '3'
    assert spread_text(draw([0, 1000], 'a')) == '500 (100 to 900)'
    assert spread_text(draw([1200, 1300], 'a'), 2) == '1,200 (1,200 to 1,300)'  # two digits, whatever is asked for
    assert [two_digits(value) for value in (0, 0.01234, 9.96, 107_097.3, -156.3)] == ['0', '0.012', '10', '110,000', '-160']
