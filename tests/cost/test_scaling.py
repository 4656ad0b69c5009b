import math

import numpy as np
import pytest

from diffusion.cost.published import MOSAICML_2023_01, MOSAICML_TWO_PHASE
from diffusion.cost.scaling import Point, efficiency, fit, miss, outliers

GPUS = (8, 16, 32, 64, 128)


def law(num_gpus, global_size, a, c, f):
    """Images per second, written out again."""
    nodes = -(-num_gpus // 8)
    return global_size / (a * global_size / num_gpus + c * (nodes - 1) / nodes + f)


def published(rows, resolution, most=128):
    return [Point(row.num_gpus, 2048, row.images_per_sec[resolution]) for row in rows if row.num_gpus <= most]


PARTS_OF_A_NODE = (1, 2, 4, *GPUS)


@pytest.mark.parametrize(
    ('a', 'c', 'f', 'terms'),
    [
        (0.06, 0.3, 0.05, ('compute', 'communication', 'overhead')),
        (0.06, 0.3, 0.0, ('compute', 'communication')),
        (0.06, 0.0, 0.05, ('compute', 'overhead')),
        (0.06, 0.0, 0.0, ('compute',)),
    ],
)
def test_known_coefficients_are_found(a, c, f, terms):
    made = fit([Point(n, 2048, law(n, 2048, a, c, f)) for n in PARTS_OF_A_NODE])
    assert made.terms == terms
    assert made.coefficients == pytest.approx([a, c, f], abs=1e-9)
    ahead = made.predict(512, 4096)
    assert ahead.images_per_sec == pytest.approx(law(512, 4096, a, c, f))
    assert ahead.extrapolation == 4
    assert ahead.low == pytest.approx(ahead.high) == pytest.approx(ahead.images_per_sec)
    assert made.step_sec(64, 2048) == pytest.approx(2048 / law(64, 2048, a, c, f))


@pytest.mark.parametrize(('c', 'f'), [(0.3, 0.0), (0.3, 0.05), (0.0, 0.05)])
def test_full_nodes_and_one_batch_leave_communication_and_overhead_as_one(c, f):
    """n T is then a straight line in n, here by NumPy's polynomial fit: the prediction is the line's, whatever it was made of."""
    points = [Point(n, 2048, law(n, 2048, 0.06, c, f)) for n in GPUS]
    made = fit(points)
    assert made.terms == ('compute', 'communication')
    line = np.polyfit(GPUS, [point.num_gpus * point.step_sec for point in points], 1)
    ahead = made.predict(256, 2048).images_per_sec
    assert ahead == pytest.approx(law(256, 2048, 0.06, c, f)) == pytest.approx(2048 * 256 / np.polyval(line, 256))


def test_where_more_gpus_were_slower_more_still_are_not_faster():
    """Two processes that get in each other's way: the mean step, whatever their number."""
    steps_sec = (0.0737, 0.1067)
    made = fit([Point(n, 16, 16 / step_sec) for n, step_sec in zip((1, 2), steps_sec, strict=True)])
    assert made.terms == ('overhead',)
    ratios = [1 / step_sec for step_sec in steps_sec]  # least squares of relative errors
    assert made.predict(8, 16).images_per_sec == pytest.approx(16 * sum(ratio**2 for ratio in ratios) / sum(ratios))


def test_a_term_is_never_negative():
    """Twice the GPUs, more than twice the speed: no law of this kind says so, and the best of them is a straight line."""
    made = fit([Point(8, 2048, 100.0), Point(16, 2048, 220.0), Point(32, 2048, 480.0)])
    assert made.terms == ('compute',)
    assert (made.coefficients >= 0).all()


def test_the_fit_is_least_squares_of_relative_errors():
    """The normal equations of one term, in closed form: a = sum(r) / sum(r^2) with r = (B/n) / T."""
    points = [Point(8, 2048, 290.0), Point(16, 2048, 585.0), Point(32, 2048, 1195.0)]
    ratios = np.array([point.images_per_sec / point.num_gpus for point in points])
    made = fit(points)
    assert made.coefficients == pytest.approx([ratios.sum() / (ratios**2).sum(), 0, 0])
    residuals = made.coefficients[0] * ratios - 1
    assert made.deviation == pytest.approx(math.sqrt((residuals**2).sum() / 2))
    spread = made.deviation * math.sqrt(1 + 1 / (ratios**2).sum() / made.coefficients[0] ** 2)
    ahead = made.predict(64, 2048)
    assert ahead.low == pytest.approx(ahead.images_per_sec / (1 + 4.302653 * spread))
    assert ahead.high == pytest.approx(ahead.images_per_sec / (1 - 4.302653 * spread))


def test_a_constant_batch_per_gpu_leaves_compute_and_overhead_as_one():
    made = fit([Point(n, 64 * n, law(n, 64 * n, 0.01, 0.2, 0.1)) for n in GPUS])
    assert made.terms == ('compute', 'communication')
    assert made.predict(256, 64 * 256).images_per_sec == pytest.approx(law(256, 64 * 256, 0.01, 0.2, 0.1))


@pytest.mark.parametrize(('num_points', 'c'), [(4, 0.3), (5, 0.3), (5, 0.03)])
def test_intervals_hold_as_often_as_they_say(num_points, c):
    """95 % of 600 seeded draws, give or take three standard deviations of the binomial distribution, or so for those that keep both terms."""
    rng = np.random.default_rng(0)
    true = {n: law(n, 2048, 0.06, c, 0.0) for n in (*GPUS, 256)}
    inside = num_draws = 0
    for _ in range(600):
        noise = {n: 1 + 0.01 * rng.standard_normal() for n in true}
        made = fit([Point(n, 2048, true[n] / noise[n]) for n in GPUS[:num_points]])
        if made.terms == ('compute', 'communication'):  # the law that the numbers were drawn from
            ahead = made.predict(256, 2048)
            num_draws += 1
            inside += ahead.low <= true[256] / noise[256] <= ahead.high
    assert num_draws > 200
    assert 0.92 <= inside / num_draws <= 0.985


def test_published_256_from_8_to_128():
    """The table's own 256-GPU row is an extrapolation by its authors: 2,589.4."""
    ahead = fit(published(MOSAICML_2023_01, 512)).predict(256, 2048)
    assert ahead.images_per_sec == pytest.approx(2634.8, abs=0.1)
    assert ahead.images_per_sec == pytest.approx(2589.4, rel=0.02)
    assert ahead.low < 2589.4 < ahead.high
    assert (ahead.extrapolation, round(ahead.leave_one_out, 4)) == (2, 0.0052)


def test_published_128_from_8_to_64():
    ahead = fit(published(MOSAICML_2023_01, 512, most=64)).predict(128, 2048)
    assert ahead.images_per_sec == pytest.approx(1618.4, rel=0.005)  # measured
    assert ahead.low < 1618.4 < ahead.high


def test_leaving_one_out_is_what_a_fit_without_it_says():
    points = published(MOSAICML_2023_01, 512)
    made = fit(points)
    for point, error in zip(points, made.leave_one_out, strict=True):
        others = fit(points, without=[point])
        assert others.left_out == (point,)
        assert error == pytest.approx(others.predict(point.num_gpus, 2048).images_per_sec / point.images_per_sec - 1) == miss(others, point)
    assert made.leave_one_out_error == pytest.approx(np.sqrt(np.mean(np.square(made.leave_one_out))))


def test_the_published_row_that_no_smooth_law_explains():
    points = published(MOSAICML_TWO_PHASE, 256)
    (odd,) = outliers(points)
    assert (odd.num_gpus, odd.images_per_sec) == (128, 11600)
    ahead = fit(points, without=[odd]).predict(128, 2048)
    assert ahead.images_per_sec == pytest.approx(16172, rel=1e-3)
    assert ahead.low > 11600
    assert outliers(published(MOSAICML_TWO_PHASE, 512)) == outliers(published(MOSAICML_2023_01, 512)) == ()


def test_one_wrong_point_among_many_is_found_and_noise_is_not():
    rng = np.random.default_rng(1)
    points = [Point(n, 2048, law(n, 2048, 0.06, 0.3, 0.0) * (1 + 0.02 * rng.standard_normal())) for n in (8, 16, 24, 32, 64, 128, 256)]
    assert outliers(points) == ()
    points[3] = Point(32, 2048, points[3].images_per_sec * 0.7)
    assert outliers(points) == (points[3],)
    noisy = [Point(p.num_gpus, 2048, p.images_per_sec, spread=0.5) for p in points]  # windows that differ as much: nothing is proven
    assert outliers(noisy) == ()


def test_a_fit_is_not_surer_than_the_windows_of_its_points():
    exact = [Point(n, 2048, law(n, 2048, 0.06, 0.3, 0.0), spread=0.1349) for n in GPUS]
    assert fit(exact).deviation == pytest.approx(0.1)
    assert fit(exact).predict(256, 2048).low < fit(exact).predict(256, 2048).images_per_sec * 0.8


def test_computation_alone_bounds_an_interval():
    """The two-phase table without its outlier: the interval of all terms together would end at 119,000 images/s, three times what linear scaling gives."""
    points = published(MOSAICML_TWO_PHASE, 256, most=64)
    ahead = fit(points).predict(256, 2048)
    linear = 256 * max(point.images_per_sec / point.num_gpus for point in points)
    assert linear < ahead.high < 1.3 * linear


def test_one_point_is_linear_scaling_and_says_so():
    made = fit([Point(8, 2048, 800.0)])
    ahead = made.predict(64, 4096)
    assert ahead.images_per_sec == pytest.approx(6400)
    assert (ahead.low, ahead.high, ahead.leave_one_out) == (None, None, None)
    assert 'linear scaling is assumed' in str(made)
    assert 'no degree of freedom' in str(ahead)
    assert '8 times the most that were measured' in str(ahead)


def test_two_points_fit_exactly_and_leave_no_interval():
    points = [Point(8, 2048, 800.0), Point(16, 2048, 1500.0)]
    made = fit(points)
    assert made.predict(16, 2048).images_per_sec == pytest.approx(1500)
    assert made.predict(16, 2048).low is None
    assert 'no degrees of freedom' in str(made)
    assert outliers(points) == ()


def test_a_network_that_no_point_crossed_is_said():
    """Points of one node cannot know what several cost; those of several can."""
    one_node = fit([Point(n, 2048, law(n, 2048, 0.06, 0.3, 0.01)) for n in (1, 2, 4, 8)])
    assert [one_node.predict(n, 2048).is_network_unseen for n in (4, 8, 16)] == [False, False, True]
    assert 'nothing was measured on several nodes' in str(one_node.predict(16, 2048))
    several = fit([Point(n, 2048, law(n, 2048, 0.06, 0.3, 0.01)) for n in GPUS])
    assert not several.predict(512, 2048).is_network_unseen


def test_efficiency_is_relative_to_the_smallest():
    """The scaling column of the MosaicML table: 100, 99.1, 94.7, 88.9, 78.9 %."""
    assert efficiency(published(MOSAICML_2023_01, 512)) == pytest.approx([1, 0.991, 0.947, 0.889, 0.789], abs=5e-4)


def test_what_is_no_point_is_refused():
    for bad in ((0, 2048, 1.0), (8, 0, 1.0), (8, 2048, 0.0), (8, 2048, float('nan')), (8, 2048, float('inf'))):
        with pytest.raises(ValueError, match='at least 1'):
            Point(*bad)
    point = Point(8, 2048, 100.0)
    with pytest.raises(ValueError, match='at least one measured point'):
        fit([point], without=[point])
    with pytest.raises(ValueError, match='0 GPUs a node'):
        fit([point], gpus_per_node=0)
