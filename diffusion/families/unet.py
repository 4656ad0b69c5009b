"""Base of the families of Stable Diffusion: diffusers' U-Net, trained by diffusion, in channels_last from end to end.

The network leaves out passes over memory that it can do without: convolutions on tensor cores want channels_last, which diffusers leaves
in three places and PyTorch in two; each costs a copy there and another where a convolution returns to it. (Compiled by PyTorch 2.14 they have
it without these classes too, by 2.11 not.) The classes here differ from their bases in nothing else; weights and names stay.
"""

from typing import Any, ClassVar

import torch
from diffusers import DDIMScheduler, UNet2DConditionModel
from diffusers.models.attention_processor import Attention
from diffusers.models.downsampling import Downsample2D
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.transformers.transformer_2d import Transformer2DModel
from diffusers.models.upsampling import Upsample2D
from torch import Tensor, nn

from diffusion.families.family import Config, Family

ATTENTION = ('to_q', 'to_k', 'to_v', 'to_out.0')
LATENT_CHANNELS = 4  # of a configuration that does not say: diffusers' default


class UNetFamily(Family):
    objective = 'diffusion'
    component = 'unet'
    older_adapters = True
    blocks = (ResnetBlock2D, Transformer2DModel, Downsample2D, Upsample2D)
    stacked: ClassVar = {'ff.net.0.proj': 2}  # GEGLU's values and gates
    channels_last = True
    schedulers = (*DDIMScheduler._compatibles, 'LCMScheduler', 'TCDScheduler')
    adapter_targets: ClassVar = {'attention': ATTENTION, 'attention+ff': (*ATTENTION, 'ff.net.0.proj', 'ff.net.2', 'proj_in', 'proj_out')}

    def build(self, config: Config) -> UNet2DConditionModel:
        """Build it; `attention_head_dim` of `config` is the number of heads (a diffusers misnomer)."""
        unet = UNet2DConditionModel(**config)
        keep_channels_last(unet)
        attend_plainly(unet)
        return unet

    def units(self, network: Any) -> set[nn.Module]:
        return {*network.down_blocks, network.mid_block, *network.up_blocks}

    def latent_channels(self, config: Config) -> int:
        return config.get('in_channels', LATENT_CHANNELS)

    def text_width(self, config: Config) -> int:
        return config['cross_attention_dim']

    def attention(self, config: Config, side: int, text_length: int) -> list[tuple[int, int, int]]:
        channels, heads = config['block_out_channels'], config['attention_head_dim']
        levels = [level for level, block in enumerate(config['down_block_types']) if 'CrossAttn' in block]
        found = []
        for level in [*levels, len(channels) - 1]:  # the last is the middle's
            tokens = max(1, side >> level) ** 2
            found += [(tokens, keys, channels[level] // heads[level]) for keys in (tokens, text_length)]
        return found


class Conv2d(nn.Conv2d):
    """With its weight in channels_last, also where FSDP2 holds it contiguous: cuDNN's result, and gradients, lie as either operand does."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super()._conv_forward(input, weight.contiguous(memory_format=torch.channels_last), bias)


class GroupNorm(nn.GroupNorm):
    """With its output in channels_last, which PyTorch's leaves on CUDA, and in what `torch.compile` makes of it on any device.

    Compiled it is one product and one sum for each pixel, so that the backward pass adds up once over the pixels of each channel.
    """

    def forward(self, input: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            return super().forward(input).contiguous(memory_format=torch.channels_last)
        batch_size, channels, height, width = input.shape
        autocast = torch.is_autocast_enabled(input.device.type)  # CUDA's normalises in float32 and leaves it so
        groups = (self.num_groups, channels // self.num_groups)
        pixels = input.permute(0, 2, 3, 1).float()
        variance, mean = torch.var_mean(pixels.reshape(batch_size, height * width, *groups), dim=(1, 3), keepdim=True, correction=0)
        scale = torch.rsqrt(variance + self.eps) * self.weight.reshape(groups)  # (B, 1, groups, channels of each)
        shift = self.bias.reshape(groups) - mean * scale
        normal = pixels * scale.reshape(batch_size, 1, 1, channels) + shift.reshape(batch_size, 1, 1, channels)
        return normal.to(torch.float32 if autocast else input.dtype).permute(0, 3, 1, 2)


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
    """Without the `.contiguous()` from 64 images on, and doubled by broadcasting: Inductor makes a gather of `interpolate`, whose gradient is added
    up atomically, in another layout and in no fixed order."""

    def forward(self, hidden_states: Tensor, output_size: tuple[int, int] | None = None, *_: Any, **__: Any) -> Tensor:
        batch_size, channels, height, width = hidden_states.shape
        pixels = hidden_states.permute(0, 2, 3, 1)[:, :, None, :, None].expand(-1, -1, 2, -1, 2, -1)
        doubled = pixels.reshape(batch_size, 2 * height, 2 * width, channels).permute(0, 3, 1, 2)
        if output_size is not None:  # of odd sides: as `interpolate` takes pixels to them
            doubled = doubled[:, :, : output_size[0], : output_size[1]]
        return self.conv(doubled)


CLASSES: dict[type, type] = {base: cls for cls in (Conv2d, GroupNorm, ResnetBlock, Transformer, Upsample) for base in cls.__bases__}


def keep_channels_last(unet: UNet2DConditionModel, keep: bool = True) -> None:
    """Give the blocks of a U-Net the classes above; or, not to `keep` it, diffusers' again."""
    classes = CLASSES if keep else {cls: base for base, cls in CLASSES.items()}
    for module in unet.modules():
        module.__class__ = classes.get(type(module), type(module))


class PlainAttention:
    """Attention of a U-Net as diffusers' AttnProcessor2_0 computes it, without the division of the result by 1.0: a pass over memory of its own."""

    def __call__(
        self, attention: Attention, hidden_states: Tensor, encoder_hidden_states: Tensor | None = None, attention_mask: None = None
    ) -> Tensor:
        """(B, L, C), of `hidden_states` (B, L, C) and, where it looks at text, that (B, T, D). There is no mask."""
        assert attention_mask is None
        source = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        projected = attention.to_q(hidden_states), attention.to_k(source), attention.to_v(source)
        query, key, value = (each.unflatten(-1, (attention.heads, -1)).transpose(1, 2) for each in projected)  # (B, heads, L or T, width)
        attended = torch.nn.functional.scaled_dot_product_attention(query, key, value)
        return attention.to_out[0](attended.transpose(1, 2).flatten(2))


def attend_plainly(unet: UNet2DConditionModel) -> None:
    """Let all attention of a U-Net be computed by `PlainAttention`.

    Raises:
        ValueError: one of them does more than that.
    """
    for name, module in unet.named_modules():
        if isinstance(module, Attention):
            norms = (module.spatial_norm, module.group_norm, module.norm_cross, module.norm_q, module.norm_k)
            more = module.residual_connection or module.rescale_output_factor != 1 or module.to_out[1].p
            if more or any(norm is not None for norm in norms):
                raise ValueError(f'{name} normalises, adds, scales or drops something in its attention, which PlainAttention does not')
            module.set_processor(PlainAttention())
