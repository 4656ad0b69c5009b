"""What a method is asked. It takes part in training passes alone: evaluation, sample grids and the export know nothing of it."""

from abc import ABC
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from diffusion.contracts.batch import Batch
from diffusion.objectives.objective import Outputs


class TrainingMethod(nn.Module, ABC):
    """Its own weights, if it has any, are trained, averaged, saved and sharded with the network's. What is frozen in it must not be registered."""

    def begin(self, batch: Batch) -> None:
        """Called before each forward pass of a training micro-batch, whose backward pass ends before the next call."""

    def forward(self, error: Tensor, outputs: Outputs, batch: Batch) -> Tensor:
        """(B,) float32 losses of the samples from those without this method. Each depends on its own sample alone, so that neither the
        micro-batch nor the number of GPUs changes the mean."""
        return error

    def flops(self, size: tuple[int, int]) -> int:
        """FLOP of a training pass for a sample with latents of this (height, width), besides the network's."""
        return 0

    def to_device(self, device: Any, **placement: Any) -> None:
        """Move what is frozen in it, which `nn.Module.to` does not see."""

    @property
    def digests(self) -> Mapping[str, str]:
        """SHA-256 of frozen weights by name: a run that resumes must find the same."""
        return {}
