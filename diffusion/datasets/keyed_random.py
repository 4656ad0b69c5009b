"""Random numbers as a pure function of (seed, epoch, sample id, occurrence in the epoch): nothing to save, nothing to restore.

Because a sample's noise, timestep and dropout depend on nothing else, the number of GPUs, the micro-batch, the loader
workers and a resume change none of them. The generator is Philox4x32-10 (Salmon et al., "Parallel random numbers: as
easy as 1, 2, 3", SC 2011), written in integer array operations so that CPU and GPU give the same bits.
"""

import math
from enum import IntEnum
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

T = TypeVar('T', Tensor, np.ndarray)
MASK = 0xFFFFFFFF
MULTIPLIER_0, MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
WEYL_0, WEYL_1 = 0x9E3779B9, 0xBB67AE85
ROUNDS = 10


class Draw(IntEnum):
    """Purpose of a number: each has its own stream. Below 256. Never renumber: runs in progress would change."""

    NOISE = 0
    TIMESTEP = 1
    POSTERIOR = 2
    CAPTION_DROPOUT = 3
    FLIP = 4
    OFFSET_NOISE = 5
    CAPTION = 6
    TIMESTEP_ORDER = 7
    TIMESTEP_SHIFT = 8
    CAPTION_TOKEN = 9  # the epoch counts the tokens, the occurrence the captions of the image
    ROUTING = 10
    PARTNER = 11
    CROP = 12


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox4x32-10. All tensors int64 holding 32-bit values, broadcast together; four 32-bit words come back."""
    if type(counter[0]) is Tensor and counter[0].device.type == 'cpu' and not torch.compiler.is_compiling():
        # NumPy's calls cost a fraction of PyTorch's, which is what a batch of the loader's draws costs.
        return tuple(map(torch.from_numpy, _rounds(*(word.numpy() for word in (*counter, *key)))))  # type: ignore[return-value]
    return _rounds(*counter, *key)


def _rounds(c0: T, c1: T, c2: T, c3: T, k0: T, k1: T) -> tuple[T, T, T, T]:
    for _ in range(ROUNDS):
        # The int64 product wraps modulo 2^64, which keeps all 64 bits of the unsigned product.
        product_0, product_1 = c0 * MULTIPLIER_0, c2 * MULTIPLIER_1
        c0, c1, c2, c3 = (
            (product_1 >> 32 & MASK) ^ c1 ^ k0,
            product_1 & MASK,
            (product_0 >> 32 & MASK) ^ c3 ^ k1,
            product_0 & MASK,
        )
        k0, k1 = k0 + WEYL_0 & MASK, k1 + WEYL_1 & MASK
    return c0, c1, c2, c3


def random_bits(seed: int, sample_key: Tensor, draw: Draw, count: int) -> Tensor:
    """(B, count) int64 words in [0, 2^32) for `sample_key`, a (B, 3) int64 tensor of (epoch, sample id, occurrence in the epoch).

    Equal for no two of: seeds and epochs below 2^32, ids, occurrences below 2^24, draws.
    """
    epoch, sample_id, occurrence = sample_key.split(1, dim=1)  # (B, 1) each
    # The epoch's upper half is 0, which no compiler knows. A counter that it knew whole would be an index to Inductor, which multiplies those in 32
    # bits on a GPU.
    block = torch.arange(-(-count // 4), device=sample_key.device)[None] + (epoch >> 32)  # (B, ceil(count / 4))
    counter = (block, int(draw) | occurrence << 8, sample_id & MASK, sample_id >> 32 & MASK)
    key = (torch.full_like(epoch, seed & MASK), epoch & MASK)
    return torch.stack(philox(counter, key), dim=-1).flatten(1)[:, :count]


def by_id(sample_id: Tensor) -> Tensor:
    """(B, 3) int64 keys of (B,) ids, in epoch 0, at their first occurrence."""
    zero = torch.zeros_like(sample_id)
    return torch.stack([zero, sample_id, zero], dim=1)


def uniform(seed: int, sample_key: Tensor, draw: Draw, count: int) -> Tensor:
    """(B, count) float32 in (0, 1]."""
    return _unit_interval(random_bits(seed, sample_key, draw, count))


def normal(seed: int, sample_key: Tensor, draw: Draw, shape: tuple[int, ...]) -> Tensor:
    """(B, *shape) float32, standard normal by Box-Muller."""
    count = math.prod(shape)
    pairs = _unit_interval(random_bits(seed, sample_key, draw, count + count % 2)).unflatten(1, (-1, 2))
    radius = torch.sqrt(-2 * torch.log(pairs[..., 0]))
    angle = 2 * math.pi * pairs[..., 1]
    values = torch.stack([radius * torch.cos(angle), radius * torch.sin(angle)], dim=-1).flatten(1)
    return values[:, :count].reshape(-1, *shape)


def random_order(seed: int, sample_key: Tensor, draw: Draw) -> Tensor:
    """(B,) int64: positions of the samples in a random order, which their (B, 3) keys decide and not where they stand."""
    high, low = random_bits(seed, sample_key, draw, 2).unbind(dim=1)
    # 63 bits: with 32 a run would meet hundreds of equal hashes of different samples, which their order would have to decide.
    return (high << 31 ^ low).argsort(stable=True)


def integers(seed: int, sample_key: Tensor, draw: Draw, high: int) -> Tensor:
    """(B,) int64, uniform over 0 .. high-1 (to one part in 2^32 / high)."""
    return random_bits(seed, sample_key, draw, 1)[:, 0] * high >> 32


def _unit_interval(bits: Tensor) -> Tensor:
    return (bits.to(torch.float32) + 0.5) * 2.0**-32  # never 0, so that its logarithm is finite
