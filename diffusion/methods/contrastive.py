"""Contrastive flow matching (arXiv 2506.05350, eq. 8): besides approaching its own target, a prediction moves away from that of another sample.

The loss is |v - target|^2 - weight |v - other|^2. The other sample is drawn from the whole global batch, so that no micro-batch and no number of GPUs
changes it. Its moments are gathered on the device: 16 KB a sample at 256 px with 4 channels, little next to the gradients.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from diffusion.contracts.batch import Batch
from diffusion.datasets.keyed_random import Draw, random_order
from diffusion.methods.method import MethodContext, Target, TrainingMethod
from diffusion.objectives.objective import Outputs, weighted_error
from diffusion.recipe.techniques import Contrastive


def attach(settings: Contrastive, context: MethodContext) -> TrainingMethod:
    return ContrastiveFlow(settings, context.target, context.seed)


class ContrastiveFlow(TrainingMethod):
    """Args:
    target: of samples by their moments, keys and times.
    seed: of the run.
    """

    def __init__(self, settings: Contrastive, target: Target, seed: int):
        super().__init__()
        self.weight, self._target, self.seed = settings.weight, target, seed

    def from_global_batch(self, everyones: Callable[[str], Tensor], mine: slice) -> dict[str, Tensor]:
        key, moments = everyones('sample_key'), everyones('moments')
        other = partners(self.seed, key)[mine]
        return {'other_moments': moments[other], 'other_key': key[other]}

    def forward(self, error: Tensor, outputs: Outputs, batch: Batch) -> Tensor:
        other = self._target(batch['other_moments'], batch['other_key'], outputs.t)
        return error - self.weight * weighted_error(outputs.prediction, other, outputs.weight, outputs.loss_map)


def partners(seed: int, key: Tensor) -> Tensor:
    """(B,) int64: for each sample of a global batch the position of another one, by (B, 3) keys in any order; B is at least 2.

    The samples form a ring in a random order that their keys decide, and each has the next one: all are partners once.
    """
    ring = random_order(seed, key, Draw.PARTNER)
    following = torch.empty_like(ring)
    following[ring] = ring.roll(-1)
    return following
