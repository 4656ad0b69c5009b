"""diffusers' U-Net kept in channels_last from end to end, as convolutions on tensor cores want it.

diffusers 0.39 leaves that layout in three places, each of which costs a copy there and another where a convolution returns to it. The classes here
differ from their bases in nothing else, and weights and names stay.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers import UNet2DConditionModel
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.transformers.transformer_2d import Transformer2DModel
from diffusers.models.upsampling import Upsample2D
from torch import Tensor


class ResnetBlock(ResnetBlock2D):
    """Without the `.contiguous()` before the shortcut, which silences a warning of DDP about 1 x 1 kernels, and which is there in training mode only.

    Nothing else in the block asks for its mode: dropout is a module of its own.
    """

    training = property(lambda self: False, lambda self, mode: None)  # type: ignore[assignment]


class Transformer(Transformer2DModel):
    """Without the `.contiguous()` at the end: tokens (B, H * W, C) lie just as an image in channels_last does."""

    def _get_output_for_continuous_inputs(
        self, hidden_states: Tensor, residual: Tensor, batch_size: int, height: int, width: int, inner_dim: int
    ) -> Tensor:
        if self.use_linear_projection:
            hidden_states = self.proj_out(hidden_states)
        image = hidden_states.reshape(batch_size, height, width, inner_dim).permute(0, 3, 1, 2)  # (B, C, H, W)
        if not self.use_linear_projection:
            image = self.proj_out(image)
        return image + residual


class Upsample(Upsample2D):
    """Without the `.contiguous()` from 64 images on, whatever their size, which was for a fault of PyTorch 1.12."""

    def forward(self, hidden_states: Tensor, output_size: tuple[int, int] | None = None, *_: Any, **__: Any) -> Tensor:
        if 4 * hidden_states.numel() > 2**31:
            hidden_states = hidden_states.contiguous()  # pytorch#141831: the kernel for channels_last counts outputs in 32 bits
        factor = 2.0 if output_size is None else None
        return self.conv(torch.nn.functional.interpolate(hidden_states, size=output_size, scale_factor=factor, mode='nearest'))


CLASSES: dict[type, type] = {base: cls for cls in (ResnetBlock, Transformer, Upsample) for base in cls.__bases__}


def keep_channels_last(unet: UNet2DConditionModel, keep: bool = True) -> None:
    """Give the blocks of a U-Net the classes above; or, not to `keep` it, diffusers' again."""
    classes = CLASSES if keep else {cls: base for base, cls in CLASSES.items()}
    for module in unet.modules():
        module.__class__ = classes.get(type(module), type(module))
