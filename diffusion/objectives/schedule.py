"""Noise schedules: alphas_cumprod, the share of signal variance left at each timestep.

Training, sampling and export all take the schedule from here (`scheduler_config` states it for diffusers), so that they
cannot disagree about the last timestep.
"""

import math
from typing import Any

import torch
from torch import Tensor

from diffusion.recipe.schema import Schedule


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
