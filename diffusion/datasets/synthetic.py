"""Random latents with random captions: trains at full speed with no data at all."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.utils.data import Dataset, DistributedSampler

from diffusion.contracts.batch import Sample


class SyntheticLatents(Dataset):
    """Moments of the shape and scale that a VAE gives; sample i is always the same.

    Args:
        num_samples: length of an epoch.
        shape: (2 * latent channels, h, w) of the moments.
        std: of the unscaled latents, 1 / scaling factor.
    """

    def __init__(self, num_samples: int, shape: tuple[int, int, int], std: float):
        self.num_samples, self.shape, self.std = num_samples, shape, std

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, key: tuple[int, int]) -> Sample:
        epoch, index = key
        generator = torch.Generator().manual_seed(index)
        moments = torch.randn(self.shape, generator=generator)
        moments[: len(moments) // 2] *= self.std  # mean
        moments[len(moments) // 2 :] = -10.0  # log variance: a VAE is almost certain
        return {'moments': moments.half().numpy(), 'captions': [(f'synthetic caption {index}', 1.0)], 'sample_key': (epoch, index, 0)}


class EpochSampler(DistributedSampler):
    """Indices with their epoch, which a map-style dataset cannot know by itself."""

    def __iter__(self) -> Iterator[tuple[int, int]]:  # type: ignore[override]
        return ((self.epoch, index) for index in super().__iter__())
