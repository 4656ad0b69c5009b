"""Moving averages of the trained weights, in float32, updated in place.

Unlike Composer's own EMA it averages trainable floating-point parameters only, allocates nothing before it starts, makes
no temporaries (`torch._foreach_lerp_`), and leaves the training weights in the checkpoint's model slot: the average has a
slot of its own. It is swapped in for evaluation and sampling by a context, so nothing else ever sees it by accident. Of several averages the first
is that one; the others are for `diffusion.export --sigma-rel`.

Where the weights are sharded each rank averages its own shards: an update communicates nothing. In a checkpoint the
average is whole and its names are those of the bare network, so that it moves between shardings, world sizes and compilation.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from composer.core import Algorithm, Event, State
from composer.loggers import Logger
from composer.utils import dist
from torch import Tensor, nn

from diffusion.recipe.averaging import Profile
from diffusion.training.sharding import gathered, local, reshard, scattered

# During fit, and when `trainer.eval()` is called by itself.
SWAP_BACK_EVENTS = (Event.EVAL_AFTER_ALL, Event.EVAL_STANDALONE_END)
SWAP_EVENTS = (Event.EVAL_BEFORE_ALL, Event.EVAL_STANDALONE_START, *SWAP_BACK_EVENTS)


class EMA(Algorithm):
    """Args:
    profiles: of the averages, one or more.
    start: batch after which averaging starts; until then there is no average and nothing is allocated.
    interval: batches between updates; what an update keeps accounts for it.
    offload: keep the averages in the host's memory; an update then copies the weights there.
    """

    def __init__(self, profiles: Sequence[Profile], start: int = 0, interval: int = 1, offload: bool = False):
        self.start_batch, self.interval_batches, self.profiles, self.offload = start, interval, profiles, offload
        self.averages: list[dict[str, Tensor]] = []  # this rank's shards; empty before the start
        self._loaded: list[dict[str, Tensor]] = []  # whole, from a checkpoint, until the weights they belong to are seen
        self._model: nn.Module | None = None  # whose weights `_parameters` are
        self._parameters: dict[str, nn.Parameter] = {}
        self._swapped = False

    @property
    def started(self) -> bool:
        return bool(self.averages or self._loaded)

    @property
    def average(self) -> dict[str, Tensor]:
        """The first, by name of the parameter."""
        return self.averages[0]

    def begun(self, batch: int) -> bool:
        """Whether a run has an average after `batch` batches."""
        return batch >= (self.start_batch or self.interval_batches)

    def saved_tensors(self, model: nn.Module, batch: int) -> dict[str, Any]:
        """The averages, which have the shapes of the weights; nothing before their first update."""
        return _named([trained_parameters(model)] * len(self.profiles)) if self.begun(batch) else {}

    def match(self, event: Event, state: State) -> bool:
        batch = state.timestamp.batch.value  # at BATCH_END the finished batch is already counted
        if event == Event.BATCH_END:
            return batch >= self.start_batch and (batch - self.start_batch) % self.interval_batches == 0
        return event in SWAP_EVENTS and self.started

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        if event == Event.BATCH_END:
            batch = state.timestamp.batch.value
            self.update(state.model, *(profile.kept(batch - self.interval_batches, batch) for profile in self.profiles))
        else:
            assert self._swapped == (event in SWAP_BACK_EVENTS)
            self.swap(state.model)

    @torch.no_grad()
    def update(self, model: nn.Module, *keep: float) -> None:
        """Keep these shares of the averages (0..1), the rest comes from the weights; the first call copies them."""
        assert not self._swapped, 'the average cannot be updated while it is swapped in'
        if not self.started:
            self._model, self._parameters = model, trained_parameters(model)
            weights = {name: local(p.detach()) for name, p in self._parameters.items()}
            self.averages = [{name: self._placed(weight, copy=True) for name, weight in weights.items()} for _ in self.profiles]
            return
        placed = [self._placed(weight) for weight in self._weights(model)]
        for average, share in zip(self.averages, keep, strict=True):
            torch._foreach_lerp_(list(average.values()), placed, 1 - share)

    @torch.no_grad()
    def swap(self, model: nn.Module) -> None:
        """Exchange weights and the first average in place; a second call restores both exactly (for float32 parameters)."""
        reshard(model)
        for weights, average in zip(self._weights(model), self.average.values(), strict=True):
            before = weights.clone()
            weights.copy_(average)
            average.copy_(before)
        self._swapped = not self._swapped

    def _placed(self, weights: Tensor, copy: bool = False) -> Tensor:
        return weights.to('cpu' if self.offload else weights.device, torch.float32, copy=copy)

    def _weights(self, model: nn.Module) -> list[Tensor]:
        """This rank's shards of the weights, in the order of each average.

        Raises:
            KeyError: the names differ; skipping some, as Composer does, would silently stop averaging them.
        """
        if self._model is not model or not self.averages:
            self._match(model)
        return [local(p.detach()) for p in self._parameters.values()]

    def _match(self, model: nn.Module) -> None:
        """Find the weights that belong to the averages; not in every update, because names take the host milliseconds."""
        parameters = trained_parameters(model)
        for theirs in self.averages or self._loaded:
            if theirs.keys() != parameters.keys():
                odd = sorted(theirs.keys() ^ parameters.keys())
                raise KeyError(f'the EMA and the model differ in {len(odd)} of {len(parameters)} parameters, such as {odd[:3]}')
        if not self.averages:
            self.averages = [{name: self._placed(scattered(theirs[name], p)) for name, p in parameters.items()} for theirs in self._loaded]
            self._loaded = []
        self._model, self._parameters = model, {name: parameters[name] for name in self.average}

    def state_dict(self) -> dict[str, Any]:
        """The whole averages, on rank 0; every rank must call it."""
        assert not self._swapped, 'a checkpoint taken while the average is swapped in would confuse the two'
        if not self.averages:
            return _named(self._loaded or [None] * len(self.profiles))
        return _named([self._whole(average) for average in self.averages])

    def _whole(self, average: dict[str, Tensor]) -> dict[str, Tensor]:
        whole = {}
        for name, shard in average.items():
            parameter = self._parameters[name]
            tensor = gathered(shard.to(parameter.device), parameter)  # one at a time: a GPU need not hold them all
            if dist.get_global_rank() == 0:
                whole[name] = tensor.cpu()
        return whole

    def load_state_dict(self, state: dict[str, Any], strict: bool = False) -> None:
        loaded = [state['average'], *state.get('others', [])]
        self._loaded, self.averages = [] if loaded[0] is None else loaded, []


def _named(averages: Sequence[Any]) -> dict[str, Any]:
    """Name averages as a checkpoint does; a run with one average has the same names as before there could be several."""
    first, *others = averages
    return {'average': first, 'others': others} if others else {'average': first}


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
