"""Sample grids with fixed prompts and fixed noise: the same images improve during training."""

import json
from abc import abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
from composer.core import Callback, State, get_precision_context
from composer.loggers import Logger
from composer.utils import dist
from PIL import Image

from diffusion.common.collective import unwrap_model
from diffusion.common.files import replacing
from diffusion.common.images import grid, save_png, to_pil
from diffusion.common.stopwatch import phase
from diffusion.faults import preemption
from diffusion.recipe.keys import Duration
from diffusion.recipe.schema import Samples, present


class AtIntervals(Callback):
    """Draw before the first step, at intervals and at the end.

    Args:
        every: interval in batches.
    """

    def __init__(self, every: Duration):
        self.every_batches = every.batches

    @abstractmethod
    def draw(self, state: State, logger: Logger) -> None:
        """Draw with the weights as they are; all ranks call it."""

    def fit_start(self, state: State, logger: Logger) -> None:
        if state.timestamp.batch.value == 0:
            self.draw(state, logger)

    def batch_end(self, state: State, logger: Logger) -> None:
        if state.timestamp.batch.value % self.every_batches == 0 and not preemption.agreed():
            self.draw(state, logger)

    def fit_end(self, state: State, logger: Logger) -> None:
        if state.timestamp.batch.value % self.every_batches != 0:
            self.draw(state, logger)


class ImageGrid(AtIntervals):
    """Draw a grid, with EMA weights once there are any.

    Under DDP every rank holds the whole model: rank 0 draws, the others continue and meet it in the next step. Where the model is
    sharded every rank takes part, because each forward pass gathers the weights.

    Args:
        every: interval in batches.
        folder: PNG files are written here, `ba00001000-ema.png`.
        averaged: context in which the model holds the EMA if there is one; yields the name of the weights, `ema` or `training`.
    """

    def __init__(self, every: Duration, folder: Path, averaged: Callable[[State], AbstractContextManager[str]]):
        super().__init__(every)
        self.folder, self.averaged = folder, averaged

    @abstractmethod
    def image(self, model: Any) -> Image.Image:
        """The grid, with the weights that the model, in eval mode, holds."""

    @abstractmethod
    def texts(self) -> dict[str, str]:
        """Return what the grid shows, for its file."""

    def draw(self, state: State, logger: Logger) -> None:
        if dist.get_global_rank() != 0 and not state.fsdp_enabled:
            return
        with phase('sampling'):
            self._draw(state, logger)

    def _draw(self, state: State, logger: Logger) -> None:
        model = unwrap_model(state)
        was_training = model.training
        model.eval()
        with self.averaged(state) as weights, get_precision_context(state.precision):
            image = self.image(model)
        model.train(was_training)
        if dist.get_global_rank() != 0:
            return
        with replacing(self.folder / grid_name(state.timestamp.batch.value, weights)) as temporary:
            save_png(image, temporary, self.texts())
        logger.log_images([np.asarray(image)], name=f'samples/{weights}', channels_last=True, step=state.timestamp.batch.value)


class SampleGrid(ImageGrid):
    """Grid of the recipe's prompts.

    Args:
        samples: the recipe's `log.samples` section.
        resolution: side of the images in pixels.
        folder, averaged: as ImageGrid has them.
    """

    def __init__(self, samples: Samples, resolution: int, folder: Path, averaged: Callable[[State], AbstractContextManager[str]]):
        assert samples.every is not None
        super().__init__(samples.every, folder, averaged)
        self.samples, self.resolution = samples, resolution

    def image(self, model: Any) -> Image.Image:
        return draw_grid(model, self.samples, self.resolution)

    def texts(self) -> dict[str, str]:
        return grid_texts(self.samples)


def draw_grid(model: Any, samples: Samples, resolution: int) -> Image.Image:
    """The grid of all prompts, with the weights that a TextToImage in eval mode holds."""
    images = model.generate(list(present(samples.prompts).values()), resolution, samples.guidance, samples.steps, samples.seed)
    return grid([to_pil(image) for image in images])


def grid_name(batch: int, weights: str) -> str:
    """The file of a grid, `ba00001000-ema.png`."""
    return f'ba{batch:08d}-{weights}.png'


def grid_texts(samples: Samples) -> dict[str, str]:
    """Texts in the file of a grid, which say what it shows: a resumed run may have other prompts, or draw them otherwise."""
    settings = {'guidance': samples.guidance, 'steps': samples.steps, 'seed': samples.seed}
    return {'prompts': json.dumps(list(present(samples.prompts).values())), 'settings': json.dumps(settings)}  # the report reads the prompts
