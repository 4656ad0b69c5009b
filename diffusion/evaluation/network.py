"""What feature networks have in common: frozen, named by their digest, and as precise as float32 is on any GPU."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Generic, Self, TypeVar

import torch
from torch import nn
from torch.backends import cuda, cudnn

from diffusion.encoders.frozen_part import any_kernel

Module = TypeVar('Module', bound=nn.Module)


class FeatureNetwork(Generic[Module]):
    """The attributes of an Extractor, and the network behind it.

    Args:
        name: as in EXTRACTORS.
        sha256: of the file of weights.
        features: dimensions by name.
        module: on the CPU; it is frozen here.
    """

    def __init__(self, name: str, sha256: str, features: Mapping[str, int], module: Module):
        self.name, self.sha256, self.features = name, sha256, features
        self.module = module.eval().requires_grad_(False)
        self.device = torch.device('cpu')

    def to(self, device: torch.device | str) -> Self:
        """Move the network; images may be on any device and are moved there, too."""
        self.device = torch.device(device)
        self.module.to(self.device)
        return self


@contextmanager
def precise() -> Iterator[None]:
    """Context, also a decorator, of a network's calls: no gradients, float32 throughout, the same algorithms each time, any kernel of attention.

    cuDNN multiplies in TF32 (10 bits) unless told not to, and may choose among convolutions by time; a run may have allowed TF32 for products, too.
    """
    allowed = cuda.matmul.allow_tf32
    cuda.matmul.allow_tf32 = False
    full = cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False)
    try:
        with torch.inference_mode(), torch.autocast('cuda', enabled=False), any_kernel(), full:
            yield
    finally:
        cuda.matmul.allow_tf32 = allowed
