"""What a network can be trained to predict by diffusion: noise the latents, name the target, weigh the error.

Everything is float32 in and out. In bf16 two of Stable Diffusion's timesteps get sigma = 0 and 49 are off by more than 1 %.

    signal, sigma = signal_and_sigma(alphas_cumprod[t])          # (B, 1, 1, 1) each
    noisy = add_noise(latents, noise, signal, sigma)             # (B, 4, H/8, W/8)
    target = PREDICTIONS[kind].target(latents, noise, signal, sigma)
"""

from typing import Protocol

from torch import Tensor


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
        """What a perfect network would have returned."""

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
        scripts have had both (pull requests 5238 and 6307); docs/performance.md compares them.
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
