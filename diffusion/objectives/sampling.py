"""Classifier-free-guidance sampling with DDIM (arXiv 2010.02502, eta = 0), from the schedule the model was trained on."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from diffusion.objectives.diffusion import PREDICTIONS, signal_and_sigma
from diffusion.objectives.schedule import sampling_timesteps


def guided(denoise: Callable[[Tensor, Tensor, Tensor], Tensor], noisy: Tensor, t: Tensor, text: Tensor, empty: Tensor, scale: float) -> Tensor:
    """The U-Net's output pushed away from the unconditional one (arXiv 2207.12598); one forward pass of twice the batch."""
    if scale == 1:
        return denoise(noisy, t, text)
    output = denoise(torch.cat([noisy, noisy]), torch.cat([t, t]), torch.cat([empty, text]))
    unconditional, conditional = output.float().chunk(2)
    return unconditional + scale * (conditional - unconditional)


@torch.no_grad()
def sample_latents(
    denoise: Callable[[Tensor, Tensor, Tensor], Tensor],
    noise: Tensor,
    text: Tensor,
    empty_text: Tensor,
    alphas_cumprod: Tensor,
    prediction: str,
    steps: int,
    guidance: float,
) -> Tensor:
    """Scaled latents (B, 4, h, w) float32 from standard normal `noise` of the same shape.

    Args:
        denoise: (noisy latents, timesteps (B,), text (B, L, C)) -> U-Net output.
        text: (B, L, C) encoded prompts.
        empty_text: (B, L, C) the encoded empty caption, which caption dropout trained.
        alphas_cumprod: (T,) float32 of the training schedule.
        prediction: a key of PREDICTIONS.
        steps: number of DDIM steps.
        guidance: guidance scale; 1 is none and costs half.
    """
    num_timesteps = len(alphas_cumprod)
    latents = noise.float()
    for t in sampling_timesteps(num_timesteps, steps).tolist():
        # As diffusers steps, also where `steps` does not divide T: grids and exported pipelines must agree.
        previous_t = max(t - num_timesteps // steps, 0)
        t_batch = torch.full((len(latents),), t, device=latents.device)
        signal, sigma = signal_and_sigma(alphas_cumprod[t])
        output = guided(denoise, latents, t_batch, text, empty_text, guidance).float()
        clean = PREDICTIONS[prediction].clean(output, latents, signal, sigma)
        epsilon = (latents - signal * clean) / sigma
        signal, sigma = signal_and_sigma(alphas_cumprod[previous_t])
        latents = signal * clean + sigma * epsilon  # eq. 12 with eta = 0
    return latents
