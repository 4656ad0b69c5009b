"""Times of a global batch from a Sobol sequence: spread evenly over the noise levels, where independent draws leave gaps and heaps.

The loss differs more between timesteps than between images, so how a batch happens to fall on the timesteps is much of the
noise of its gradient. A low-discrepancy sequence takes that part away and leaves the mean as it is (arXiv 2107.00630 does so for
the variational bound). Everything is integer arithmetic on the tensors' device: CPU and GPU give the same timesteps.
"""

import torch
from torch import Tensor

from diffusion.datasets.keyed_random import MASK, Draw, random_bits, random_order


def spread_points(seed: int, sample_key: Tensor, batch_index: int) -> Tensor:
    """(B,) int64 numerators over 2^32: one of the sequence's next B points for each sample of the global batch.

    Which sample gets which point depends on its key and on the keys it shares the batch with, and not on their order: on any
    number of GPUs a sample has the same time.

    Args:
        seed: of the run.
        sample_key: (B, 3) int64 of the whole global batch, in any order.
        batch_index: number of global batches before this one, all of B samples.
    """
    size = len(sample_key)
    index = torch.arange(batch_index * size, (batch_index + 1) * size, device=sample_key.device)
    points = sobol_points(seed, index)
    rank = random_order(seed, sample_key, Draw.TIMESTEP_ORDER).argsort()
    return points[rank]


def sobol_points(seed: int, index: Tensor) -> Tensor:
    """The points at `index` (N,) int64 of a one-dimensional Sobol sequence, as (N,) int64 numerators over 2^32.

    2^k points from a multiple of 2^k on lie one in each of 2^k equal intervals. The sequence is the base-2 radical inverse under a
    random digital shift: each seed flips the same bits of all points, which keeps that property and makes every point uniform
    (Owen, "Monte Carlo theory, methods and examples", chapter 17). It begins again after 2^32 points.
    """
    nobody = torch.zeros(1, 3, dtype=torch.int64, device=index.device)  # the shift belongs to the run, not to a sample
    return _reversed_bits(index & MASK) ^ random_bits(seed, nobody, Draw.TIMESTEP_SHIFT, 1)[0]


def _reversed_bits(words: Tensor) -> Tensor:
    """The 32 bits of each word in reverse order: neighbours are swapped, then pairs, and so on."""
    for distance, kept in ((1, 0x55555555), (2, 0x33333333), (4, 0x0F0F0F0F), (8, 0x00FF00FF), (16, 0x0000FFFF)):
        words = (words & kept) << distance | words >> distance & kept
    return words
