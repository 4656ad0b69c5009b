"""AutoencoderKL by the name of a configuration, with random weights; and the discriminator."""

from itertools import pairwise
from typing import Any

import torch
from diffusers import AutoencoderKL
from diffusers.models.resnet import ResnetBlock2D
from torch import Tensor, nn

from diffusion.encoders.random_encoders import build_vae
from diffusion.recipe.autoencoder import autoencoder_config

MAX_WIDENING = 8  # channels of the widest layer, in multiples of the first
NORM_CHANNELS = 16  # in a group
LAST_SCALE = 0.1  # of the last layer's first weights: it begins undecided


def build_autoencoder(name: str) -> AutoencoderKL:
    """Randomly initialised; seed torch before to get the same one again."""
    return build_vae(**autoencoder_config(name))


@torch.no_grad()
def init_output_scale(network: AutoencoderKL) -> None:
    """Residual branches begin at zero and the posterior almost certain: a short run from random weights learns several times faster."""
    for module in network.modules():
        if isinstance(module, ResnetBlock2D):
            module.conv2.weight.zero_()
            assert module.conv2.bias is not None
            module.conv2.bias.zero_()
    moments, channels = moments_layer(network), network.config['latent_channels']
    moments.weight[channels:] *= 0.1
    moments.bias[channels:] = -8.0


def moments_layer(network: AutoencoderKL) -> Any:
    """The convolution that writes mean and log variance."""
    return network.quant_conv if network.quant_conv is not None else network.encoder.conv_out


def last_layer(network: AutoencoderKL) -> nn.Parameter:
    """The weight of the decoder's last convolution, at which the gradients of the losses are compared."""
    return network.decoder.conv_out.weight


def attention_shapes(name: str, side_px: int) -> list[tuple[int, int, int]]:
    """(queries, keys, width of a head) of the attention in the middle of encoder and decoder, which diffusers gives one head."""
    config = autoencoder_config(name)
    if not config.get('mid_block_add_attention', True):
        return []
    tokens = (side_px // 2 ** (len(config['block_out_channels']) - 1)) ** 2
    return [(tokens, tokens, config['block_out_channels'][-1])]


class PatchDiscriminator(nn.Module):
    """PatchGAN (arXiv 1611.07004), one judgement for each patch of an image: strided convolutions of 4 x 4, then two without stride.

    GroupNorm takes the place of the paper's BatchNorm, whose statistics would let the result depend on how a batch is cut into
    micro-batches and ranks.

    Args:
        filters: channels of the first convolution.
        layers: strided convolutions; three judge patches of 70 pixels.
    """

    def __init__(self, filters: int = 64, layers: int = 3):
        super().__init__()
        widths = [filters * min(2**level, MAX_WIDENING) for level in range(layers + 1)]
        parts: list[nn.Module] = [nn.Conv2d(3, widths[0], 4, stride=2, padding=1), nn.LeakyReLU(0.2)]
        for level, (before, after) in enumerate(pairwise(widths), start=1):
            stride = 2 if level < layers else 1
            groups = after // NORM_CHANNELS if after % NORM_CHANNELS == 0 else 1
            parts += [nn.Conv2d(before, after, 4, stride=stride, padding=1, bias=False), nn.GroupNorm(groups, after), nn.LeakyReLU(0.2)]
        last = nn.Conv2d(widths[-1], 1, 4, padding=1)
        with torch.no_grad():
            last.weight *= LAST_SCALE
            assert last.bias is not None
            last.bias.zero_()
        self.layers = nn.Sequential(*parts, last)

    def forward(self, pixels: Tensor) -> Tensor:
        """Return (B, 1, h, w) logits, above 0 for what looks like an original, of (B, 3, H, W) in -1..1."""
        return self.layers(pixels)
