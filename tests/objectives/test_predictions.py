import numpy as np
import pytest
import torch
from diffusers import DDPMScheduler
from diffusers.training_utils import compute_snr

from diffusion.encoders.frozen import posterior_sample
from diffusion.objectives.diffusion import PREDICTIONS, add_noise, alphas_cumprod, loss_weight, offset, signal_and_sigma
from diffusion.objectives.objective import weighted_error
from diffusion.recipe.schema import Schedule

T = torch.tensor([0, 1, 250, 999])
KINDS = list(PREDICTIONS)


@pytest.fixture
def tensors():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(4, 4, 8, 8, generator=generator), torch.randn(4, 4, 8, 8, generator=generator)


@pytest.fixture
def scheduler():
    return DDPMScheduler(beta_schedule='scaled_linear', beta_start=0.00085, beta_end=0.012)


def test_noising_and_velocity_equal_diffusers(tensors, scheduler):
    latents, noise = tensors
    signal, sigma = signal_and_sigma(alphas_cumprod(Schedule())[T])
    torch.testing.assert_close(add_noise(latents, noise, signal, sigma), scheduler.add_noise(latents, noise, T))
    velocity = PREDICTIONS['v_prediction'].target(latents, noise, signal, sigma)
    torch.testing.assert_close(velocity, scheduler.get_velocity(latents, noise, T))
    assert PREDICTIONS['epsilon'].target(latents, noise, signal, sigma) is noise
    assert PREDICTIONS['sample'].target(latents, noise, signal, sigma) is latents


def test_noising_against_float64(tensors):
    latents, noise = tensors
    alpha_bar = alphas_cumprod(Schedule())[T]
    noisy = add_noise(latents, noise, *signal_and_sigma(alpha_bar))
    a = alpha_bar.double().numpy().reshape(-1, 1, 1, 1)
    expected = np.sqrt(a) * latents.double().numpy() + np.sqrt(1 - a) * noise.double().numpy()
    np.testing.assert_allclose(noisy.numpy(), expected, rtol=1e-4, atol=1e-6)


def test_coefficients_are_float32_even_for_bf16_input():
    """In bf16 the first two timesteps would get sigma = 0."""
    signal, sigma = signal_and_sigma(alphas_cumprod(Schedule()))
    assert signal.dtype == sigma.dtype == torch.float32
    assert float(sigma[0]) == pytest.approx(0.0291548, rel=1e-3)
    assert (1 - alphas_cumprod(Schedule()).bfloat16()).sqrt()[0] == 0  # what must not happen
    assert len(sigma.unique()) == 1000


# Not epsilon at zero SNR, where nothing can be recovered from the noise; the recipe refuses it.
@pytest.mark.parametrize(('kind', 'zero'), [('epsilon', False), ('v_prediction', False), ('v_prediction', True), ('sample', True)])
def test_a_perfect_prediction_gives_back_the_clean_latents(kind, zero, tensors):
    latents, noise = tensors
    signal, sigma = signal_and_sigma(alphas_cumprod(Schedule(zero_terminal_snr=zero))[T])
    noisy = add_noise(latents, noise, signal, sigma)
    target = PREDICTIONS[kind].target(latents, noise, signal, sigma)
    torch.testing.assert_close(PREDICTIONS[kind].clean(target, noisy, signal, sigma), latents, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(('kind', 'added'), [('epsilon', 0), ('sample', 0), ('v_prediction', 1)])
def test_min_snr_bounds_the_weight_of_the_clean_latents(kind, added, tensors, scheduler):
    """arXiv 2303.09556: the weighted error is min(SNR, gamma) x the error of the clean latents; with v prediction min(SNR + 1, gamma)."""
    latents, noise = tensors
    alpha_bar = alphas_cumprod(Schedule())[T]
    signal, sigma = signal_and_sigma(alpha_bar)
    noisy = add_noise(latents, noise, signal, sigma)
    target = PREDICTIONS[kind].target(latents, noise, signal, sigma)
    output = target + 0.1 * torch.randn(target.shape, generator=torch.Generator().manual_seed(5))
    clean_error = weighted_error(PREDICTIONS[kind].clean(output, noisy, signal, sigma), latents)
    snr = compute_snr(scheduler, T)
    weighted = weighted_error(output, target, loss_weight(kind, alpha_bar, 5.0))
    torch.testing.assert_close(weighted, (snr + added).clamp(max=5.0) * clean_error, rtol=1e-2, atol=1e-6)


def test_min_snr_published_numbers():
    """14.7 % of timesteps have SNR > 5; the mean weight for epsilon is 0.917."""
    alpha_bar = alphas_cumprod(Schedule())
    snr = alpha_bar / (1 - alpha_bar)
    assert float((snr > 5).float().mean()) == pytest.approx(0.147, abs=5e-4)
    assert float(loss_weight('epsilon', alpha_bar, 5.0).mean()) == pytest.approx(0.917, abs=5e-4)
    assert loss_weight('epsilon', alpha_bar, None) is None


def test_min_snr_trains_pure_noise():
    """The timestep that zero terminal SNR exists for; and the noisiest 367 timesteps keep the share of the weight that docs/recipes.md states."""
    alpha_bar = alphas_cumprod(Schedule(zero_terminal_snr=True))
    weights = loss_weight('v_prediction', alpha_bar, 5.0)
    assert weights[-1] == weights.max() == 1
    assert float(weights[-367:].sum() / weights.sum()) == pytest.approx(0.40, abs=5e-3)


def test_weighted_error_is_the_mean_square_per_sample(tensors):
    a, b = tensors
    expected = [float(((a[i].double() - b[i].double()) ** 2).mean()) for i in range(4)]
    np.testing.assert_allclose(weighted_error(a, b).numpy(), expected, rtol=1e-5)
    assert weighted_error(a.bfloat16(), b).dtype == torch.float32


def test_offset_noise_shifts_whole_channels():
    noise, per_channel = torch.zeros(2, 4, 8, 8), torch.randn(2, 4, 1, 1)
    shifted = offset(noise, per_channel, 0.1)
    assert torch.equal(shifted, (0.1 * per_channel).expand(2, 4, 8, 8))
    assert torch.equal(offset(noise, per_channel, 0.0), noise)
    drawn = torch.randn(4000, 4, 2, 2)
    moved = offset(drawn, torch.randn(4000, 4, 1, 1), 0.5)
    assert float(moved.var()) == pytest.approx(1 + 0.25, rel=0.05)


def test_posterior_sample_has_the_mean_and_variance_it_was_given():
    moments = torch.cat([torch.full((1, 4, 100, 100), 2.0), torch.full((1, 4, 100, 100), 2 * np.log(0.5))], dim=1).half()
    drawn = posterior_sample(moments, torch.randn(1, 4, 100, 100, generator=torch.Generator().manual_seed(0)))
    assert drawn.dtype == torch.float32
    assert float(drawn.mean()) == pytest.approx(2.0, abs=0.01)
    assert float(drawn.std()) == pytest.approx(0.5, abs=0.01)
    assert posterior_sample(torch.full((1, 8, 2, 2), -100.0), torch.ones(1, 4, 2, 2)).isfinite().all()
