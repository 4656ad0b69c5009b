"""FLOP of an autoencoder's training, counted without weights and without a GPU."""

import functools

import torch
from torch.utils.flop_counter import FlopCounterMode

from diffusion.autoencoding.discriminator import PatchDiscriminator
from diffusion.autoencoding.losses import discriminator_loss, generator_loss
from diffusion.autoencoding.networks import build_autoencoder
from diffusion.evaluation.lpips import Lpips, PerceptualDistance, RandomConvDistance
from diffusion.recipe.autoencoder import AutoencoderSettings

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
