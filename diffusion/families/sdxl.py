"""Stable Diffusion XL (arXiv 2307.01952): a U-Net that attends to two CLIP text encoders and is told the pooled caption and where its image was cut
from, trained by diffusion, drawn by StableDiffusionXLPipeline."""

from typing import Any, ClassVar

from diffusers import AutoencoderKL, SchedulerMixin, StableDiffusionXLPipeline, UNet2DConditionModel
from torch import Tensor, nn
from transformers import CLIPImageProcessor, CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

from diffusion.contracts.batch import GEOMETRY, Conditioning
from diffusion.encoders.frozen import FrozenEncoders
from diffusion.encoders.text import ClipPair
from diffusion.families.family import Config
from diffusion.families.unet import UNetFamily


class StableDiffusionXL(UNetFamily):
    reads_geometry = True
    text = ClipPair
    pipeline_class = StableDiffusionXLPipeline
    tags = ('stable-diffusion-xl',)
    pipeline_parts: ClassVar = {
        'vae': (AutoencoderKL,),
        'text_encoder': (CLIPTextModel,),
        'text_encoder_2': (CLIPTextModelWithProjection,),
        'tokenizer': (CLIPTokenizer,),
        'tokenizer_2': (CLIPTokenizer,),
        'unet': (UNet2DConditionModel,),
        'feature_extractor': (CLIPImageProcessor,),
    }

    def denoise(self, network: nn.Module, noisy: Tensor, t: Tensor, conditioning: Conditioning) -> Tensor:
        """Sizes and crops go in as whole numbers, which FSDP2 leaves alone where it hands floating-point inputs over in bf16."""
        added = {'text_embeds': conditioning.pooled, 'time_ids': conditioning.geometry}
        return network(noisy, t, conditioning.text, added_cond_kwargs=added).sample

    def pooled_width(self, config: Config) -> int:
        return config['projection_class_embeddings_input_dim'] - GEOMETRY * config['addition_time_embed_dim']

    def pipeline(self, network: Any, encoders: FrozenEncoders, scheduler: SchedulerMixin, resolution: int) -> Any:
        network.register_to_config(sample_size=resolution // encoders.vae.downsampling)
        # What caption dropout trains is the encoded empty caption, not zeros.
        pipeline = self.assemble(network, encoders, scheduler, force_zeros_for_empty_prompt=False, add_watermarker=False)
        # Or its images would have a watermark wherever a certain package is installed.
        pipeline.register_to_config(add_watermarker=False)
        return pipeline
