"""Clip the global gradient norm, and log what it was: a diverging run shows there first."""

from __future__ import annotations

import torch
from composer.core import Algorithm, Event, State
from composer.loggers import Logger


class ClipGradNorm(Algorithm):
    """Scales gradients down to a global norm of at most `max_norm`, after the backward pass and before the optimizer.

    Composer's own GradientClipping does the same and discards the norm. It stays on the device here; loggers fetch it when
    they write.
    """

    def __init__(self, max_norm: float):
        self.max_norm = max_norm

    def match(self, event: Event, state: State) -> bool:
        return event == Event.AFTER_TRAIN_BATCH

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        parameters = [parameter for parameter in state.model.parameters() if parameter.grad is not None]
        logger.log_metrics({'grad_norm': torch.nn.utils.clip_grad_norm_(parameters, self.max_norm)})
