"""Loss weights by the uncertainty of each noise level, learned while training, as in EDM2 (arXiv 2312.02696; after arXiv 1705.07115).

With e(t) the error at time t the loss is e / exp(u(t)) + u(t), which is smallest where exp(u(t)) is the mean error at t: all noise levels then
weigh alike in the gradient, however large their errors are. u is not part of the model.
"""

import math

import torch
from torch import Tensor, nn

from diffusion.contracts.batch import Batch
from diffusion.methods.method import MethodContext, TrainingMethod
from diffusion.objectives.objective import Outputs
from diffusion.recipe.techniques import Uncertainty


def attach(settings: Uncertainty, context: MethodContext) -> TrainingMethod:
    return LearnedWeights(settings, context.end)


class LearnedWeights(TrainingMethod):
    """u(t) is linear in cosines of t, where EDM2 takes random Fourier features of ln sigma: nothing is drawn, and both objectives' times serve.

    u begins at 0, which leaves the loss as it was.

    Args:
        end: times lie in [0, end].
    """

    def __init__(self, settings: Uncertainty, end: float):
        super().__init__()
        self.end = end
        self.log_error = nn.Linear(settings.num_cosines, 1, bias=False)
        nn.init.zeros_(self.log_error.weight)

    def forward(self, error: Tensor, outputs: Outputs, batch: Batch) -> Tensor:
        with torch.autocast(error.device.type, enabled=False):
            u = self.log_error(self.cosines(outputs.t))[:, 0]
            return error * torch.exp(-u) + u

    def cosines(self, t: Tensor) -> Tensor:
        """(B, K) float32 of (B,) times: cos(pi k t / end), k = 0, 1, ..., K - 1."""
        k = torch.arange(self.log_error.in_features, device=t.device)
        return torch.cos(math.pi * k * (t.to(torch.float32) / self.end)[:, None])
