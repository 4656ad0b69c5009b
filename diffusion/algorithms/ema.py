"""Exponential moving average of the trained weights, in float32, updated in place.

Unlike Composer's own EMA it averages trainable floating-point parameters only, allocates nothing before it starts, makes
no temporaries (`torch._foreach_lerp_`), and leaves the training weights in the checkpoint's model slot: the average has a
slot of its own. It is swapped in for evaluation and sampling by a context, so nothing else ever sees it by accident.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from composer.core import Algorithm, Event, State
from composer.loggers import Logger
from torch import Tensor, nn

from diffusion.recipe import parse_duration

# During fit, and when `trainer.eval()` is called by itself.
SWAP_BACK_EVENTS = (Event.EVAL_AFTER_ALL, Event.EVAL_STANDALONE_END)
SWAP_EVENTS = (Event.EVAL_BEFORE_ALL, Event.EVAL_STANDALONE_START, *SWAP_BACK_EVENTS)


class EMA(Algorithm):
    """Args:
    half_life: batches (`6931ba`) after which half of the average is newer.
    start: when averaging starts; until then there is no average and nothing is allocated.
    interval: batches between updates; the decay accounts for it.
    """

    def __init__(self, half_life: str, start: str = '0ba', interval: str = '1ba'):
        self.start_batch = parse_duration(start).value
        self.interval_batches = parse_duration(interval).value
        self.half_life_batches = parse_duration(half_life).value
        self.decay = 0.5 ** (self.interval_batches / self.half_life_batches)
        self.average: dict[str, Tensor] | None = None
        self._swapped = False

    def match(self, event: Event, state: State) -> bool:
        batch = state.timestamp.batch.value  # at BATCH_END the finished batch is already counted
        if event == Event.BATCH_END:
            return batch >= self.start_batch and (batch - self.start_batch) % self.interval_batches == 0
        return event in SWAP_EVENTS and self.average is not None

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        if event == Event.BATCH_END:
            self.update(state.model)
        else:
            assert self._swapped == (event in SWAP_BACK_EVENTS)
            self.swap(state.model)

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Move the average towards the weights; the first call copies them."""
        assert not self._swapped, 'the average cannot be updated while it is swapped in'
        parameters = trained_parameters(model)
        if self.average is None:
            self.average = {name: p.detach().to(torch.float32, copy=True) for name, p in parameters.items()}
            return
        average = self._matched(parameters)
        current = [p.detach() if p.dtype == torch.float32 else p.detach().float() for p in parameters.values()]
        torch._foreach_lerp_(average, current, 1 - self.decay)

    @torch.no_grad()
    def swap(self, model: nn.Module) -> None:
        """Exchange weights and average in place; a second call restores both exactly (for float32 parameters)."""
        parameters = trained_parameters(model)
        for parameter, average in zip(parameters.values(), self._matched(parameters), strict=True):
            weights = parameter.detach().clone()
            parameter.copy_(average)
            average.copy_(weights)
        self._swapped = not self._swapped

    def _matched(self, parameters: dict[str, nn.Parameter]) -> list[Tensor]:
        """The average in the order of `parameters`, moved to their devices.

        Raises:
            KeyError: the names differ; skipping some, as Composer does, would stop averaging them without a word.
        """
        assert self.average is not None
        if self.average.keys() != parameters.keys():
            odd = sorted(self.average.keys() ^ parameters.keys())
            raise KeyError(f'the EMA and the model differ in {len(odd)} of {len(parameters)} parameters, such as {odd[:3]}')
        for name, parameter in parameters.items():
            if self.average[name].device != parameter.device:  # a checkpoint is loaded to the CPU
                self.average[name] = self.average[name].to(parameter.device)
        return [self.average[name] for name in parameters]

    def state_dict(self) -> dict[str, Any]:
        assert not self._swapped, 'a checkpoint taken while the average is swapped in would confuse the two'
        return {'average': self.average}

    def load_state_dict(self, state: dict[str, Any], strict: bool = False) -> None:
        self.average = state['average']


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Trainable floating-point parameters under the names they have without wrappers (DDP, torch.compile)."""
    return {
        name.replace('module.', '').replace('_orig_mod.', ''): parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and parameter.is_floating_point()
    }


@contextmanager
def averaged_weights(state: State) -> Iterator[str]:
    """Within the context the model holds the EMA if there is one; yields `'ema'` or `'training'`, whichever it holds."""
    ema = next((algorithm for algorithm in state.algorithms if isinstance(algorithm, EMA)), None)
    if ema is None or ema.average is None:
        yield 'training'
        return
    ema.swap(state.model)
    try:
        yield 'ema'
    finally:
        ema.swap(state.model)
