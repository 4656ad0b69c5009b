"""A recipe of an autoencoder to a Composer Trainer; everything but the model and its losses is that of training/builder.py."""

from pathlib import Path
from typing import Any

import torch
from composer.core import Callback
from composer.utils import reproducibility

from diffusion.autoencoding.callbacks import DiscriminatorStart, LossParts, ReconstructionGrid
from diffusion.autoencoding.model import AutoencoderTraining
from diffusion.autoencoding.networks import attention_shapes, build_autoencoder, ease_start
from diffusion.checkpoints.initial import load_component
from diffusion.checkpoints.resume import refuse_other_encoders
from diffusion.contracts.batch import Batch
from diffusion.contracts.errors import EncoderError
from diffusion.datasets.loader import ImagesAlone, eval_loader, train_loader
from diffusion.evaluation.lpips import find_perceptual
from diffusion.families.registry import kernels_for
from diffusion.recipe import AutoencoderRecipe
from diffusion.training.builder import assemble, begin
from diffusion.training.ema import averaged_weights
from diffusion.training.micro_batch import micro_size
from diffusion.training.trainer import Trainer


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
    loader = train_loader(recipe, ImagesAlone(start.device))
    micro_batch = micro_size(recipe, model, lambda size: blank_batch(size, recipe.data.resolution, start.device))
    validation = eval_loader(recipe, ImagesAlone(start.device), micro_batch)
    callbacks: list[Callback] = [LossParts(recipe.log.every)]
    if recipe.autoencoder.adversarial is not None:
        callbacks.append(DiscriminatorStart(recipe.autoencoder.adversarial.start))
    if recipe.log.samples.every is not None:
        assert validation is not None  # a rule of the recipe
        dataset: Any = validation.dataset
        callbacks.append(ReconstructionGrid(recipe.log.samples, dataset, start.run_folder / 'samples', averaged_weights))
    groups = parameter_groups(recipe, model)
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
        ease_start(network)
    if recipe.load_path is not None and not resumes:
        load_component(network, recipe.load_path, 'vae', objective=None)
    if recipe.train.checkpoint_activations:
        network.enable_gradient_checkpointing()
    model: Any = AutoencoderTraining(network, perceptual, settings, recipe.seed)
    return model.to(device, memory_format=torch.channels_last)


def parameter_groups(recipe: AutoencoderRecipe, model: AutoencoderTraining) -> list[dict[str, Any]]:
    """The autoencoder and the discriminator, whose weights must not decay while it waits for its start."""
    lr, decay = recipe.optimizer.lr, recipe.optimizer.weight_decay
    groups = [{'params': list(model.network.parameters()), 'lr': lr, 'weight_decay': decay}]
    if model.discriminator is not None:
        groups.append({'params': list(model.discriminator.parameters()), 'lr': lr, 'weight_decay': 0.0})
    return groups


def blank_batch(size: int, side_px: int, device: torch.device) -> Batch:
    """A batch of the shapes that training has."""
    return {
        'images': torch.zeros(size, 3, side_px, side_px, dtype=torch.uint8, device=device),
        'sample_key': torch.zeros(size, 3, dtype=torch.int64, device=device),
    }
