"""Models as their authors publish them: of diffusers' own classes and with their defaults, nothing of this project but sizes."""

from pathlib import Path

import torch
from diffusers import AutoencoderKL, EulerDiscreteScheduler, PNDMScheduler, StableDiffusionPipeline, StableDiffusionXLPipeline, UNet2DConditionModel
from transformers import CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

from diffusion.families.networks import find_network

PUBLISHED_STEPS = {'beta_start': 0.00085, 'beta_end': 0.012, 'beta_schedule': 'scaled_linear', 'steps_offset': 1}
SAMPLERS = {  # scheduler_config.json of Stable Diffusion 2 base and of SDXL base 1.0
    StableDiffusionPipeline: PNDMScheduler(skip_prk_steps=True, set_alpha_to_one=False, **PUBLISHED_STEPS),
    StableDiffusionXLPipeline: EulerDiscreteScheduler(timestep_spacing='leading', **PUBLISHED_STEPS),
}


def write_base(folder: Path, network: str, encoders_folder: Path) -> Path:
    """Write a random Stable Diffusion 2 or XL, with the network of this name and these encoders, and return its folder."""
    named = find_network(network)
    kind = {'sd2': StableDiffusionPipeline, 'sdxl': StableDiffusionXLPipeline}[named.family]
    models = {'vae': AutoencoderKL, 'text_encoder': CLIPTextModel, 'tokenizer': CLIPTokenizer}
    others = {'safety_checker': None, 'feature_extractor': None, 'requires_safety_checker': False}
    if kind is StableDiffusionXLPipeline:
        models, others = {**models, 'text_encoder_2': CLIPTextModelWithProjection, 'tokenizer_2': CLIPTokenizer}, {}
    parts = {name: each.from_pretrained(encoders_folder, subfolder=name) for name, each in models.items()}
    torch.manual_seed(0)
    unet = UNet2DConditionModel(**{**named.config, 'sample_size': 8})
    kind(unet=unet, scheduler=SAMPLERS[kind], **parts, **others).save_pretrained(folder)
    return folder
