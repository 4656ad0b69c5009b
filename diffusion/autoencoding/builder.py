"""A recipe of an autoencoder to a Composer Trainer, with its callbacks; everything but the model and its losses is that of training/builder.py."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from composer.core import Callback, State
from composer.loggers import Logger
from composer.utils import reproducibility
from PIL import Image
from torch import Tensor

from diffusion.autoencoding.model import AutoencoderTraining
from diffusion.autoencoding.networks import attention_shapes, build_autoencoder, init_output_scale
from diffusion.checkpoints.initial import load_weights
from diffusion.checkpoints.resume import refuse_other_encoders
from diffusion.common.collective import unwrap_model
from diffusion.common.images import grid, to_pil
from diffusion.contracts.batch import Batch
from diffusion.contracts.errors import EncoderError
from diffusion.datasets.loader import eval_loader, train_loader
from diffusion.evaluation.features.lpips import find_perceptual
from diffusion.families.registry import kernels_for
from diffusion.monitoring.sample_grid import ImageGrid
from diffusion.monitoring.sample_scores import EvaluationDataset
from diffusion.recipe import AutoencoderRecipe
from diffusion.recipe.autoencoder import ReconstructionSamples
from diffusion.training.builder import assemble, begin
from diffusion.training.ema import averaged_weights
from diffusion.training.micro_batch import micro_size
from diffusion.training.trainer import Trainer

COLUMNS = 8  # of a grid


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
        unwrap_model(state).discriminates = state.timestamp.batch.value >= self.first_batch


class LossParts(Callback):
    """Logs each loss before its weight, of this rank's last micro-batch, every `every` batches."""

    def __init__(self, every: int):
        self.every = every

    def after_train_batch(self, state: State, logger: Logger) -> None:
        if (state.timestamp.batch.value + 1) % self.every == 0:
            logger.log_metrics({f'loss/train/{name}': part for name, part in unwrap_model(state).parts.items()})


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


def build_trainer(recipe: AutoencoderRecipe) -> Trainer:
    """Everything that `recipe` names, resumed from its latest checkpoint if there is one.

    Raises:
        RecipeError, ManifestError, EncoderError, CheckpointError: the recipe does not fit this machine, the data, the weights of the
            perceptual distance or `load_path`.
    """
    shapes = attention_shapes(recipe.autoencoder.network, recipe.data.resolution)
    start = begin(recipe, lambda: kernels_for(shapes, recipe.train.precision))
    model = build_model(recipe, start.device, resumes=start.found is not None)
    digests = {} if model.perceptual is None else {'perceptual': model.perceptual.sha256}
    if start.found is not None:
        refuse_other_encoders(start.found.manifest, digests)
    loader = train_loader(recipe, None)

    def blank_batch(size: int) -> Batch:
        pixels = torch.zeros(size, 3, recipe.data.resolution, recipe.data.resolution, dtype=torch.uint8, device=start.device)
        return {'images': pixels, 'sample_key': torch.zeros(size, 3, dtype=torch.int64, device=start.device)}

    micro_batch = micro_size(recipe, model, blank_batch)
    validation = eval_loader(recipe, None, micro_batch)
    callbacks: list[Callback] = [LossParts(recipe.log.every)]
    if recipe.autoencoder.adversarial is not None:
        callbacks.append(DiscriminatorStart(recipe.autoencoder.adversarial.start))
    if recipe.log.samples.every is not None:
        assert validation is not None  # a rule of the recipe
        dataset: Any = validation.dataset
        callbacks.append(ReconstructionGrid(recipe.log.samples, dataset, start.run_folder / 'samples', averaged_weights))
    lr, decay = recipe.optimizer.lr, recipe.optimizer.weight_decay
    groups = [{'params': list(model.network.parameters()), 'lr': lr, 'weight_decay': decay}]
    if model.discriminator is not None:  # its weights must not decay while it waits for its start
        groups.append({'params': list(model.discriminator.parameters()), 'lr': lr, 'weight_decay': 0.0})
    return assemble(recipe, start, model, groups, loader, validation, micro_batch, [], callbacks, digests)


def build_model(recipe: AutoencoderRecipe, device: torch.device, resumes: bool = False) -> AutoencoderTraining:
    """The model on `device`, from `seed`, or from `load_path` unless a checkpoint of this run will replace it anyway (`resumes`).

    Raises:
        EncoderError: the weights of the perceptual distance are missing.
        CheckpointError: `load_path` holds no such autoencoder.
    """
    settings, perceptual = recipe.autoencoder, None
    if settings.perceptual is not None:
        folder = settings.perceptual.weights
        try:
            perceptual = find_perceptual(settings.perceptual.network, None if folder is None else Path(folder)).to(device)
        except EncoderError as error:
            raise EncoderError(f'autoencoder.perceptual.weights: {error}') from error
    reproducibility.seed_all(recipe.seed)
    network: Any = build_autoencoder(settings.network)
    if settings.ease_start:
        init_output_scale(network)
    if recipe.load_path is not None and not resumes:
        load_weights(network, recipe.load_path, None)
    if recipe.train.checkpoint_activations:
        network.enable_gradient_checkpointing()
    model: Any = AutoencoderTraining(network, perceptual, settings, recipe.seed)
    return model.to(device, memory_format=torch.channels_last)
