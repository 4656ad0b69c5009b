"""Stable Diffusion 2: a U-Net that attends to one CLIP text encoder, trained by diffusion, drawn by StableDiffusionPipeline."""

from typing import Any, ClassVar

from diffusers import AutoencoderKL, SchedulerMixin, StableDiffusionPipeline, UNet2DConditionModel
from diffusers.pipelines.stable_diffusion.safety_checker import StableDiffusionSafetyChecker
from torch import Tensor, nn
from transformers import CLIPImageProcessor, CLIPTextModel, CLIPTokenizer

from diffusion.contracts.batch import Conditioning
from diffusion.encoders.frozen import FrozenEncoders
from diffusion.encoders.text import ClipPenultimate
from diffusion.families.unet import UNetFamily


class StableDiffusion2(UNetFamily):
    text = ClipPenultimate
    pipeline_class = StableDiffusionPipeline
    tags = ('stable-diffusion',)
    pipeline_parts: ClassVar = {
        'vae': (AutoencoderKL,),
        'text_encoder': (CLIPTextModel,),
        'tokenizer': (CLIPTokenizer,),
        'unet': (UNet2DConditionModel,),
        'safety_checker': (StableDiffusionSafetyChecker,),
        'feature_extractor': (CLIPImageProcessor,),
    }

    def denoise(self, network: nn.Module, noisy: Tensor, t: Tensor, conditioning: Conditioning) -> Tensor:
        return network(noisy, t, conditioning.text).sample

    def pipeline(self, network: Any, encoders: FrozenEncoders, scheduler: SchedulerMixin, resolution: int) -> Any:
        network.register_to_config(sample_size=resolution // encoders.vae.downsampling)
        return self.assemble(network, encoders, scheduler, safety_checker=None, feature_extractor=None, requires_safety_checker=False)
