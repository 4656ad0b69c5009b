"""Flow against references that share no code with it: diffusers' scheduler, scipy's distributions, closed forms in float64."""

import math

import numpy as np
import pytest
import scipy.special
import scipy.stats
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from diffusion.contracts.batch import Conditioning
from diffusion.datasets.keyed_random import Draw, random_bits
from diffusion.objectives.flow import Flow as Objective
from diffusion.objectives.flow import add_noise, clean, noise_of, sampling_times, shifted, times, times_of, velocity
from diffusion.objectives.objective import guided, sobol_points
from diffusion.recipe.schema import FlowSettings
from tests.conftest import REPOSITORY

DENSITIES = [
    FlowSettings(0.0, 1.0, 0.0),
    FlowSettings(0.0, 1.0, 0.1),
    FlowSettings(0.7, 1.4, 0.5),
    FlowSettings(0.0, 1.0, 1.0),
    FlowSettings(0.0, 1.0, 0.1, shift=3.0),
    FlowSettings(uniform_share=1.0, shift=3.0),
]


def cdf(t, flow):
    """Of the mixture under the shift, from the inverse of the shift."""
    t = np.asarray(t, dtype=np.float64)
    before = t / (flow.shift - (flow.shift - 1) * t)
    return flow.uniform_share * before + (1 - flow.uniform_share) * scipy.stats.norm.cdf(scipy.special.logit(before), flow.mean, flow.std)


def keys(count):
    zero = torch.zeros(count, dtype=torch.int64)
    return torch.stack([zero, torch.arange(count), zero], dim=1)


def text(batch, value, width=3, length=2):
    return Conditioning(torch.full((batch, length, width), float(value)), torch.ones(batch, length, dtype=torch.bool))


# --- the path


def test_the_path_goes_from_latents_to_noise_and_its_slope_is_the_target():
    generator = torch.Generator().manual_seed(0)
    latents, noise = (torch.randn(3, 4, 2, 5, generator=generator, dtype=torch.float64).requires_grad_(False) for _ in range(2))
    assert torch.equal(add_noise(latents, noise, torch.zeros(3)), latents)
    assert torch.equal(add_noise(latents, noise, torch.ones(3)), noise)
    t = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
    _, slope = torch.func.jvp(lambda t: add_noise(latents, noise, t), (t,), (torch.ones_like(t),))
    torch.testing.assert_close(slope, velocity(latents, noise), rtol=0, atol=1e-14)


def test_noising_equals_diffusers():
    scheduler = FlowMatchEulerDiscreteScheduler()
    latents, noise = torch.randn(5, 4, 8, 8), torch.randn(5, 4, 8, 8)
    t = scheduler.timesteps[[0, 10, 499, 900, 999]]
    torch.testing.assert_close(add_noise(latents, noise, t / 1000), scheduler.scale_noise(latents, t, noise), rtol=0, atol=1e-6)


def test_a_perfect_output_gives_back_the_latents_and_the_noise():
    latents, noise = torch.randn(4, 4, 3, 3, dtype=torch.float64), torch.randn(4, 4, 3, 3, dtype=torch.float64)
    t = torch.tensor([0.0, 0.3, 0.999, 1.0], dtype=torch.float64)
    noisy, output = add_noise(latents, noise, t), velocity(latents, noise)
    torch.testing.assert_close(clean(output, noisy, t), latents, rtol=0, atol=1e-14)
    torch.testing.assert_close(noise_of(output, noisy, t), noise, rtol=0, atol=1e-14)


def test_times_in_bf16_do_not_make_the_noising_bf16():
    latents, noise = torch.randn(1, 4, 2, 2), torch.randn(1, 4, 2, 2)
    assert add_noise(latents, noise, torch.tensor([0.5], dtype=torch.bfloat16)).dtype == torch.float32


# --- the times of training


@pytest.mark.parametrize('flow', DENSITIES)
def test_the_density_is_the_one_named(flow):
    """Kolmogorov-Smirnov over 100,000 keyed draws: a bias of half a percent anywhere would be found."""
    t = times(random_bits(17, keys(100_000), Draw.TIMESTEP, 1)[:, 0], flow)
    assert t.dtype == torch.float32
    assert scipy.stats.kstest(t.double().numpy(), lambda x: cdf(x, flow)).pvalue > 0.001


@pytest.mark.parametrize('where', ['yamls/prx-budget-512.yaml', 'docs/flow.md', 'diffusion/objectives/flow.py', 'diffusion/recipe/schema.py'])
def test_a_shift_that_is_not_the_originals_is_said_to_be_ours(where):
    """Photoroom/PRX leaves the uniform part unshifted. Ours moves it, and with it more draws near pure noise, which docs/flow.md measures."""
    u = (torch.arange(100_000, dtype=torch.float64) + 0.5) / 100_000
    ours, original = times_of(u, FlowSettings(shift=2.0)), times_of(u, FlowSettings())
    original = torch.where(u < 0.1, original, shifted(original, 2.0))
    assert (ours > 0.97).double().mean() > 1.2 * (original > 0.97).double().mean()
    text = ' '.join((REPOSITORY / where).read_text().replace('#', '').split())
    assert 'Photoroom/PRX' in text
    assert 'unshifted' in text or 'shifts the logit-normal ones alone' in text


@pytest.mark.parametrize('flow', DENSITIES)
def test_each_number_goes_where_its_component_puts_it(flow):
    """The map is exact, not only its distribution: u below the share is uniform, the others keep their order within the logit-normal."""
    u = (torch.arange(10_000, dtype=torch.float64) + 0.5) / 10_000
    before = times_of(u, FlowSettings(flow.mean, flow.std, flow.uniform_share))
    low = u < flow.uniform_share
    np.testing.assert_allclose(before[low], u[low] / (flow.uniform_share or 1), rtol=0, atol=1e-12)
    inner = (u[~low] - flow.uniform_share) / (1 - flow.uniform_share or 1)
    np.testing.assert_allclose(before[~low], scipy.special.expit(flow.mean + flow.std * scipy.stats.norm.ppf(inner)), rtol=0, atol=1e-9)


@pytest.mark.parametrize('flow', DENSITIES)
def test_sobol_points_spread_more_evenly_than_draws(flow):
    """The distance to the density (Kolmogorov-Smirnov) of one batch of 256: 1/256 for each component against 0.05 to 0.1 of draws."""
    points = times(sobol_points(17, torch.arange(256)), flow).double().numpy()
    draws = times(random_bits(17, keys(256), Draw.TIMESTEP, 1)[:, 0], flow).double().numpy()
    ours, theirs = (scipy.stats.kstest(t, lambda x: cdf(x, flow)).statistic for t in (points, draws))
    assert ours < 3 / 256 < theirs


@pytest.mark.parametrize('share', [0.25, 0.5])
def test_both_components_are_stratified(share):
    flow, size = FlowSettings(uniform_share=share), 1024
    words = sobol_points(3, torch.arange(size))
    low = words < share * 2**32
    uniform = times(words[low], flow).double().numpy()
    normal = scipy.stats.norm.cdf(scipy.special.logit(times(words[~low], flow).double().numpy()))
    for values in (uniform, normal):
        assert np.bincount((values * 64).astype(int), minlength=64).tolist() == pytest.approx([len(values) / 64] * 64, abs=1)


@pytest.mark.parametrize('shift', [0.5, 2.0, 3.0])
def test_the_shift_of_a_logit_normal_moves_its_mean_by_the_logarithm(shift):
    u = torch.linspace(0.0005, 0.9995, 1999, dtype=torch.float64)
    torch.testing.assert_close(
        times_of(u, FlowSettings(0.3, 1.2, 0.0, shift)), times_of(u, FlowSettings(0.3 + math.log(shift), 1.2, 0.0, 1.0)), rtol=0, atol=1e-12
    )


def test_the_ends_stay_and_a_shift_undoes_its_inverse():
    t = torch.linspace(0, 1, 101, dtype=torch.float64)
    assert shifted(t, 3.0)[[0, -1]].tolist() == [0.0, 1.0]
    torch.testing.assert_close(shifted(shifted(t, 3.0), 1 / 3), t, rtol=0, atol=1e-15)


@pytest.mark.parametrize('flow', DENSITIES)
def test_the_extreme_words_give_finite_times(flow):
    t = times(torch.tensor([0, 1, 2**31, 2**32 - 2, 2**32 - 1]), flow)
    assert torch.isfinite(t).all()
    assert (t >= 0).all()
    assert (t <= 1).all()


def test_a_sample_has_the_same_time_in_any_order_and_batch():
    words = random_bits(17, keys(64), Draw.TIMESTEP, 1)[:, 0]
    assert torch.equal(times(words[5:9], FlowSettings()), times(words, FlowSettings())[5:9])


def test_the_times_of_evaluation_are_the_middles_of_bins():
    assert Objective(FlowSettings()).evenly_spaced(4).tolist() == [0.125, 0.375, 0.625, 0.875]


# --- sampling


@pytest.mark.parametrize('shift', [1.0, 3.0])
@pytest.mark.parametrize('steps', [1, 2, 7, 20, 28, 50])
def test_sampling_times_equal_diffusers(steps, shift):
    scheduler = Objective(FlowSettings(shift=shift)).scheduler()
    scheduler.set_timesteps(steps)
    ours = sampling_times(steps, shift)
    torch.testing.assert_close(ours, scheduler.sigmas, rtol=0, atol=1e-6)
    torch.testing.assert_close(ours[:-1], scheduler.timesteps / 1000, rtol=0, atol=1e-6)  # what the pipeline gives the network


@pytest.mark.parametrize('guidance', [1.0, 3.0])
@pytest.mark.parametrize('shift', [1.0, 3.0])
@pytest.mark.parametrize('steps', [1, 7, 20, 50])
def test_a_whole_trajectory_equals_diffusers(steps, shift, guidance):
    """With guidance written out as PRXPipeline does, and a network that depends on all of its inputs and not linearly."""

    def network(noisy, t, conditioning):
        return torch.tanh(noisy * (1 + t.view(-1, 1, 1, 1)) + conditioning.text.mean(dim=(1, 2)).view(-1, 1, 1, 1)) - noisy.roll(1, dims=3) / 2

    noise = torch.randn(3, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    ours = Objective(FlowSettings(shift=shift)).sample(guided(network, text(3, 0.5), text(3, -0.25), guidance), noise, steps)

    scheduler = Objective(FlowSettings(shift=shift)).scheduler()
    scheduler.set_timesteps(steps)
    latents = noise
    for t in scheduler.timesteps:
        time = (t / 1000).repeat(3)
        conditional, unconditional = network(latents, time, text(3, 0.5)), network(latents, time, text(3, -0.25))
        latents = scheduler.step(unconditional + guidance * (conditional - unconditional), t, latents).prev_sample
    torch.testing.assert_close(ours, latents, rtol=0, atol=1e-5)


def test_guidance_calls_the_network_once_with_the_empty_caption_first():
    calls = []

    def network(noisy, t, conditioning):
        calls.append(conditioning)
        return conditioning.text[:, 0, 0].view(-1, 1, 1, 1).expand_as(noisy)

    noisy = torch.zeros(2, 4, 1, 1)
    output = guided(network, text(2, 5.0), text(2, 1.0), 3.0)(noisy, torch.ones(2))
    assert torch.equal(output, torch.full_like(noisy, 1 + 3 * (5 - 1)))
    assert torch.equal(guided(network, text(2, 5.0), text(2, 1.0), 1)(noisy, torch.ones(2)), torch.full_like(noisy, 5.0))
    assert [len(call.mask) for call in calls] == [4, 2]


@pytest.mark.parametrize('shift', [1.0, 3.0])
def test_the_exact_velocity_of_gaussian_data_carries_noise_to_the_data(shift):
    """Data N(mean, std^2): v(x, t) = E[n - x_0 | x_t = x] is known, and its path is x(t) = (1 - t) mean + r(t) x(1) with
    r(t)^2 = (1 - t)^2 std^2 + t^2 (arXiv 2210.02747, section 3: the flow of a Gaussian path), so Euler's error must fall as 1 / steps."""
    mean, std = 0.7, 0.3

    def exact(x, t):
        t = t.double().view(-1, 1, 1, 1)
        variance = (1 - t) ** 2 * std**2 + t**2
        return -mean + (t - (1 - t) * std**2) / variance * (x.double() - (1 - t) * mean)

    noise = torch.linspace(-3, 3, 64).view(1, 4, 4, 4)
    expected = mean + std * noise
    errors = [(Objective(FlowSettings(shift=shift)).sample(exact, noise, n) - expected).abs().max().item() for n in (100, 1000)]
    assert errors[0] < 0.05
    assert errors[1] < 0.005
    assert errors[1] == pytest.approx(errors[0] / 10, rel=0.2)


def test_one_euler_step_with_the_exact_velocity_lands_on_the_mean():
    """At t = 1 the noise says nothing of the image: v = n - E[x_0], and a whole step reaches E[x_0]."""
    noise = torch.randn(2, 4, 3, 3)
    drawn = Objective(FlowSettings()).sample(lambda x, t: x - 0.7, noise, 1)
    torch.testing.assert_close(drawn, torch.full_like(noise, 0.7), rtol=0, atol=1e-6)
