"""The objective of DDPM: discrete timesteps of a noise schedule, one of three predictions, sampled by DDIM."""

import torch
from diffusers import DDIMScheduler
from torch import Tensor

from diffusion.datasets.keyed_random import Draw, normal
from diffusion.objectives.objective import Denoise, Objective
from diffusion.objectives.predictions import PREDICTIONS, add_noise, loss_weight, offset, signal_and_sigma
from diffusion.objectives.schedule import alphas_cumprod, sampling_timesteps, scheduler_config
from diffusion.recipe.schema import DiffusionSettings as Settings


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
