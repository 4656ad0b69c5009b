"""Mean and deviation of an autoencoder's latents, and whether its configured scale and shift give them unit variance."""

import math
from typing import TypedDict

import torch
from torch import Tensor

TOLERANCE = 0.05  # of mean and deviation after scale and shift


class ChannelRecord(TypedDict):
    """A latent channel, unscaled."""

    mean: float
    std: float
    """Of draws from the posterior."""
    posterior_std: float
    """Root mean square of the posterior's own deviation: the part of `std` that is noise."""


class LatentRecord(TypedDict):
    """Latents of a set of images, as draws from their posteriors: what training sees."""

    mean: float
    """Over all channels, unscaled: what `shift_factor` should be."""
    std: float
    """About that mean: 1 / what `scaling_factor` should be."""
    channels: list[ChannelRecord]


class LatentStatistics:
    """Sums over the moments that arrive in batches, float64 on the CPU.

    Args:
        channels: of the latents.
    """

    def __init__(self, channels: int):
        self.count = 0  # values of each channel
        self._sum, self._squares, self._variances = torch.zeros(3, channels, dtype=torch.float64).unbind()

    def add(self, moments: Tensor) -> None:
        """Add (B, 2C, h, w) moments, mean and log variance, unscaled."""
        mean, log_variance = moments.double().cpu().chunk(2, dim=1)
        over = (0, 2, 3)
        self.count += mean[:, 0].numel()
        self._sum += mean.sum(dim=over)
        self._squares += mean.square().sum(dim=over)
        self._variances += log_variance.clamp(-30, 20).exp().sum(dim=over)

    def record(self) -> LatentRecord:
        """Return mean and deviation of all draws: E[var] + var[E] of the posteriors, without drawing.

        Raises:
            ValueError: nothing was added.
        """
        if not self.count:
            raise ValueError('no latents were added')
        mean, noise = self._sum / self.count, self._variances / self.count
        second = self._squares / self.count + noise  # (C,) second moments of draws
        std = (second - mean.square()).clamp(min=0).sqrt()
        rows = zip(mean.tolist(), std.tolist(), noise.sqrt().tolist(), strict=True)
        return {
            'mean': float(mean.mean()),
            'std': math.sqrt(max(0.0, float(second.mean() - mean.mean().square()))),
            'channels': [{'mean': a, 'std': b, 'posterior_std': c} for a, b, c in rows],
        }


def scale_warnings(record: LatentRecord, scaling_factor: float, shift_factor: float) -> list[str]:
    """Return sentences about what the configured factors leave of mean 0 and deviation 1; none if both are within TOLERANCE."""
    if not record['std']:
        return ['The latents are constant: the autoencoder encodes nothing.']
    found = []
    std, mean = record['std'] * scaling_factor, (record['mean'] - shift_factor) * scaling_factor
    if abs(std - 1) > TOLERANCE:
        found.append(
            f'scaling_factor {scaling_factor:g} leaves latents of these images a standard deviation of {std:.3g} (1 expected, to 5 %); '
            f'{1 / record["std"]:.4g} would give 1.'
        )
    if abs(mean) > TOLERANCE:
        found.append(
            f'shift_factor {shift_factor:g} leaves latents of these images a mean of {mean:.3g} standard units (0 expected, to 0.05); '
            f'{record["mean"]:.4g} would give 0.'
        )
    return found
