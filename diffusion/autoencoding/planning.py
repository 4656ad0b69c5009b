"""Counts of an autoencoder's training for the plan: parameters, FLOP and activations, without weights and without a GPU."""

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from diffusion.autoencoding.losses import training_flops, unweighted
from diffusion.autoencoding.model import AutoencoderTraining
from diffusion.autoencoding.networks import PatchDiscriminator, build_autoencoder
from diffusion.cost.facts import Counts
from diffusion.families.counting.tracing import LiveStorages, as_on_a_gpu, channels_last
from diffusion.recipe.autoencoder import AutoencoderRecipe, AutoencoderSettings

BATCH = 64  # large enough for activations to decide where the peak is, and not the gradients


def counts(recipe: AutoencoderRecipe, activations: bool = True) -> Counts:
    """Count parameters, FLOP and, if they are asked for, activations, which are 0 otherwise."""
    settings, side_px = recipe.autoencoder, recipe.data.resolution
    with torch.device('meta'):
        network = build_autoencoder(settings.network)
        discriminator = None if settings.adversarial is None else PatchDiscriminator(settings.adversarial.filters, settings.adversarial.layers)
    parameters = sum(weight.numel() for weight in network.parameters())
    others = 0 if discriminator is None else sum(weight.numel() for weight in discriminator.parameters())
    saved, peak = 0, 0
    if activations:
        saved, peak = alive_bytes(settings, side_px, recipe.train.precision, recipe.train.checkpoint_activations)
    channels = network.config['latent_channels']
    return Counts(parameters, parameters + others, training_flops(settings, side_px), saved, peak, channels, encoders=None)


def alive_bytes(settings: AutoencoderSettings, side_px: int, precision: str, checkpointed: bool) -> tuple[int, int]:
    """Bytes per crop: left of the autoencoder for its backward pass, and at the highest moment of a step, on fake tensors."""
    with FakeTensorMode():
        perceptual = None if settings.perceptual is None else unweighted(settings.perceptual.network)
        model: Any = AutoencoderTraining(build_autoencoder(settings.network), perceptual, settings, seed=0)
        channels_last(model)
        if checkpointed:
            model.network.enable_gradient_checkpointing()
        copies = 0 if precision == 'fp32' else 2 * sum(weight.numel() for weight in model.parameters())
        batch = {
            'images': torch.zeros(BATCH, 3, side_px, side_px, dtype=torch.uint8),
            'sample_key': torch.zeros(BATCH, 3, dtype=torch.int64),
        }
        with LiveStorages() as storages, as_on_a_gpu(precision):
            outputs = model(batch)
            saved = storages.live_bytes
            model.loss(outputs, batch).backward()
        return (saved - copies) // BATCH, (storages.peak_bytes - copies) // BATCH
