"""The objective of DDPM: discrete timesteps of a noise schedule, one of three predictions, sampled by DDIM.

Everything is float32 in and out. In bf16 two of Stable Diffusion's timesteps get sigma = 0 and 49 are off by more than 1 %.

    signal, sigma = signal_and_sigma(alphas_cumprod[t])          # (B, 1, 1, 1) each
    noisy = add_noise(latents, noise, signal, sigma)             # (B, 4, H/8, W/8)
    target = PREDICTIONS[kind].target(latents, noise, signal, sigma)

Training, sampling and export all take the noise schedule from here (`scheduler_config` states it for diffusers), so that they cannot disagree about
the last timestep.
"""

import math
from typing import Any, Protocol

import torch
from diffusers import DDIMScheduler
from torch import Tensor

from diffusion.datasets.keyed_random import Draw, normal
from diffusion.objectives.objective import Denoise, Objective
from diffusion.recipe.schema import DiffusionSettings as Settings
from diffusion.recipe.schema import Schedule


class Diffusion(Objective):
    """Args: settings: the recipe's `model.diffusion`. Times are int64 timesteps 0 .. T-1."""

    alphas_cumprod: Tensor

    def __init__(self, settings: Settings):
        super().__init__()
        self.settings, self.prediction = settings, PREDICTIONS[settings.prediction]
        self.end = settings.schedule.num_timesteps
        self.register_buffer('alphas_cumprod', alphas_cumprod(settings.schedule), persistent=False)

    def times(self, points: Tensor) -> Tensor:
        return points * len(self.alphas_cumprod) >> 32

    def evenly_spaced(self, count: int) -> Tensor:
        return ((torch.arange(count, dtype=torch.float64) + 0.5) * len(self.alphas_cumprod) / count).long()

    def noise(self, seed: int, key: Tensor, shape: tuple[int, ...]) -> Tensor:
        noise = super().noise(seed, key, shape)
        if not self.settings.offset_noise:
            return noise
        return offset(noise, normal(seed, key, Draw.OFFSET_NOISE, (shape[0], 1, 1)), self.settings.offset_noise)

    def noised(self, latents: Tensor, noise: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        signal, sigma = signal_and_sigma(self.alphas_cumprod[t])
        return add_noise(latents, noise, signal, sigma), self.prediction.target(latents, noise, signal, sigma)

    def weight(self, t: Tensor) -> Tensor | None:
        """Min-SNR weights, if the recipe asks for them."""
        return loss_weight(self.settings.prediction, self.alphas_cumprod[t], self.settings.min_snr_gamma)

    @torch.no_grad()
    def sample(self, denoise: Denoise, noise: Tensor, steps: int) -> Tensor:
        """DDIM (arXiv 2010.02502, eta = 0)."""
        num_timesteps = len(self.alphas_cumprod)
        latents = noise.float()
        for t in sampling_timesteps(num_timesteps, steps).tolist():
            # As diffusers steps, also where `steps` does not divide T: grids and exported pipelines must agree.
            previous_t = max(t - num_timesteps // steps, 0)
            t_batch = torch.full((len(latents),), t, device=latents.device)
            signal, sigma = signal_and_sigma(self.alphas_cumprod[t])
            output = denoise(latents, t_batch).float()
            clean = self.prediction.clean(output, latents, signal, sigma)
            epsilon = (latents - signal * clean) / sigma
            signal, sigma = signal_and_sigma(self.alphas_cumprod[previous_t])
            latents = signal * clean + sigma * epsilon  # eq. 12 with eta = 0
        return latents

    def scheduler(self) -> DDIMScheduler:
        return DDIMScheduler(**scheduler_config(self.settings.schedule, self.settings.prediction))

    def describe(self) -> str:
        return f'{self.settings.prediction}{", zero terminal SNR" if self.settings.schedule.zero_terminal_snr else ""}'


def signal_and_sigma(alphas_cumprod_t: Tensor) -> tuple[Tensor, Tensor]:
    """sqrt(alpha_bar) and sqrt(1 - alpha_bar) of (B,) values, shaped (B, 1, 1, 1) float32."""
    alpha_bar = alphas_cumprod_t.float().view(-1, 1, 1, 1)
    return alpha_bar.sqrt(), (1 - alpha_bar).sqrt()


def add_noise(latents: Tensor, noise: Tensor, signal: Tensor, sigma: Tensor) -> Tensor:
    """q(z_t | z_0) of DDPM (arXiv 2006.11239, eq. 4)."""
    return signal * latents + sigma * noise


class Prediction(Protocol):
    """One choice of what the network predicts."""

    @staticmethod
    def target(latents: Tensor, noise: Tensor, signal: Tensor, sigma: Tensor) -> Tensor:
        """The output of a perfect network."""

    @staticmethod
    def clean(output: Tensor, noisy: Tensor, signal: Tensor, sigma: Tensor) -> Tensor:
        """The clean latents that an output of the network implies."""

    @staticmethod
    def min_snr_weight(snr: Tensor, gamma: float) -> Tensor:
        """(B,) float32: the min-SNR weight of this target's error (arXiv 2303.09556)."""


class Epsilon:
    """The noise itself (DDPM)."""

    @staticmethod
    def target(latents: Tensor, noise: Tensor, signal: Tensor, sigma: Tensor) -> Tensor:
        return noise

    @staticmethod
    def clean(output: Tensor, noisy: Tensor, signal: Tensor, sigma: Tensor) -> Tensor:
        return (noisy - sigma * output) / signal

    @staticmethod
    def min_snr_weight(snr: Tensor, gamma: float) -> Tensor:
        return snr.clamp(max=gamma) / snr


class Velocity:
    """v = signal * noise - sigma * latents (arXiv 2202.00512, appendix D)."""

    @staticmethod
    def target(latents: Tensor, noise: Tensor, signal: Tensor, sigma: Tensor) -> Tensor:
        return signal * noise - sigma * latents

    @staticmethod
    def clean(output: Tensor, noisy: Tensor, signal: Tensor, sigma: Tensor) -> Tensor:
        return signal * noisy - sigma * output

    @staticmethod
    def min_snr_weight(snr: Tensor, gamma: float) -> Tensor:
        """min(SNR + 1, gamma) / (SNR + 1).

        The squared error of v is SNR + 1 times that of the clean latents; weighted, it is min(SNR + 1, gamma) times that. The paper's
        min(SNR, gamma) / (SNR + 1) is 0 at zero SNR: the timestep that zero terminal SNR exists for would have no gradient. diffusers' training
        scripts have had both (pull requests 5238 and 6307); docs/recipes.md compares them.
        """
        return (snr + 1).clamp(max=gamma) / (snr + 1)


class CleanLatents:
    """The clean latents."""

    @staticmethod
    def target(latents: Tensor, noise: Tensor, signal: Tensor, sigma: Tensor) -> Tensor:
        return latents

    @staticmethod
    def clean(output: Tensor, noisy: Tensor, signal: Tensor, sigma: Tensor) -> Tensor:
        return output

    @staticmethod
    def min_snr_weight(snr: Tensor, gamma: float) -> Tensor:
        return snr.clamp(max=gamma)


PREDICTIONS: dict[str, type[Prediction]] = {'epsilon': Epsilon, 'v_prediction': Velocity, 'sample': CleanLatents}


def loss_weight(prediction: str, alphas_cumprod_t: Tensor, min_snr_gamma: float | None) -> Tensor | None:
    """(B,) float32 min-SNR weights, or None where the recipe asks for none."""
    if min_snr_gamma is None:
        return None
    alpha_bar = alphas_cumprod_t.float()
    return PREDICTIONS[prediction].min_snr_weight(alpha_bar / (1 - alpha_bar), min_snr_gamma)


def offset(noise: Tensor, per_channel: Tensor, strength: float) -> Tensor:
    """Offset noise (crosslabs.org, "Diffusion with offset noise"): `per_channel` (B, C, 1, 1) is constant over the pixels."""
    return noise + strength * per_channel


def alphas_cumprod(schedule: Schedule) -> Tensor:
    """(T,) float32, falling: the product of 1 - beta up to each timestep, computed in float64."""
    betas = BETAS[schedule.kind](schedule)
    if schedule.zero_terminal_snr:
        betas = _zero_terminal_snr(betas)
    return torch.cumprod(1 - betas, dim=0).to(torch.float32)


def _scaled_linear(schedule: Schedule) -> Tensor:
    """Linear in the square root of beta: Stable Diffusion's (called `linear` in the CompVis code)."""
    roots = torch.linspace(schedule.beta_start**0.5, schedule.beta_end**0.5, schedule.num_timesteps, dtype=torch.float64)
    return roots**2


def _linear(schedule: Schedule) -> Tensor:
    """DDPM's (arXiv 2006.11239, section 4)."""
    return torch.linspace(schedule.beta_start, schedule.beta_end, schedule.num_timesteps, dtype=torch.float64)


def _cosine(schedule: Schedule) -> Tensor:
    """Nichol and Dhariwal's (arXiv 2102.09672, eq. 17), beta clipped at 0.999 as there."""
    times = torch.arange(schedule.num_timesteps + 1, dtype=torch.float64) / schedule.num_timesteps
    alpha_bar = torch.cos((times + 0.008) / 1.008 * math.pi / 2) ** 2
    return (1 - alpha_bar[1:] / alpha_bar[:-1]).clamp(max=0.999)


BETAS = {'scaled_linear': _scaled_linear, 'linear': _linear, 'cosine': _cosine}


def _zero_terminal_snr(betas: Tensor) -> Tensor:
    """Shift and scale sqrt(alphas_cumprod) so that the last is 0 and the first stays (arXiv 2305.08891, algorithm 1)."""
    roots = torch.cumprod(1 - betas, dim=0).sqrt()
    first, last = roots[0], roots[-1]
    alpha_bar = ((roots - last) * first / (first - last)) ** 2
    alphas = torch.cat([alpha_bar[:1], alpha_bar[1:] / alpha_bar[:-1]])
    return 1 - alphas


def sampling_timesteps(num_timesteps: int, steps: int) -> Tensor:
    """(steps,) int64, falling from T-1, evenly spaced (`trailing`: the one spacing that begins at the last timestep).

    arXiv 2305.08891, table 2, recommends it for every schedule and shows the others to skip the end of the training range.
    """
    return torch.arange(num_timesteps, 0, -num_timesteps / steps, dtype=torch.float64).round().long()[:steps] - 1


def scheduler_config(schedule: Schedule, prediction: str) -> dict[str, Any]:
    """Arguments of `diffusers.DDIMScheduler` that make it step through the same noise levels."""
    names = {'scaled_linear': 'scaled_linear', 'linear': 'linear', 'cosine': 'squaredcos_cap_v2'}
    return {
        'num_train_timesteps': schedule.num_timesteps,
        'beta_schedule': names[schedule.kind],
        'beta_start': schedule.beta_start,
        'beta_end': schedule.beta_end,
        'prediction_type': prediction,
        'rescale_betas_zero_snr': schedule.zero_terminal_snr,
        'timestep_spacing': 'trailing',
        'steps_offset': 1,  # without effect on trailing spacing; diffusers warns about any other value
        'set_alpha_to_one': False,
        'clip_sample': False,
    }
