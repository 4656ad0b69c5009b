"""What a run of an autoencoder does at its steps: begin with the discriminator, log the parts of the loss, show reconstructions."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from composer.core import Callback, State
from composer.loggers import Logger
from PIL import Image
from torch import Tensor

from diffusion.autoencoding.model import AutoencoderTraining
from diffusion.common.images import grid, to_pil
from diffusion.monitoring.sample_grid import ImageGrid
from diffusion.monitoring.sample_scores import EvaluationDataset
from diffusion.recipe.autoencoder import ReconstructionSamples

COLUMNS = 8  # of a grid


def bare(state: State) -> AutoencoderTraining:
    """The model without its wrapper."""
    model: Any = getattr(state.model, 'module', state.model)
    return model


class DiscriminatorStart(Callback):
    """Switches the discriminator and its loss on, by the number of the batch, which a resume restores.

    Args:
        share: of the run that is trained without them (0..1).
    """

    def __init__(self, share: float):
        self.share, self.first_batch = share, 0

    def fit_start(self, state: State, logger: Logger) -> None:
        assert state.max_duration is not None
        self.first_batch = round(self.share * state.max_duration.value)  # in batches (training/builder.py)

    def batch_start(self, state: State, logger: Logger) -> None:
        bare(state).discriminates = state.timestamp.batch.value >= self.first_batch


class LossParts(Callback):
    """Logs each loss before its weight, of this rank's last micro-batch, every `every` batches."""

    def __init__(self, every: int):
        self.every = every

    def after_train_batch(self, state: State, logger: Logger) -> None:
        if (state.timestamp.batch.value + 1) % self.every == 0:
            logger.log_metrics({f'loss/train/{name}': part for name, part in bare(state).parts.items()})  # type: ignore[misc]


class ReconstructionGrid(ImageGrid):
    """Rows of originals, each above the row of their reconstructions.

    Args:
        samples: the recipe's `log.samples` section.
        dataset: of the evaluation data.
        folder, averaged: as ImageGrid has them.
    """

    def __init__(
        self, samples: ReconstructionSamples, dataset: EvaluationDataset, folder: Path, averaged: Callable[[State], AbstractContextManager[str]]
    ):
        assert samples.every is not None
        super().__init__(samples.every, folder, averaged)
        count = min(samples.count, dataset.num_samples)
        self.dataset, self.ids = dataset, [i * dataset.num_samples // count for i in range(count)]
        self._originals: Tensor | None = None

    def image(self, model: AutoencoderTraining) -> Image.Image:
        if self._originals is None:
            self._originals = torch.stack([self.dataset.view(i, 0)['images'] for i in self.ids])
        originals = self._originals.to(model.device)
        pairs = zip(originals.split(COLUMNS), model.reconstruct(originals).split(COLUMNS), strict=True)
        blank = torch.full_like(originals[0], 255)
        rows = [(row + [blank] * COLUMNS)[: min(COLUMNS, len(self.ids))] for pair in pairs for row in map(list, pair)]
        return grid([to_pil(image) for row in rows for image in row], min(COLUMNS, len(self.ids)))

    def texts(self) -> dict[str, str]:
        return {'rows': 'originals, each row above that of their reconstructions', 'ids': ', '.join(map(str, self.ids))}
