"""Contrastive flow matching (arXiv 2506.05350, eq. 8): besides approaching its own target, a prediction moves away from that of another sample.

The loss is |v - target|^2 - weight |v - other|^2. The other sample is drawn from the whole global batch, so that no micro-batch and no number of GPUs
changes it: the trainer adds its moments and key to the batch (training/contrast.py).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from diffusion.contracts.batch import Batch
from diffusion.datasets.keyed_random import Draw, random_order
from diffusion.methods.method import TrainingMethod
from diffusion.objectives.objective import Outputs, weighted_error
from diffusion.recipe.methods import Contrastive

Target = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(moments (B, 2C, h, w), keys (B, 3), times (B,)) -> what the network should predict of such samples, (B, C, h, w)."""


class ContrastiveFlow(TrainingMethod):
    """Args: target: of samples by their moments, keys and times."""

    def __init__(self, settings: Contrastive, target: Target):
        super().__init__()
        self.weight, self._target = settings.weight, target

    def forward(self, error: Tensor, outputs: Outputs, batch: Batch) -> Tensor:
        other = self._target(batch['other_moments'], batch['other_key'], outputs.t)
        return error - self.weight * weighted_error(outputs.prediction, other, outputs.weight)


def partners(seed: int, key: Tensor) -> Tensor:
    """(B,) int64: for each sample of a global batch the position of another one, by (B, 3) keys in any order; B is at least 2.

    The samples form a ring in a random order that their keys decide, and each has the next one: all are partners once.
    """
    ring = random_order(seed, key, Draw.PARTNER)
    following = torch.empty_like(ring)
    following[ring] = ring.roll(-1)
    return following
