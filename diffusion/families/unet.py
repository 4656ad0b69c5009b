"""What the families of Stable Diffusion have in common: diffusers' U-Net, trained by diffusion, in channels_last from end to end."""

from typing import Any, ClassVar

from diffusers import DDIMScheduler, UNet2DConditionModel
from diffusers.models.downsampling import Downsample2D
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.transformers.transformer_2d import Transformer2DModel
from diffusers.models.upsampling import Upsample2D
from torch import nn

from diffusion.families.family import Config, Family
from diffusion.families.lean import attend_plainly, keep_channels_last

ATTENTION = ('to_q', 'to_k', 'to_v', 'to_out.0')
LATENT_CHANNELS = 4  # of a configuration that does not say: diffusers' default


class UNetFamily(Family):
    objective = 'diffusion'
    component = 'unet'
    blocks = (ResnetBlock2D, Transformer2DModel, Downsample2D, Upsample2D)
    stacked: ClassVar = {'ff.net.0.proj': 2}  # GEGLU's values and gates
    channels_last = True
    schedulers = (*DDIMScheduler._compatibles, 'LCMScheduler', 'TCDScheduler')
    adapter_targets: ClassVar = {'attention': ATTENTION, 'attention+ff': (*ATTENTION, 'ff.net.0.proj', 'ff.net.2', 'proj_in', 'proj_out')}

    def build(self, config: Config) -> UNet2DConditionModel:
        """In `config`, `attention_head_dim` is the number of heads (a diffusers misnomer)."""
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
