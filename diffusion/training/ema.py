"""Exponential moving average of the trained weights, in float32, updated in place.

Unlike Composer's own EMA it averages trainable floating-point parameters only, allocates nothing before it starts, makes
no temporaries (`torch._foreach_lerp_`), and leaves the training weights in the checkpoint's model slot: the average has a
slot of its own. It is swapped in for evaluation and sampling by a context, so nothing else ever sees it by accident.

Where the weights are sharded each rank averages its own shards: an update communicates nothing. In a checkpoint the
average is whole and its names are those of the bare network, so that it moves between shardings, world sizes and compilation.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from composer.core import Algorithm, Event, State
from composer.loggers import Logger
from composer.utils import dist
from torch import Tensor, nn

from diffusion.recipe.averaging import kept
from diffusion.training.sharding import gathered, local, reshard, scattered

# During fit, and when `trainer.eval()` is called by itself.
SWAP_BACK_EVENTS = (Event.EVAL_AFTER_ALL, Event.EVAL_STANDALONE_END)
SWAP_EVENTS = (Event.EVAL_BEFORE_ALL, Event.EVAL_STANDALONE_START, *SWAP_BACK_EVENTS)


class EMA(Algorithm):
    """Args:
    half_life: batches after which half of the average is newer; shorter early in a run (`diffusion.recipe.averaging.kept`).
    start: batch after which averaging starts; until then there is no average and nothing is allocated.
    interval: batches between updates; what an update keeps accounts for it.
    offload: keep the average in the host's memory; an update then copies the weights there.
    """

    def __init__(self, half_life: int, start: int = 0, interval: int = 1, offload: bool = False):
        self.start_batch, self.interval_batches, self.half_life_batches, self.offload = start, interval, half_life, offload
        self.average: dict[str, Tensor] | None = None  # this rank's shards
        self._loaded: dict[str, Tensor] | None = None  # whole, from a checkpoint, until the weights they belong to are seen
        self._model: nn.Module | None = None  # whose weights `_parameters` are
        self._parameters: dict[str, nn.Parameter] = {}
        self._swapped = False

    @property
    def started(self) -> bool:
        return self.average is not None or self._loaded is not None

    def begun(self, batch: int) -> bool:
        """Whether a run has an average after `batch` batches."""
        return batch >= (self.start_batch or self.interval_batches)

    def saved_tensors(self, model: nn.Module, batch: int) -> dict[str, Any]:
        """The average, which has the shapes of the weights; nothing before its first update."""
        return {'average': trained_parameters(model)} if self.begun(batch) else {}

    def match(self, event: Event, state: State) -> bool:
        batch = state.timestamp.batch.value  # at BATCH_END the finished batch is already counted
        if event == Event.BATCH_END:
            return batch >= self.start_batch and (batch - self.start_batch) % self.interval_batches == 0
        return event in SWAP_EVENTS and self.started

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        if event == Event.BATCH_END:
            batch = state.timestamp.batch.value
            self.update(state.model, kept(self.half_life_batches, batch - self.interval_batches, batch))
        else:
            assert self._swapped == (event in SWAP_BACK_EVENTS)
            self.swap(state.model)

    @torch.no_grad()
    def update(self, model: nn.Module, keep: float) -> None:
        """Keep this share of the average (0..1), the rest comes from the weights; the first call copies them."""
        assert not self._swapped, 'the average cannot be updated while it is swapped in'
        if not self.started:
            self._model, self._parameters = model, trained_parameters(model)
            self.average = {name: self._placed(local(p.detach()), copy=True) for name, p in self._parameters.items()}
            return
        pairs = self._pairs(model)
        torch._foreach_lerp_([average for _, average in pairs], [self._placed(weights) for weights, _ in pairs], 1 - keep)

    @torch.no_grad()
    def swap(self, model: nn.Module) -> None:
        """Exchange weights and average in place; a second call restores both exactly (for float32 parameters)."""
        reshard(model)
        for weights, average in self._pairs(model):
            before = weights.clone()
            weights.copy_(average)
            average.copy_(before)
        self._swapped = not self._swapped

    def _placed(self, weights: Tensor, copy: bool = False) -> Tensor:
        return weights.to('cpu' if self.offload else weights.device, torch.float32, copy=copy)

    def _pairs(self, model: nn.Module) -> list[tuple[Tensor, Tensor]]:
        """(weights, average) of this rank's shards.

        Raises:
            KeyError: the names differ; skipping some, as Composer does, would silently stop averaging them.
        """
        if self._model is not model or self.average is None:
            self._match(model)
        assert self.average is not None
        return [(local(p.detach()), self.average[name]) for name, p in self._parameters.items()]

    def _match(self, model: nn.Module) -> None:
        """Find the weights that belong to the average; not in every update, because names take the host milliseconds."""
        parameters = trained_parameters(model)
        theirs = self._loaded if self.average is None else self.average
        assert theirs is not None
        if theirs.keys() != parameters.keys():
            odd = sorted(theirs.keys() ^ parameters.keys())
            raise KeyError(f'the EMA and the model differ in {len(odd)} of {len(parameters)} parameters, such as {odd[:3]}')
        if self.average is None:
            self.average = {name: self._placed(scattered(theirs[name], p)) for name, p in parameters.items()}
            self._loaded = None
        self._model, self._parameters = model, parameters

    def state_dict(self) -> dict[str, Any]:
        """The whole average, on rank 0; every rank must call it."""
        assert not self._swapped, 'a checkpoint taken while the average is swapped in would confuse the two'
        if self.average is None:
            return {'average': self._loaded}
        whole = {}
        for name, shard in self.average.items():
            parameter = self._parameters[name]
            tensor = gathered(shard.to(parameter.device), parameter)  # one at a time: a GPU need not hold them all
            if dist.get_global_rank() == 0:
                whole[name] = tensor.cpu()
        return {'average': whole}

    def load_state_dict(self, state: dict[str, Any], strict: bool = False) -> None:
        self._loaded, self.average = state['average'], None


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Trainable floating-point parameters under the names they have without wrappers (DDP, torch.compile, activation checkpointing)."""
    return {
        re.sub(r'(^|(?<=\.))(module|_orig_mod|_checkpoint_wrapped_module)\.', '', name): parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and parameter.is_floating_point()
    }


@contextmanager
def averaged_weights(state: State) -> Iterator[str]:
    """Within the context the model holds the EMA if there is one; yields `'ema'` or `'training'`, whichever it holds."""
    ema = next((algorithm for algorithm in state.algorithms if isinstance(algorithm, EMA)), None)
    if ema is None or not ema.started:
        yield 'training'
        return
    ema.swap(state.model)
    try:
        yield 'ema'
    finally:
        ema.swap(state.model)
