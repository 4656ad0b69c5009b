"""Random latents with random captions: trains at full speed with no data at all."""

from collections.abc import Iterator

import numpy as np
import torch
from torch.utils.data import Dataset, DistributedSampler

from diffusion.contracts.batch import Sample

SYNTHETIC_BLOCKS = 4  # along a side


class SyntheticLatents(Dataset):
    """Moments of the shape and scale that a VAE gives; sample i is always the same.

    Args:
        num_samples: length of an epoch.
        shape: (2 * latent channels, h, w) of the moments.
        std: of the unscaled latents, 1 / scaling factor.
        size_px: (height, width) of the images that they are said to be of, whole and not resized.
    """

    def __init__(self, num_samples: int, shape: tuple[int, int, int], std: float, size_px: tuple[int, int]):
        self.num_samples, self.shape, self.std, self.size_px = num_samples, shape, std, size_px

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, key: tuple[int, int]) -> Sample:
        epoch, index = key
        generator = torch.Generator().manual_seed(index)
        moments = torch.randn(self.shape, generator=generator)
        moments[: len(moments) // 2] *= self.std  # mean
        moments[len(moments) // 2 :] = -10.0  # log variance: a VAE is almost certain
        return {
            'moments': moments.half().numpy(),
            'size': np.array(self.size_px, np.int32),
            'crop': np.zeros(2, np.int32),
            'captions': [(f'synthetic caption {index}', 1.0)],
            'sample_key': (epoch, index, 0),
        }

    def view(self, sample_id: int, occurrence: int, epoch: int | None = None) -> Sample:
        """As CaptionedMDS has it."""
        return self[0, sample_id]


class SyntheticImages(Dataset):
    """Squares of random blocks of colour, which something can be learned from; sample i is always the same.

    Args:
        num_samples: length of an epoch.
        side_px: of the squares.
    """

    def __init__(self, num_samples: int, side_px: int):
        self.num_samples, self.side_px = num_samples, side_px

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, key: tuple[int, int]) -> Sample:
        epoch, index = key
        blocks = torch.randint(0, 256, (3, SYNTHETIC_BLOCKS, SYNTHETIC_BLOCKS), dtype=torch.uint8, generator=torch.Generator().manual_seed(index))
        place = torch.arange(self.side_px) * SYNTHETIC_BLOCKS // self.side_px
        return {'images': blocks[:, place][:, :, place], 'captions': [('', 1.0)], 'sample_key': (epoch, index, 0)}

    def view(self, sample_id: int, occurrence: int, epoch: int | None = None) -> Sample:
        """As CaptionedMDS has it."""
        return self[0, sample_id]


class EpochSampler(DistributedSampler):
    """Indices with their epoch, which a map-style dataset cannot know by itself."""

    def __iter__(self) -> Iterator[tuple[int, int]]:  # type: ignore[override]
        return ((self.epoch, index) for index in super().__iter__())
