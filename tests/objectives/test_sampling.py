import pytest
import torch
from diffusers import DDIMScheduler

from diffusion.contracts.batch import Conditioning
from diffusion.objectives.diffusion import PREDICTIONS, Diffusion, alphas_cumprod, scheduler_config, signal_and_sigma
from diffusion.objectives.objective import guided, joined, split
from diffusion.recipe.schema import DiffusionSettings as Settings
from diffusion.recipe.schema import Schedule


def denoise(noisy, t, conditioning):
    """A smooth stand-in for a U-Net that depends on all it is given."""
    return torch.tanh(noisy * 0.7 + conditioning.text.mean(dim=(1, 2)).view(-1, 1, 1, 1)) * (0.5 + t.view(-1, 1, 1, 1) / 2000)


@pytest.mark.parametrize(('prediction', 'zero'), [('epsilon', False), ('v_prediction', False), ('v_prediction', True), ('sample', True)])
@pytest.mark.parametrize(('guidance', 'steps'), [(1.0, 20), (5.0, 20), (2.0, 30)])  # 30 does not divide 1000
def test_equals_diffusers_ddim(prediction, zero, guidance, steps):
    schedule = Schedule(zero_terminal_snr=zero)
    noise = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    text, empty = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1)), torch.zeros(2, 5, 8)
    given, unprompted = Conditioning(text), Conditioning(empty)
    ours = Diffusion(Settings(prediction, schedule)).sample(guided(denoise, given, unprompted, guidance), noise, steps)

    scheduler = DDIMScheduler(**scheduler_config(schedule, prediction))
    scheduler.set_timesteps(steps)
    theirs = noise
    for t in scheduler.timesteps:
        batch = t.expand(2)
        conditional, unconditional = denoise(theirs, batch, given), denoise(theirs, batch, unprompted)
        theirs = scheduler.step(unconditional + guidance * (conditional - unconditional), t, theirs).prev_sample
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize('prediction', ['epsilon', 'v_prediction', 'sample'])
def test_a_perfect_denoiser_recovers_the_data(prediction):
    """If all data is one point, the ideal prediction is known in closed form, and DDIM must arrive at the point."""
    point = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(2))
    alpha_bar = alphas_cumprod(Schedule())

    def ideal(noisy, t):
        signal, sigma = signal_and_sigma(alpha_bar[t])
        return PREDICTIONS[prediction].target(point, (noisy - signal * point) / sigma, signal, sigma)

    noise = torch.randn(3, 4, 8, 8, generator=torch.Generator().manual_seed(3))
    result = Diffusion(Settings(prediction)).sample(ideal, noise, steps=25)
    signal, sigma = signal_and_sigma(alpha_bar[:1])
    # It ends at timestep 0, whose noise (sigma = 0.03) is left.
    assert float((result - signal * point).abs().max()) < 4.5 * float(sigma)


def test_guidance_is_linear_between_the_two_predictions():
    noisy, t = torch.zeros(2, 4, 2, 2), torch.zeros(2, dtype=torch.long)
    text, empty = Conditioning(torch.ones(2, 3, 4)), Conditioning(torch.zeros(2, 3, 4))
    conditional, unconditional = denoise(noisy, t, text), denoise(noisy, t, empty)
    for scale in (0.0, 1.0, 7.5):
        expected = unconditional + scale * (conditional - unconditional)
        torch.testing.assert_close(guided(denoise, text, empty, scale)(noisy, t), expected)


def test_conditionings_are_cut_and_joined_by_rows():
    whole = Conditioning(torch.arange(10).view(5, 2, 1), mask=torch.ones(5, 2, dtype=torch.bool))
    parts = split(whole, 2)
    assert [len(part.text) for part in parts] == [2, 2, 1]
    again = joined(*parts)
    assert torch.equal(again.text, whole.text)
    assert torch.equal(again.mask, whole.mask)
    assert again.pooled is None
