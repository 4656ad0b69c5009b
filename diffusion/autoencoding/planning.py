"""FLOP of an autoencoder's training, counted without weights and without a GPU.

What the plan needs to know of an autoencoder's training: parameters, FLOP and activations, without weights and without a GPU."""

import functools
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from diffusion.autoencoding.model import AutoencoderTraining, discriminator_loss, generator_loss
from diffusion.autoencoding.networks import PatchDiscriminator, build_autoencoder
from diffusion.cost.facts import Counts
from diffusion.evaluation.features.lpips import Lpips, PerceptualDistance, RandomConvDistance
from diffusion.families.counting.activations import as_on_a_gpu, channels_last
from diffusion.families.counting.live_storages import LiveStorages
from diffusion.recipe.autoencoder import AutoencoderRecipe, AutoencoderSettings

FORWARD_AND_BACKWARD = 3  # passes, by FLOP


def training_flops(settings: AutoencoderSettings, side_px: int) -> int:
    """FLOP of a training step for one image of `side_px` (1 MAC = 2 FLOP), with the discriminator: 3 x (encode + decode), and the losses as they are
    computed."""
    perceptual, adversarial = settings.perceptual, settings.adversarial
    return (
        _autoencoder_flop(settings.network, side_px)
        + (0 if perceptual is None else _perceptual_flop(perceptual.network, side_px))
        + (0 if adversarial is None else _adversarial_flop(adversarial.filters, adversarial.layers, side_px))
    )


@functools.lru_cache
def _autoencoder_flop(name: str, side_px: int) -> int:
    with torch.device('meta'), torch.no_grad(), FlopCounterMode(display=False) as counter:
        network = build_autoencoder(name)
        network.decode(network.encode(torch.empty(1, 3, side_px, side_px)).latent_dist.mean)
    return FORWARD_AND_BACKWARD * counter.get_total_flops()


@functools.lru_cache
def _perceptual_flop(name: str, side_px: int) -> int:
    """Originals forward, reconstructions forward and back to their pixels."""
    with torch.device('meta'), FlopCounterMode(display=False) as counter:
        pixels = torch.empty(1, 3, side_px, side_px)
        output = torch.empty(1, 3, side_px, side_px, requires_grad=True)
        unweighted(name)(output, pixels).sum().backward()
    return counter.get_total_flops()


@functools.lru_cache
def _adversarial_flop(filters: int, layers: int, side_px: int) -> int:
    """Both forward, the decoder's loss back to the pixels, the discriminator's back to its weights."""
    with torch.device('meta'), FlopCounterMode(display=False) as counter:
        discriminator = PatchDiscriminator(filters, layers)
        pixels, output = torch.empty(1, 3, side_px, side_px), torch.empty(1, 3, side_px, side_px, requires_grad=True)
        fake = discriminator(output)
        generator_loss(fake).backward(retain_graph=True, inputs=[output])
        discriminator_loss(discriminator(pixels), fake).backward()
    return counter.get_total_flops()


def unweighted(name: str) -> PerceptualDistance:
    """A perceptual distance without its weights, to count what it takes."""
    return Lpips() if name == 'lpips' else RandomConvDistance()


BATCH = 64  # large enough for activations to decide where the peak is, and not the gradients


def counts(recipe: AutoencoderRecipe, activations: bool = True) -> Counts:
    """What the plan needs to know.

    Args:
        activations: count them too; they are 0 otherwise.
    """
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
