"""Models as their authors publish them: of diffusers' own classes and with their defaults, nothing of this project but sizes."""

from pathlib import Path
from typing import Any, get_type_hints

import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderKLFlux2,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    Flux2KleinPipeline,
    PNDMScheduler,
    PRXPipeline,
    StableDiffusion3Pipeline,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
    ZImagePipeline,
)
from transformers import (
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    Qwen2Tokenizer,
    Qwen3ForCausalLM,
    Qwen3Model,
    T5EncoderModel,
    T5Tokenizer,
)

from diffusion.families.networks import find_network

STEPS = {'beta_start': 0.00085, 'beta_end': 0.012, 'beta_schedule': 'scaled_linear', 'steps_offset': 1}
SECOND_CLIP = {'tokenizer': CLIPTokenizer, 'text_encoder_2': CLIPTextModelWithProjection, 'tokenizer_2': CLIPTokenizer}
PUBLISHED: dict[str, tuple[Any, Any, dict[str, Any], dict[str, Any]]] = {
    'sd2': (  # base
        StableDiffusionPipeline,
        PNDMScheduler(skip_prk_steps=True, set_alpha_to_one=False, **STEPS),
        {'text_encoder': CLIPTextModel, 'tokenizer': CLIPTokenizer},
        {'safety_checker': None, 'feature_extractor': None, 'requires_safety_checker': False},
    ),
    'sdxl': (  # base 1.0
        StableDiffusionXLPipeline,
        EulerDiscreteScheduler(timestep_spacing='leading', **STEPS),
        {'text_encoder': CLIPTextModel, **SECOND_CLIP},
        {},
    ),
    'sd3': (  # 3.5 medium
        StableDiffusion3Pipeline,
        FlowMatchEulerDiscreteScheduler(shift=3.0),
        {'text_encoder': CLIPTextModelWithProjection, **SECOND_CLIP, 'text_encoder_3': T5EncoderModel, 'tokenizer_3': T5Tokenizer},
        {},
    ),
    'z-image': (
        ZImagePipeline,
        FlowMatchEulerDiscreteScheduler(shift=6.0),
        {'text_encoder': Qwen3Model, 'tokenizer': Qwen2Tokenizer},
        {},
    ),
    'flux2': (  # klein base
        Flux2KleinPipeline,
        FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        {'vae': AutoencoderKLFlux2, 'text_encoder': Qwen3ForCausalLM, 'tokenizer': Qwen2Tokenizer},
        {'is_distilled': False},
    ),
    'prx': (  # 512, with CLIP in the place of T5Gemma
        PRXPipeline,
        FlowMatchEulerDiscreteScheduler(shift=3.0),
        {'text_encoder': CLIPTextModel, 'tokenizer': CLIPTokenizer},
        {},
    ),
}
"""Pipeline, scheduler_config.json, classes of its text encoders and tokenizers, and further arguments, by family."""


def write_base(folder: Path, network: str, encoders_folder: Path) -> Path:
    """Write a random model with the network of this name and these encoders, and return its folder."""
    named = find_network(network)
    kind, sampler, texts, others = PUBLISHED[named.family]
    parts = {name: each.from_pretrained(encoders_folder, subfolder=name) for name, each in {'vae': AutoencoderKL, **texts}.items()}
    torch.manual_seed(0)
    if named.family == 'flux2':  # statistics of no latents until it is trained
        parts['vae'].bn.running_mean.normal_()
        parts['vae'].bn.running_var.uniform_(0.5, 2)
    if 'transformer' in (classes := get_type_hints(kind.__init__)):
        transformer = parts['transformer'] = classes['transformer'](**named.config)
        for name, weight in transformer.named_parameters():
            if name.endswith('pad_token'):  # zeros in diffusers until they are trained
                torch.nn.init.normal_(weight)
    else:
        parts['unet'] = UNet2DConditionModel(**{**named.config, 'sample_size': 8})
    kind(scheduler=sampler, **parts, **others).save_pretrained(folder)
    return folder
