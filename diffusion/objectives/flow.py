"""The objective of rectified flow: the straight path from latents to noise, the times a network is trained at, and Euler's method.

arXiv 2210.02747 and 2209.03003; in this form arXiv 2403.03206 ("SD3"). Time is a float in 0..1: 0 is the image, 1 is noise. Everything is float32 in
and out; bf16 has 8 bits, which would leave 128 different times between 0.5 and 1.

    t = times(words, flow)                                   # (B,) of (B,) random words
    noisy = add_noise(latents, noise, t)                     # (B, C, h, w)
    target = velocity(latents, noise)

There is no loss weight: a weight w(t) and a density proportional to w(t) have the same expected gradient, so the density alone says it.
"""

import itertools

import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from torch import Tensor

from diffusion.objectives.objective import Denoise, Objective
from diffusion.recipe.schema import FlowSettings as Settings

NUM_TRAIN_TIMESTEPS = 1000  # diffusers counts time in 0..1000 and lets sampling end at 1; networks here are given t / 1000


class Flow(Objective):
    """Args: settings: the recipe's `model.flow`. Times are float32 in [0, 1]."""

    end = 1.0

    def __init__(self, settings: Settings):
        super().__init__()
        self.settings = settings

    def times(self, points: Tensor) -> Tensor:
        return times(points, self.settings)

    def evenly_spaced(self, count: int) -> Tensor:
        return ((torch.arange(count, dtype=torch.float64) + 0.5) / count).to(torch.float32)

    def noised(self, latents: Tensor, noise: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        return add_noise(latents, noise, t), velocity(latents, noise)

    def sample(self, denoise: Denoise, noise: Tensor, steps: int) -> Tensor:
        return euler(denoise, noise, sampling_times(steps, self.settings.shift))

    def scheduler(self) -> FlowMatchEulerDiscreteScheduler:
        return FlowMatchEulerDiscreteScheduler(num_train_timesteps=NUM_TRAIN_TIMESTEPS, shift=self.settings.shift)

    def describe(self) -> str:
        flow = self.settings
        return f'rectified flow, logit-normal({flow.mean:g}, {flow.std:g}) with {flow.uniform_share:.0%} uniform, shift {flow.shift:g}'


@torch.no_grad()
def euler(denoise: Denoise, noise: Tensor, times: Tensor) -> Tensor:
    """Latents (B, C, h, w) float32 by Euler's method, from noise of the same shape along times that fall from 1 to 0."""
    latents = noise.float()
    for t, following in itertools.pairwise(times.to(latents.device)):
        latents = latents + (following - t) * denoise(latents, t.expand(len(latents))).float()
    return latents


def add_noise(latents: Tensor, noise: Tensor, t: Tensor) -> Tensor:
    """x_t = (1 - t) x_0 + t n (arXiv 2403.03206, eq. 13): (B, C, h, w) float32 of clean latents, standard normal noise and (B,) times."""
    t = _per_sample(t, latents)
    return (1 - t) * latents + t * noise


def velocity(latents: Tensor, noise: Tensor) -> Tensor:
    """dx_t/dt = n - x_0, what a perfect network returns on average; the same at every time of the path."""
    return noise - latents


def clean(output: Tensor, noisy: Tensor, t: Tensor) -> Tensor:
    """The clean latents x_0 = x_t - t v that an output of the network implies, (B, C, h, w)."""
    return noisy - _per_sample(t, noisy) * output


def noise_of(output: Tensor, noisy: Tensor, t: Tensor) -> Tensor:
    """The noise n = x_t + (1 - t) v that an output of the network implies, (B, C, h, w)."""
    return noisy + (1 - _per_sample(t, noisy)) * output


def _per_sample(t: Tensor, latents: Tensor) -> Tensor:
    """(B,) or (1,) times to the rank of the latents, in float32 at least."""
    return t.to(torch.promote_types(t.dtype, torch.float32)).view(-1, *[1] * (latents.dim() - 1))


def times(words: Tensor, flow: Settings) -> Tensor:
    """(B,) float32 in [0, 1]: the times that (B,) int64 words in [0, 2^32) stand for.

    The words are random bits of each sample (`random_bits(seed, sample_key, Draw.TIMESTEP, 1)[:, 0]`) or points of a Sobol sequence as
    numerators over 2^32 (`sobol_points`): both are uniform, and one map serves both.
    """
    u = (words.to(torch.float64) + 0.5) * 2.0**-32  # inside (0, 1): float32 would round the largest words to 1
    return times_of(u, flow).to(torch.float32)


def times_of(u: Tensor, flow: Settings) -> Tensor:
    """Times in (0, 1) of uniform numbers in (0, 1), in their dtype: a map, so that evenly spread numbers stay evenly spread over the density.

    The mixture takes one number: below `uniform_share` it is stretched to a uniform time, the rest is stretched to the logit-normal's.
    Each of the two intervals holds its share of a Sobol sequence's points, spread evenly; both components stay stratified.
    `shift` moves all times; Photoroom/PRX shifts the logit-normal ones alone (docs/flow.md, "Settings").
    """
    share = flow.uniform_share
    # The branch that is not taken is clamped inside (0, 1): its value is thrown away, but must be finite.
    inner = ((u - share) / max(1 - share, 1e-12)).clamp(2.0**-40, 1 - 2.0**-40)
    logit_normal = torch.sigmoid(flow.mean + flow.std * torch.special.ndtri(inner))  # arXiv 2403.03206, eq. 19
    t = torch.where(u < share, u / max(share, 1e-12), logit_normal)
    return shifted(t, flow.shift)


def shifted(t: Tensor, shift: float) -> Tensor:
    """t' = a t / (1 + (a - 1) t) (arXiv 2403.03206, eq. 23): a > 1 moves times towards noise; 0 and 1 stay.

    It adds ln a to the logit of t. A shifted logit-normal is the logit-normal of mean m + ln a; a shifted uniform is no uniform.
    """
    return shift * t / (1 + (shift - 1) * t)


def evenly_shifted(steps: int, shift: float) -> Tensor:
    """(steps + 1,) float32, falling from 1 to 0: even times, shifted once, as pipelines have them that hand their own times to their scheduler."""
    return shifted(torch.linspace(1, 0, steps + 1, dtype=torch.float64), shift).float()


def sampling_times(steps: int, shift: float) -> Tensor:
    """(steps + 1,) float32, falling from 1 to 0: where sampling calls the network, and the end.

    As diffusers' FlowMatchEulerDiscreteScheduler, which shifts twice: its first and last time are those of training, shifted, and the even
    spacing between them is shifted again. Its last call is at t = 0.001 (without a shift) and changes next to nothing: N steps draw like N - 1.
    """
    last = shifted(torch.tensor(1 / NUM_TRAIN_TIMESTEPS, dtype=torch.float64), shift).item()
    spaced = torch.linspace(1, last, steps, dtype=torch.float64)
    return torch.cat([shifted(spaced, shift), torch.zeros(1, dtype=torch.float64)]).to(torch.float32)
