"""Training methods: what one is asked, and how those of a recipe are attached to a network.

`methods.NAME` of a recipe is NAME.py in this folder, whose function `attach` makes a TrainingMethod. What can be answered without torch
(contradictions, the blocks that it works on, whether it changes FLOP) its section answers: diffusion/recipe/techniques.py.
"""

import importlib
from abc import ABC
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from diffusion.contracts.batch import Batch
from diffusion.objectives.objective import Outputs
from diffusion.recipe import RecipeError
from diffusion.recipe.techniques import Methods, switched_on

Target = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(moments (B, 2C, h, w), keys (B, 3), times (B,)) -> what the network should predict of such samples, (B, C, h, w)."""


class TrainingMethod(nn.Module, ABC):
    """Takes part in training passes alone: evaluation, sample grids and the export know nothing of it. Its own weights, if it has any, are trained,
    averaged, saved and sharded with the network's. What is frozen in it must not be registered."""

    def from_global_batch(self, everyones: Callable[[str], Tensor], mine: slice) -> dict[str, Tensor]:
        """Tensors to add to this rank's batch before it is split into micro-batches, made of what all ranks have. Called on all ranks alike.

        Args:
            everyones: gathers an entry of the batch, by its name, over all ranks: (global batch, ...) on the device.
            mine: the rows of this rank.
        """
        return {}

    def begin(self, batch: Batch) -> None:
        """Called before each forward pass of a training micro-batch, whose backward pass ends before the next call."""

    def forward(self, error: Tensor, outputs: Outputs, batch: Batch) -> Tensor:
        """(B,) float32 losses of the samples from those without this method. Each depends on its own sample alone, so that neither the
        micro-batch nor the number of GPUs changes the mean."""
        return error

    def flops(self, size: tuple[int, int]) -> int:
        """FLOP of a training pass for a sample with latents of this (height, width), besides the network's."""
        return 0

    def log_values(self) -> Mapping[str, Tensor]:
        """Numbers () of the last micro-batch on the device; logged as `loss/train/NAME`, averaged over the ranks."""
        return {}

    def to_device(self, device: Any, **placement: Any) -> None:
        """Move what is frozen in it, which `nn.Module.to` does not see."""

    @property
    def digests(self) -> Mapping[str, str]:
        """SHA-256 of frozen weights by name: a run that resumes must find the same."""
        return {}


class MethodContext(NamedTuple):
    """The training that a method is attached to.

    Attributes:
        blocks: of a network with tokens, through which they pass one after another, as (B, L, D).
        token_arguments: see families/family.py.
        width: channels D of a token.
        patch: latents along a side of a token.
        end: the objective's times lie in [0, end].
        target: what the network should predict of samples, by their moments, keys and times.
        seed: of the run.
    """

    blocks: Sequence[nn.Module]
    token_arguments: Mapping[str, int]
    width: int
    patch: int
    end: float
    target: Target
    seed: int


def attach(methods: Methods, context: MethodContext) -> dict[str, TrainingMethod]:
    """The methods that are on, by name, in the order of the schema: in that order they change the loss, and hooks of a block are called.

    Raises:
        RecipeError: the network has no such block, or a feature network cannot be read.
    """
    on, num_blocks = switched_on(methods), len(context.blocks)
    errors = [
        f'methods.{name}.{key}: there is no block {block}; the network has {num_blocks}, counted from 0'
        for name, settings in on.items()
        for key, block in settings.blocks().items()
        if block >= num_blocks
    ]
    if errors:
        raise RecipeError('methods', errors)
    return {name: importlib.import_module(f'diffusion.methods.{name}').attach(settings, context) for name, settings in on.items()}
