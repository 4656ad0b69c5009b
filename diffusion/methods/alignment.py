"""REPA (arXiv 2410.06940): tokens inside the network are pulled towards what a frozen feature network says of the same patches of the clean image.

A small network that is trained with the rest projects the tokens after one block to the width of the features; the loss is
`weight` x (1 - mean over the patches of their cosine similarity). Nothing flows into the feature network.
"""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from diffusion.contracts.batch import Batch
from diffusion.contracts.errors import EncoderError
from diffusion.encoders.patches import PatchFeatures
from diffusion.methods.method import MethodContext, TrainingMethod
from diffusion.objectives.objective import Outputs
from diffusion.recipe import RecipeError
from diffusion.recipe.techniques import Alignment


def attach(settings: Alignment, context: MethodContext) -> TrainingMethod:
    """Raises RecipeError: the feature network cannot be read."""
    try:
        features = PatchFeatures.find(settings.source, settings.revision)
    except EncoderError as error:
        raise RecipeError('methods', [f'methods.alignment.source: {error}']) from error
    return FeatureAlignment(settings, context.blocks, context.width, context.patch, features)


class FeatureAlignment(TrainingMethod):
    """Args:
    blocks: through which the tokens pass one after another; each returns them as (B, L, D).
    width: channels D of a token.
    patch: latents along a side of a token.
    features: the frozen network.
    """

    def __init__(self, settings: Alignment, blocks: Sequence[nn.Module], width: int, patch: int, features: PatchFeatures):
        super().__init__()
        self.weight, self.patch = settings.weight, patch
        self._features = [features]  # in a list, so that nn.Module does not register it
        self.projection = nn.Sequential(  # as in the paper's code: three layers
            nn.Linear(width, settings.width),
            nn.SiLU(),
            nn.Linear(settings.width, settings.width),
            nn.SiLU(),
            nn.Linear(settings.width, features.width),
        )
        self._tokens: Tensor | None = None
        self._added: Tensor | None = None  # mean of what it adds to the loss
        blocks[settings.block].register_forward_hook(self._see)

    @property
    def features(self) -> PatchFeatures:
        return self._features[0]

    def begin(self, batch: Batch) -> None:
        self._tokens = None

    def _see(self, block: nn.Module, args: tuple, output: Tensor) -> None:
        if torch.is_grad_enabled():
            self._tokens = output

    def forward(self, error: Tensor, outputs: Outputs, batch: Batch) -> Tensor:
        assert self._tokens is not None
        height, width = outputs.target.shape[-2:]
        wanted = self.features.encode(batch['images'], (height // self.patch, width // self.patch))
        projected = self.projection(self._tokens)
        self._tokens = None
        added = self.weight * (1 - torch.nn.functional.cosine_similarity(projected.float(), wanted, dim=-1).mean(dim=1))
        self._added = added.detach().mean()
        return error + added

    def log_values(self) -> dict[str, Tensor]:
        return {} if self._added is None else {'alignment': self._added}

    def flops(self, size: tuple[int, int]) -> int:
        """The feature network's forward pass, and the projection forward and back (1 MAC = 2 FLOP)."""
        grid = size[0] // self.patch, size[1] // self.patch
        tokens = torch.zeros((1, grid[0] * grid[1], self.projection[0].in_features), requires_grad=True, device='meta')  # type: ignore[arg-type]
        with FlopCounterMode(display=False) as counter:
            copy.deepcopy(self.projection).to('meta')(tokens).sum().backward()
        return counter.get_total_flops() + self.features.flops(grid)

    def to_device(self, device: Any, **placement: Any) -> None:
        self.features.to(device, **placement)

    @property
    def digests(self) -> dict[str, str]:
        return {'alignment': self.features.sha256}
