"""Stable Diffusion 2: a U-Net that attends to one CLIP text encoder, trained by diffusion, drawn by StableDiffusionPipeline."""

from __future__ import annotations

from typing import Any, ClassVar

from diffusers import AutoencoderKL, SchedulerMixin, StableDiffusionPipeline, UNet2DConditionModel
from diffusers.models.downsampling import Downsample2D
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.transformers.transformer_2d import Transformer2DModel
from diffusers.models.upsampling import Upsample2D
from diffusers.pipelines.stable_diffusion.safety_checker import StableDiffusionSafetyChecker
from torch import Tensor, nn
from transformers import CLIPTextModel

from diffusion.contracts.conditioning import Conditioning
from diffusion.encoders.frozen import FrozenEncoders
from diffusion.encoders.text import ClipPenultimate
from diffusion.families.family import Config, Family
from diffusion.families.lean import attend_plainly, keep_channels_last

LATENT_CHANNELS = 4  # of a configuration that does not say: diffusers' default


class StableDiffusion2(Family):
    objective = 'diffusion'
    component = 'unet'
    blocks = (ResnetBlock2D, Transformer2DModel, Downsample2D, Upsample2D)
    channels_last = True
    pipeline_class = StableDiffusionPipeline
    pipeline_models: ClassVar = {
        'vae': AutoencoderKL,
        'text_encoder': CLIPTextModel,
        'unet': UNet2DConditionModel,
        'safety_checker': StableDiffusionSafetyChecker,
    }

    def find_text(self, source: str, revision: str | None) -> ClipPenultimate:
        return ClipPenultimate.find(source, revision)

    def build(self, config: Config) -> UNet2DConditionModel:
        """In `config`, `attention_head_dim` is the number of heads (a diffusers misnomer)."""
        unet = UNet2DConditionModel(**config)
        keep_channels_last(unet)
        attend_plainly(unet)
        return unet

    def denoise(self, network: nn.Module, noisy: Tensor, t: Tensor, conditioning: Conditioning) -> Tensor:
        return network(noisy, t, conditioning.text).sample

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

    def pipeline(self, network: Any, encoders: FrozenEncoders, scheduler: SchedulerMixin, resolution: int) -> StableDiffusionPipeline:
        network.register_to_config(sample_size=resolution // encoders.downsampling)
        return StableDiffusionPipeline(
            vae=encoders.vae.module,
            text_encoder=encoders.text.parts['text_encoder'].module,
            tokenizer=encoders.text.tokenizers['tokenizer'],
            unet=network,
            scheduler=scheduler,  # type: ignore[arg-type]
            safety_checker=None,
            feature_extractor=None,
            requires_safety_checker=False,
        )
