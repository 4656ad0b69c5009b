"""What an evaluation takes, against figures worked out by hand."""

import pytest

from diffusion.cost.facts import EvaluationWork

SD2_512 = {'pass_flop': 0.80e12, 'steps': 50, 'samples': 30_000}


def test_an_evaluation_of_stable_diffusion_2():
    """0.80 TFLOP a pass, 50 steps with guidance: 80 TFLOP an image; 30,000 of them 2.4e18 FLOP, 5.3 hours of 125 TFLOP/s; four scales 21 hours."""
    work = EvaluationWork(guidance=(7.5,), **SD2_512)
    assert work.flop_of_image(7.5) == pytest.approx(80e12)
    assert work.flop == pytest.approx(2.4e18)
    assert work.gpu_hours(125e12) == pytest.approx(5.33, rel=1e-3)
    assert EvaluationWork(guidance=(1.5, 3, 5, 7.5), **SD2_512).gpu_hours(125e12) == pytest.approx(21.3, rel=1e-2)


def test_without_guidance_it_is_half_and_decoding_comes_on_top():
    work = EvaluationWork(samples=10, guidance=(1.0, 2.0), steps=4, pass_flop=3.0, decode_flop=5.0)
    assert (work.flop_of_image(1.0), work.flop_of_image(2.0)) == (4 * 3 + 5, 2 * 4 * 3 + 5)
    assert work.flop == 10 * (17 + 29)
