"""AutoencoderKL by the name of a configuration, with random weights."""

from typing import Any

import torch
from diffusers import AutoencoderKL
from diffusers.models.resnet import ResnetBlock2D
from torch import nn

from diffusion.encoders.random_encoders import build_vae
from diffusion.recipe.autoencoder import autoencoder_config


def build_autoencoder(name: str) -> AutoencoderKL:
    """Randomly initialised; seed torch before to get the same one again."""
    return build_vae(**autoencoder_config(name))


@torch.no_grad()
def ease_start(network: AutoencoderKL) -> None:
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
