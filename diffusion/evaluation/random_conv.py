"""Features that need no weights file: a pyramid of random convolutions.

It is no published network: distances with it are no FID and compare only with one another. They rank models on simple images (shapes,
emoji) where no weights are at hand, because colours, edges and textures at five scales change its features. Its weights come from a
counter-based generator of integers, so that they are the same bits on every machine.
"""

import hashlib
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diffusion.datasets.keyed_random import Draw, random_bits
from diffusion.evaluation.network import FeatureNetwork, precise
from diffusion.evaluation.resizing import clean

SEED = int.from_bytes(b'conv')  # no run's: its noise would be these weights
SIZE_PX = 64  # to which every image is resized
CHANNELS = 32  # of each level
LEVELS = 5  # 64, 32, 16, 8 and 4 px
GRID = 4  # cells a side whose mean colours are features, too: where something is
DIMENSION = LEVELS * CHANNELS * 2 + 3 * GRID**2


class RandomConv(FeatureNetwork[nn.ParameterList]):
    """Extractor: mean and deviation over space of CHANNELS random filters at LEVELS scales, and the mean colours of a coarse grid."""

    def __init__(self) -> None:
        filters = [random_filters(level) for level in range(LEVELS)]
        digest = hashlib.sha256(b''.join(weight.numpy().tobytes() for weight in filters)).hexdigest()
        super().__init__('random-conv', digest, {'random-conv': DIMENSION}, nn.ParameterList(filters))

    @precise()
    def images(self, images: Tensor) -> dict[str, Tensor]:
        """Return {'random-conv': (B, 368) float32} of (B, 3, H, W) uint8."""
        x = clean(images.to(self.device), SIZE_PX, SIZE_PX) / 127.5 - 1
        found = [F.adaptive_avg_pool2d(x, GRID).flatten(1)]
        for weight in self.module:
            x = F.conv2d(F.pad(x, (1, 1, 1, 1), mode='replicate'), weight)
            found += [x.abs().mean(dim=(2, 3)), x.std(dim=(2, 3))]
            x = F.avg_pool2d(x.relu(), 2)
        return {self.name: torch.cat(found, dim=1)}


def random_filters(level: int) -> Tensor:
    """(CHANNELS, inputs, 3, 3): uniform, whole multiples of a constant that keeps the variance of what passes (He)."""
    shape = CHANNELS, 3 if level == 0 else CHANNELS, 3, 3
    bits = random_bits(SEED, torch.tensor([[level, 0, 0]]), Draw.NOISE, math.prod(shape))
    levels = (bits >> 24).float() - 127.5  # uniform on 256 values, standard deviation 73.9
    return (levels * (math.sqrt(2 / math.prod(shape[1:])) / 73.9)).reshape(shape)
