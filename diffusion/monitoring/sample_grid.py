"""Sample grids with fixed prompts and fixed noise: the same picture getting better."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
from composer.core import Callback, State, get_precision_context
from composer.loggers import Logger
from composer.utils import dist
from PIL.PngImagePlugin import PngInfo

from diffusion.common.files import replacing
from diffusion.common.images import grid, to_pil
from diffusion.common.stopwatch import phase
from diffusion.faults import preemption
from diffusion.recipe.schema import Samples


class SampleGrid(Callback):
    """Draws before the first step, at intervals and at the end, with EMA weights once there are any.

    Under DDP every rank holds the whole model: rank 0 draws, the others go on and meet it in the next step. Where the model is
    sharded every rank takes part, because each forward pass gathers the weights.

    Args:
        samples: the recipe's `log.samples` section.
        resolution: side of the pictures in pixels.
        folder: PNG files are written here, `ba00001000-ema.png`.
        averaged: context in which the model holds the EMA if there is one; yields the name of the weights, `ema` or `training`.
    """

    def __init__(self, samples: Samples, resolution: int, folder: Path, averaged: Callable[[State], AbstractContextManager[str]]):
        assert samples.every is not None
        self.samples, self.resolution, self.folder, self.averaged = samples, resolution, folder, averaged
        self.every_batches = samples.every.batches

    def fit_start(self, state: State, logger: Logger) -> None:
        if state.timestamp.batch.value == 0:
            self.draw(state, logger)

    def batch_end(self, state: State, logger: Logger) -> None:
        if state.timestamp.batch.value % self.every_batches == 0 and not preemption.agreed():
            self.draw(state, logger)

    def fit_end(self, state: State, logger: Logger) -> None:
        if state.timestamp.batch.value % self.every_batches != 0:
            self.draw(state, logger)

    def draw(self, state: State, logger: Logger) -> None:
        if dist.get_global_rank() != 0 and not state.fsdp_enabled:
            return
        with phase('sampling'):
            self._draw(state, logger)

    def _draw(self, state: State, logger: Logger) -> None:
        model: Any = getattr(state.model, 'module', state.model)
        was_training = model.training
        model.eval()
        with self.averaged(state) as weights, get_precision_context(state.precision):
            images = model.generate(
                list(self.samples.prompts.values()), self.resolution, self.samples.guidance, self.samples.steps, self.samples.seed
            )
        model.train(was_training)
        if dist.get_global_rank() != 0:
            return
        picture, info = grid([to_pil(image) for image in images]), PngInfo()
        info.add_text('prompts', json.dumps(list(self.samples.prompts.values())))  # for the report: a resumed run may have others
        with replacing(self.folder / f'ba{state.timestamp.batch.value:08d}-{weights}.png') as temporary:
            picture.save(temporary, pnginfo=info)
        logger.log_images([np.asarray(picture)], name=f'samples/{weights}', channels_last=True, step=state.timestamp.batch.value)
