"""TREAD (arXiv 2501.04765): in each training pass a random part of the image's tokens skips a range of blocks and comes back behind it.

The blocks then cost less, and what skips them reaches the deeper ones unchanged. Which tokens stay is keyed by the sample. Attached by
hooks: the network's code, its weights and how it draws are as without.
"""

import inspect
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from diffusion.contracts.batch import Batch
from diffusion.datasets.keyed_random import Draw, uniform
from diffusion.methods.method import MethodContext, TrainingMethod
from diffusion.recipe.techniques import Routing


def attach(settings: Routing, context: MethodContext) -> TrainingMethod:
    return TokenRouting(settings, context.blocks, context.token_arguments, context.seed)


class TokenRouting(TrainingMethod):
    """Args:
    blocks: through which the tokens pass one after another.
    token_arguments: of a block's forward function: the arguments that lie along the tokens, and in which dimension; the first is what it returns.
    seed: of the run, which keys the choice together with each sample's key.
    """

    def __init__(self, settings: Routing, blocks: Sequence[nn.Module], token_arguments: Mapping[str, int], seed: int):
        super().__init__()
        self.keep, self.seed = settings.keep, seed
        self.stream, *_ = token_arguments
        self.dimensions = dict(token_arguments)
        self._key: Tensor | None = None  # (B, 3)
        self._kept: Tensor | None = None  # (B, K) int64 positions of tokens that stay, ascending
        self._before: Tensor | None = None  # (B, L, D) all tokens before the first block
        routed = blocks[settings.first_block : settings.last_block + 1]
        names = tuple(inspect.signature(type(blocks[0]).forward).parameters)[1:]
        for number, block in enumerate(routed):
            block.register_forward_pre_hook(partial(self._leave, names=names, first=number == 0), with_kwargs=True)
        routed[-1].register_forward_hook(self._return)

    def begin(self, batch: Batch) -> None:
        self._key, self._kept, self._before = batch['sample_key'], None, None

    def _leave(
        self, block: nn.Module, args: tuple, kwargs: dict[str, Any], names: tuple[str, ...], first: bool
    ) -> tuple[tuple, dict[str, Any]] | None:
        """The block's arguments without the tokens that skip it. Without gradients, as networks are evaluated and draw, none does."""
        if self._key is None or not torch.is_grad_enabled():
            return None
        named = dict(zip(names[: len(args)], args, strict=True)) | kwargs
        if first:
            self._before = named[self.stream]
            self._kept = kept_tokens(self.seed, self._key, self._before.shape[1], self.keep)
        assert self._kept is not None
        narrowed = {name: selected(named[name], dim, self._kept) for name, dim in self.dimensions.items() if first or name != self.stream}
        return (), named | narrowed

    def _return(self, block: nn.Module, args: tuple, output: Tensor) -> Tensor | None:
        if self._key is None or not torch.is_grad_enabled():
            return None
        assert self._before is not None
        assert self._kept is not None
        return self._before.to(output.dtype).scatter(1, self._kept[:, :, None].expand(output.shape), output)


def kept_tokens(seed: int, key: Tensor, num_tokens: int, keep: float) -> Tensor:
    """(B, K) int64: for each of the (B, 3) sample keys the positions of K different tokens, ascending.

    K = ceil(keep x tokens): the same for all samples, since they share a tensor.
    """
    order = uniform(seed, key, Draw.ROUTING, num_tokens).argsort(dim=1, stable=True)  # a random permutation
    return order[:, : math.ceil(keep * num_tokens)].sort(dim=1).values


def selected(tensor: Tensor, dim: int, kept: Tensor) -> Tensor:
    """Gather tokens at (B, K) positions from a tensor (B, ...) whose dimension `dim` lies along the tokens."""
    shape = [1] * tensor.ndim
    shape[0], shape[dim] = kept.shape
    size = [*tensor.shape]
    size[dim] = kept.shape[1]
    return tensor.gather(dim, kept.view(shape).expand(size))
