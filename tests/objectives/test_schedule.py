import math

import numpy as np
import pytest
import torch
from diffusers import DDIMScheduler

from diffusion.objectives.diffusion import alphas_cumprod, sampling_timesteps, scheduler_config
from diffusion.recipe.schema import Schedule


def test_stable_diffusions_schedule():
    values = alphas_cumprod(Schedule())
    betas = np.linspace(0.00085**0.5, 0.012**0.5, 1000, dtype=np.float64) ** 2
    np.testing.assert_allclose(values.numpy(), np.cumprod(1 - betas), rtol=1e-6)
    assert values.dtype == torch.float32
    assert float(values[0]) == pytest.approx(0.99915, abs=1e-6)  # published numbers
    assert float(values[-1]) == pytest.approx(0.0046601, abs=1e-6)


def test_linear_and_cosine_against_their_papers():
    linear = alphas_cumprod(Schedule(kind='linear', beta_start=1e-4, beta_end=0.02))
    product = 1.0
    for t in range(1000):  # DDPM: beta rises linearly from 1e-4 to 0.02
        product *= 1 - (1e-4 + (0.02 - 1e-4) * t / 999)
    assert float(linear[-1]) == pytest.approx(product, rel=1e-5)
    cosine = alphas_cumprod(Schedule(kind='cosine'))
    for t in (0, 250, 500, 900):  # before the clipping of beta near the end, the product is f(t+1) / f(0)
        f = math.cos(((t + 1) / 1000 + 0.008) / 1.008 * math.pi / 2) ** 2 / math.cos(0.008 / 1.008 * math.pi / 2) ** 2
        assert float(cosine[t]) == pytest.approx(f, rel=1e-5)


def test_zero_terminal_snr():
    plain, rescaled = alphas_cumprod(Schedule()), alphas_cumprod(Schedule(zero_terminal_snr=True))
    assert rescaled[-1] == 0
    assert float(rescaled[0]) == pytest.approx(float(plain[0]), rel=1e-6)
    assert (rescaled.diff() < 0).all()
    # Algorithm 1 is affine in sqrt(alpha_bar): equal steps stay proportional.
    ratio = rescaled.double().sqrt().diff() / plain.double().sqrt().diff()
    torch.testing.assert_close(ratio, ratio[0].expand_as(ratio), rtol=2e-2, atol=0)


@pytest.mark.parametrize('kind', ['scaled_linear', 'linear', 'cosine'])
@pytest.mark.parametrize('zero', [False, True])
def test_diffusers_steps_through_the_same_noise_levels(kind, zero):
    schedule = Schedule(kind=kind, zero_terminal_snr=zero)
    theirs = DDIMScheduler(**scheduler_config(schedule, 'v_prediction'))
    torch.testing.assert_close(theirs.alphas_cumprod, alphas_cumprod(schedule), rtol=2e-4, atol=2e-6)
    for steps in (10, 20, 50):
        theirs.set_timesteps(steps)
        assert theirs.timesteps.tolist() == sampling_timesteps(1000, steps).tolist()


def test_sampling_starts_at_the_last_timestep():
    assert sampling_timesteps(1000, 4).tolist() == [999, 749, 499, 249]
    assert sampling_timesteps(1000, 1000).tolist() == list(range(999, -1, -1))
    assert len(sampling_timesteps(1000, 30)) == 30
