"""The ComposerModel that trains an autoencoder and its discriminator in one step of one optimizer, and its metrics."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from composer.models import ComposerModel
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

from diffusion.autoencoding.losses import adaptive_weight, discriminator_loss, generator_loss, kl_per_pixel_value, training_flops, with_gradient
from diffusion.autoencoding.networks import PatchDiscriminator, last_layer
from diffusion.contracts.batch import Batch
from diffusion.datasets.keyed_random import Draw, normal
from diffusion.encoders.frozen import pixels_to_unit_range, posterior_sample, to_uint8
from diffusion.evaluation.features.lpips import PerceptualDistance
from diffusion.evaluation.metrics.reconstructions import psnr, ssim
from diffusion.recipe.autoencoder import AutoencoderSettings


class MeanOfImages(Metric):
    """Mean of a figure of reconstructions.

    Each image counts once, in the order of ids, in float64: Streaming repeats some to fill the last batches, which must not make the
    result depend on the batch size or the number of GPUs.

    Args:
        figure: (B,) of uint8 reconstructions and originals (B, 3, H, W).
    """

    ids: list[Tensor]
    values: list[Tensor]

    def __init__(self, figure: Callable[[Tensor, Tensor], Tensor]):
        super().__init__()
        self.figure = figure
        for state in ('ids', 'values'):
            self.add_state(state, [], dist_reduce_fx='cat')

    def update(self, sample_id: Tensor, images: Tensor, originals: Tensor) -> None:
        """`sample_id` (B,) int64."""
        self.ids.append(sample_id)
        self.values.append(self.figure(images, originals).double())

    def compute(self) -> Tensor:
        ids, values = (dim_zero_cat(state) for state in (self.ids, self.values))
        order = ids.argsort(stable=True)
        first = torch.ones_like(order, dtype=torch.bool)
        first[1:] = ids[order].diff() != 0
        return values[order][first].mean().float()


FIGURES = {'psnr': psnr, 'ssim': ssim}


class Reconstructed(NamedTuple):
    """Results of a forward pass, for the losses and the metrics."""

    pixels: Tensor  # (B, 3, H, W) float32, -1..1
    mean: Tensor  # (B, C, h, w) float32
    log_variance: Tensor  # (B, C, h, w) float32
    output: Tensor  # (B, 3, H, W), the decoder's, about -1..1, in the precision of the step


class AutoencoderTraining(ComposerModel):
    """Trains the autoencoder against pixels, a perceptual distance and a discriminator, and the discriminator against it.

    Losses of the output are cut off where they meet it: their gradients there are computed first, which tells how to balance them, and are then
    what the decoder's backward pass begins with. So each network is gone through once, the two players keep their own losses (the
    decoder's does not saturate), and one backward pass gives every weight the gradient of its own player.

    Args:
        network: AutoencoderKL.
        perceptual: the frozen distance that `settings.perceptual` names; outside the registered modules, so that it is in no checkpoint.
        settings: the recipe's `autoencoder` section.
        seed: keys the posterior's noise, together with each sample's key.
    """

    network: Any

    def __init__(self, network: Any, perceptual: PerceptualDistance | None, settings: AutoencoderSettings, seed: int):
        super().__init__()
        self.network, self.settings, self.seed = network, settings, seed
        adversarial = settings.adversarial
        self.discriminator = None if adversarial is None else PatchDiscriminator(adversarial.filters, adversarial.layers)
        self._perceptual = [perceptual]
        self.autocast = True
        self.discriminates = self.discriminator is not None  # False before its start: callbacks.py
        self.parts: dict[str, Tensor] = {}  # of the latest loss, on the device

    @property
    def perceptual(self) -> PerceptualDistance | None:
        return self._perceptual[0]

    @property
    def device(self) -> torch.device:
        return next(self.network.parameters()).device

    def forward(self, batch: Batch) -> Reconstructed:
        """Reconstruct from a draw of the posterior."""
        return self._reconstruct(batch, draw=True)

    def eval_forward(self, batch: Batch, outputs: Reconstructed | None = None) -> Reconstructed:
        """Reconstruct from the middle of the posterior."""
        return self._reconstruct(batch, draw=False) if outputs is None else outputs

    def _reconstruct(self, batch: Batch, draw: bool) -> Reconstructed:
        pixels = _laid_out(batch['images'])
        moments = self._encode(pixels)
        mean, log_variance = moments.chunk(2, dim=1)
        noise = normal(self.seed, batch['sample_key'], Draw.POSTERIOR, tuple(mean.shape[1:])) if draw else None
        latents = mean if noise is None else posterior_sample(moments, noise)
        return Reconstructed(pixels, mean, log_variance.clamp(-30, 20), self.network.decode(latents).sample)

    def loss(self, outputs: Reconstructed, batch: Batch) -> Tensor:
        """Mean over the samples of the weighted losses of autoencoder and discriminator."""
        settings, pixels = self.settings, outputs.pixels
        # The losses' own copy, at which their gradients end.
        output = outputs.output.detach().float().requires_grad_()
        error = output - pixels
        self.parts = parts = {'l1': error.abs().mean(), 'l2': error.square().mean()}
        of_pixels = settings.l1 * parts['l1'] + settings.l2 * parts['l2']
        if settings.perceptual is not None:
            assert self.perceptual is not None
            parts['perceptual'] = self.perceptual(output, pixels).mean()
            of_pixels = of_pixels + settings.perceptual.weight * parts['perceptual']
        (gradient,) = torch.autograd.grad(of_pixels, output)
        value, of_discriminator = of_pixels.detach(), torch.zeros_like(of_pixels)
        if self.discriminator is not None and settings.adversarial is not None:
            if self.discriminates:
                fake = self.discriminator(output).float()
                parts['generator'] = generator_loss(fake)
                (adversarial,) = torch.autograd.grad(parts['generator'], output, retain_graph=True)
                weight = adaptive_weight(outputs.output, last_layer(self.network), gradient, adversarial)
                parts['adaptive_weight'] = weight
                gradient = gradient + settings.adversarial.weight * weight * adversarial
                value = value + settings.adversarial.weight * weight * parts['generator'].detach()
                parts['discriminator'] = of_discriminator = discriminator_loss(self.discriminator(pixels).float(), fake)
            else:  # DDP waits for a gradient of every weight: zeros, of which AdamW makes no step without weight decay
                of_discriminator = sum((weight.sum() * 0 for weight in self.discriminator.parameters()), of_discriminator)
        parts['kl'] = kl_per_pixel_value(outputs.mean, outputs.log_variance, pixels[0].numel()).mean()
        total = with_gradient(outputs.output, gradient, value) + settings.kl * parts['kl'] + of_discriminator
        self.parts = {name: part.detach() for name, part in parts.items()}
        return total

    def get_metrics(self, is_train: bool) -> dict[str, Metric]:
        """The training losses are logged without one."""
        return {} if is_train else {name: MeanOfImages(figure) for name, figure in FIGURES.items()}

    def update_metric(self, batch: Any, outputs: Reconstructed, metric: Metric) -> None:
        metric.update(batch['sample_key'][:, 1], to_uint8(outputs.output), batch['images'])

    def flops_per_batch(self, batch: Batch) -> int:
        """Counted FLOP of a training step over the batch: autoencoder, perceptual distance and discriminator."""
        return len(batch['sample_key']) * training_flops(self.settings, batch['images'].shape[-1])

    @torch.no_grad()
    def moments(self, images: Tensor) -> Tensor:
        """(B, 2C, h, w) float32 mean and log variance of (B, 3, H, W) uint8 images."""
        return self._encode(_laid_out(images))

    def _encode(self, pixels: Tensor) -> Tensor:
        return self.network.encode(pixels).latent_dist.parameters.float()

    @torch.no_grad()
    def reconstruct(self, images: Tensor) -> Tensor:
        """(B, 3, H, W) uint8, from the middle of the posterior of (B, 3, H, W) uint8 images."""
        return to_uint8(self.network.decode(self.moments(images).chunk(2, dim=1)[0]).sample)


def _laid_out(images: Tensor) -> Tensor:
    """uint8 images as the network reads them."""
    return pixels_to_unit_range(images).contiguous(memory_format=torch.channels_last)
