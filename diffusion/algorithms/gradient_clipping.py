"""Clip the global gradient norm, and log what it was: a diverging run shows there first."""

from __future__ import annotations

from composer.core import Algorithm, Event, State
from composer.loggers import Logger

from diffusion.sharding import clip_grad_norm


class ClipGradNorm(Algorithm):
    """Scales gradients down to a global norm of at most `max_norm`, after the backward pass and before the optimizer.

    Composer's own GradientClipping does the same and discards the norm. It stays on the device here; loggers fetch it when
    they write, every `log_every` batches.
    """

    def __init__(self, max_norm: float, log_every: int = 1):
        self.max_norm, self.log_every = max_norm, log_every

    def match(self, event: Event, state: State) -> bool:
        return event == Event.AFTER_TRAIN_BATCH

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        norm = clip_grad_norm(state.model.parameters(), self.max_norm)
        if (state.timestamp.batch.value + 1) % self.log_every == 0:
            logger.log_metrics({'grad_norm': norm})  # type: ignore[dict-item]
