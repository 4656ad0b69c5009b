"""Fixed chunks of prompts become images: the same bits on any rank, after any restart."""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from diffusers.utils import logging as diffusers_logging
from PIL import Image
from torch import Tensor
from transformers.utils import logging as transformers_logging

from diffusion.common.images import to_pil
from diffusion.cost.hardware import own_device
from diffusion.datasets.keyed_random import Draw, by_id, normal
from diffusion.evaluation.models import DrawingModel
from diffusion.evaluation.prompts import Prompt
from diffusion.families.family import Family
from diffusion.families.pipeline import precision_on, settings_of


def chunks_of(prompts: Sequence[Prompt], size: int) -> list[list[Prompt]]:
    """`size` prompts each. The last one is padded by its own last prompt: the bits of an image depend on how many are drawn together."""
    chunks = [list(prompts[start : start + size]) for start in range(0, len(prompts), size)]
    return [chunk + [chunk[-1]] * (size - len(chunk)) for chunk in chunks]


def draw_ids(
    model: Path,
    texts: Sequence[str],
    ids: Sequence[int],
    seed: int,
    guidance: float | None = None,
    steps: int | None = None,
    chunk: int = 16,
    base: str | None = None,
    precision: str | None = None,
) -> Iterator[Image.Image]:
    """Single images of an evaluation again; those of a chunk of the same size differ from the evaluation's by rounding at most.

    Raises:
        EncoderError: the model cannot be loaded.
    """
    found, precision = DrawingModel(str(model), model, base), precision or precision_on(own_device())
    pipeline, (guidance, steps) = found.open(found.sampler), settings_of(model, guidance, steps)
    prompts = [Prompt(prompt_id, text) for prompt_id, text in zip(ids, texts, strict=True)]
    for start, batch in zip(range(0, len(prompts), chunk), chunks_of(prompts, chunk), strict=True):
        drawn = draw_chunk(pipeline, found.family, batch, seed, guidance, steps, found.resolution, precision)
        yield from map(to_pil, drawn[: len(prompts) - start])


@torch.no_grad()
def draw_chunk(
    pipeline: Any, family: Family, chunk: Sequence[Prompt], seed: int, guidance: float, steps: int, resolution: int, precision: str = 'fp32'
) -> Tensor:
    """(B, 3, H, W) uint8 on the CPU, each image from the noise of (seed, id of its prompt), as `TextToImage.generate` draws those of ids 0, 1 ...

    Args:
        precision: `bf16` computes matrix products of the denoiser in it; the sampler's arithmetic and the VAE stay in float32.
    """
    for library in (diffusers_logging, transformers_logging):  # or warnings for captions of more than 77 tokens
        library.set_verbosity_error()
    together = family.pipeline_batch or len(chunk)
    device = pipeline.vae.device
    side = resolution // pipeline.vae_scale_factor
    images = []
    for start in range(0, len(chunk), together):
        part = chunk[start : start + together]
        ids = torch.tensor([prompt.id for prompt in part])
        with torch.autocast(device.type, torch.bfloat16) if precision == 'bf16' else nullcontext():
            latents = pipeline(
                [prompt.text for prompt in part],
                latents=normal(seed, by_id(ids), Draw.NOISE, (pipeline.vae.config.latent_channels, side, side)),  # on the CPU: alike everywhere
                height=resolution,
                width=resolution,
                num_inference_steps=steps,
                guidance_scale=guidance,
                output_type='latent',
                **family.pipeline_options,
            ).images
        images.append(decode(pipeline, latents.float()))
    return torch.cat(images)


def decode(pipeline: Any, latents: Tensor) -> Tensor:
    """(B, 3, H, W) uint8 of the sampler's latents, rounded as diffusers' pipelines round them."""
    config = pipeline.vae.config
    latents = latents / config.scaling_factor
    if config.shift_factor is not None:
        latents = latents + config.shift_factor
    images = pipeline.image_processor.postprocess(pipeline.vae.decode(latents, return_dict=False)[0], output_type='pt')
    return (images * 255).round().to(torch.uint8).cpu()
