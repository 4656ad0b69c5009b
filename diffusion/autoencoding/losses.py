"""Losses of an autoencoder and their balance, and the FLOP of a training step, counted without weights and without a GPU.

The losses are functions of tensors, without a look at a value from the host.
"""

import functools
from typing import Any

import torch
import torch.nn.functional as F
from composer.utils import dist
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from diffusion.autoencoding.networks import PatchDiscriminator, build_autoencoder
from diffusion.evaluation.features.lpips import Lpips, PerceptualDistance, RandomConvDistance
from diffusion.recipe.autoencoder import AutoencoderSettings

MAX_ADAPTIVE_WEIGHT = 1e4  # of taming-transformers
ADAPTIVE_EPSILON = 1e-4  # next to the adversarial gradient's norm, of the same source


def kl_per_pixel_value(mean: Tensor, log_variance: Tensor, pixel_values: int) -> Tensor:
    """Return (B,) divergences of the posteriors from a standard normal, summed over an image's latents, divided by its pixel values.

    Latent diffusion adds sums over pixels and sums over latents and divides both by the batch (its `LPIPSWithDiscriminator`); over the pixel values
    its sum of errors is a mean, and this is what its KL becomes. mosaicml/diffusion writes the same as mean over latents x latents / pixel values.

    Args:
        mean, log_variance: (B, C, h, w).
        pixel_values: 3 x H x W.
    """
    return 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum(dim=(1, 2, 3)) / pixel_values


def discriminator_loss(real: Tensor, fake: Tensor) -> Tensor:
    """Mean binary cross-entropy of its logits, over originals and reconstructions alike: (E softplus(-real) + E softplus(fake)) / 2."""
    return 0.5 * (F.softplus(-real).mean() + F.softplus(fake).mean())


def generator_loss(fake: Tensor) -> Tensor:
    """The decoder's side, not saturating (arXiv 1406.2661, section 3): E softplus(-fake), whose gradient stays large where it loses."""
    return F.softplus(-fake).mean()


def adaptive_weight(output: Tensor, last_layer: Tensor, reconstruction: Tensor, adversarial: Tensor) -> Tensor:
    """Return () float32: length of the reconstruction's gradient over that of the adversarial one, both of the decoder's last weights
    (arXiv 2012.09841, equation 7), at most MAX_ADAPTIVE_WEIGHT, without a gradient of its own.

    The gradients are averaged over the ranks before they are measured: ranks with the same weights agree on it, and two of them with half of
    the images each get what one with all of them gets.

    Args:
        output: (B, 3, H, W) of the decoder, with its graph.
        last_layer: weights that it is the direct result of.
        reconstruction, adversarial: gradients (B, 3, H, W) of the two losses with respect to `output`.
    """
    of_weights = [
        torch.autograd.grad(output, last_layer, grad_outputs=gradient.to(output.dtype), retain_graph=True)[0]
        for gradient in (reconstruction, adversarial)
    ]
    both = torch.stack([gradient.float().flatten() for gradient in of_weights])
    if dist.get_world_size() > 1:
        dist.all_reduce(both)
        both /= dist.get_world_size()
    lengths = both.norm(dim=1)
    return (lengths[0] / (lengths[1] + ADAPTIVE_EPSILON)).clamp(max=MAX_ADAPTIVE_WEIGHT)


class _WithGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, gradient: Tensor, value: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return upstream[0].to(gradient.dtype) * gradient, None, None


def with_gradient(tensor: Tensor, gradient: Tensor, value: Tensor) -> Tensor:
    """Return a loss () of this value, whose gradient with respect to `tensor` is known already.

    Args:
        gradient: of the shape and dtype of `tensor`.
    """
    result: Tensor = _WithGradient.apply(tensor, gradient.to(tensor.dtype), value)  # type: ignore[no-untyped-call]
    return result


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
