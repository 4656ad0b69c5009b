"""A report and a plan must say the same of the same points."""

import pytest

from benchmarks.reporting.series import ScalingSeries
from diffusion.cost.scaling import ScalingLaws, ScalingPoint
from diffusion.cost.throughput import points_and_laws


def law(num_gpus, global_size):
    """T = B/n / 200 + 0.1 s, on one node of 64 GPUs."""
    return global_size / (global_size / num_gpus / 200 + 0.1)


def both(points):
    """Rates of each by number of GPUs and global batch."""
    reported = ScalingSeries(name='reported', points=points, gpus_per_node=64)
    return [
        reported.images_per_sec,
        lambda num_gpus, global_size: (
            points_and_laws(ScalingLaws(points=points, gpus_per_node=64), 'measured', 'planned', global_size).rate(num_gpus).images_per_sec
        ),
    ]


def test_a_point_is_measured_with_its_own_batch_only():
    points = tuple(ScalingPoint(n, size, law(n, size)) for n, size in ((8, 2048), (16, 2048), (16, 4096), (32, 4096), (64, 4096)))
    marked = (*points[:2], ScalingPoint(16, 4096, law(16, 4096) * 1.01), *points[3:])  # within what a law forgives, and so no outlier
    for rate in both(marked):
        assert rate(16, 4096) == law(16, 4096) * 1.01
        assert rate(16, 2048) == law(16, 2048)
        assert rate(32, 2048) == pytest.approx(law(32, 2048), rel=0.01) != law(32, 4096)


@pytest.mark.parametrize('factor', [0.6, 1.6])
def test_with_an_outlier_the_lower_law_counts_whichever_that_is(factor):
    """An outlier that is slow lowers the law through all points; one that is fast lifts it, and the law without it is the lower."""
    sound = tuple(ScalingPoint(n, 2048, law(n, 2048)) for n in (4, 8, 16, 24))
    points = (*sound, ScalingPoint(32, 2048, law(32, 2048) * factor))
    for rate in both(points):
        assert rate(32, 2048) == points[-1].images_per_sec
        if factor > 1:
            assert rate(64, 2048) == pytest.approx(law(64, 2048))
        else:
            assert rate(64, 2048) < 0.9 * law(64, 2048)
