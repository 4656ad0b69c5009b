"""U-Nets by name. A configuration is a JSON file in `unets/`, in diffusers' own terms; adding one is adding a file."""

from __future__ import annotations

import functools
import json
from typing import Any

import torch
from diffusers import UNet2DConditionModel
from torch.utils.flop_counter import FlopCounterMode

from diffusion.families.lean import attend_plainly, keep_channels_last
from diffusion.recipe.rules import NETWORKS


def unet_config(name: str) -> dict[str, Any]:
    """The arguments of `UNet2DConditionModel`. In them `attention_head_dim` is the number of heads (a diffusers misnomer)."""
    return json.loads((NETWORKS / f'{name}.json').read_text())


def build_unet(name: str) -> UNet2DConditionModel:
    """A randomly initialised U-Net; seed torch before to get the same one again."""
    unet = UNet2DConditionModel(**unet_config(name))
    keep_channels_last(unet)
    attend_plainly(unet)
    return unet


@functools.lru_cache
def training_flops(name: str, latent_size: tuple[int, int], text_length: int) -> int:
    """FLOP of the U-Net's forward and backward pass over latents of one (height, width), counted on the meta device (1 MAC = 2 FLOP).

    Counts convolutions, matrix products and attention; nothing flows back into latents or text.
    """
    with torch.device('meta'):
        unet = build_unet(name)
        noisy = torch.randn(1, unet.config.in_channels, *latent_size)
        t = torch.zeros(1, dtype=torch.long)
        text = torch.randn(1, text_length, unet.config.cross_attention_dim)
        with FlopCounterMode(display=False) as counter:
            unet(noisy, t, text).sample.sum().backward()
    return counter.get_total_flops()
