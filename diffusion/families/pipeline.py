"""Images of an exported model, drawn by diffusers' pipeline with every part of it loaded strictly."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers.utils import logging as diffusers_logging
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from tqdm import tqdm

from diffusion.common.files import parse_json_object, replacing_folder
from diffusion.common.images import grid
from diffusion.common.text import first_line
from diffusion.contracts.errors import EncoderError
from diffusion.encoders.pretrained import load_model
from diffusion.families.family import Family
from diffusion.families.registry import FAMILIES


def generate(
    model: Path, prompts: Sequence[str], seed: int, guidance: float | None = None, steps: int | None = None, batch_size: int = 16
) -> Iterator[Image.Image]:
    """One image a prompt, as they are drawn; guidance and steps default to those of the recipe's sample grids.

    Raises:
        EncoderError: the model cannot be loaded, or its files hold more or less than its weights.
    """
    facts = _object_in(model / 'export.json') if (model / 'export.json').exists() else {}
    device = 'cuda' if torch.cuda.is_available() else 'cpu'
    family = family_in(model)
    pipeline = open_pipeline(model, family).to(device)
    pipeline.set_progress_bar_config(disable=True)
    batch_size = min(batch_size, family.pipeline_batch or batch_size)
    for start in tqdm(range(0, len(prompts), batch_size), desc='generate', unit='batch'):
        batch = list(prompts[start : start + batch_size])
        yield from pipeline(
            batch,
            num_inference_steps=steps or facts.get('steps', 50),
            guidance_scale=facts.get('guidance', 7.5) if guidance is None else guidance,
            # Noise from the CPU's generator: the same image on any device.
            generator=[torch.Generator().manual_seed(seed + start + i) for i in range(len(batch))],
            **family.pipeline_options,
        ).images


def family_in(model: Path) -> Family:
    """The family whose pipeline a diffusers folder names.

    Raises:
        EncoderError: none of ours has it.
    """
    name = _object_in(model / 'model_index.json').get('_class_name')
    known = {family.pipeline_class.__name__: family for family in FAMILIES.values()}
    if name not in known:
        raise EncoderError(f'{model}: is for {name}; this project draws with {", ".join(known)}')
    return known[name]


def open_pipeline(model: Path, family: Family) -> Any:
    """The pipeline of a diffusers folder, its models loaded strictly.

    Raises:
        EncoderError: as `load_model`, or the folder lacks other parts of such a pipeline.
    """
    parts, kind = _object_in(model / 'model_index.json'), family.pipeline_class
    models = {name: load_model(cls, str(model), None, name) for name, cls in family.pipeline_models.items() if _is_there(parts.get(name))}
    try:
        diffusers_logging.disable_progress_bar()  # over the five parts of the pipeline: the large ones are loaded
        return kind.from_pretrained(model, **models, use_safetensors=True)
    except Exception as error:  # its scheduler, tokenizer, or whatever else model_index.json names
        raise EncoderError(f'{model}: cannot be opened as a {kind.__name__}: {first_line(error, with_type=True)}') from error


def _object_in(file: Path) -> dict[str, Any]:
    try:
        return parse_json_object(file.read_text())
    except ValueError as error:
        raise EncoderError(f'{file}: {error}; python -m diffusion.export CHECKPOINT OUT writes a model') from error


def _is_there(entry: object) -> bool:
    """Of model_index.json: a part that the model does without is absent, or `[null, null]`."""
    return isinstance(entry, list) and any(entry)


def write_images(images: Iterable[Image.Image], prompts: Sequence[str], seed: int, out: Path) -> None:
    """`0000.png` ... with prompt and seed inside, and `grid.png` at the end; an earlier result in OUT is replaced."""
    drawn = []
    with replacing_folder(out) as temporary:
        for i, (prompt, image) in enumerate(zip(prompts, images, strict=True)):
            info = PngInfo()
            info.add_text('prompt', prompt)
            info.add_text('seed', str(seed + i))
            image.save(temporary / f'{i:04d}.png', pnginfo=info)
            drawn.append(image)
        grid(drawn).save(temporary / 'grid.png')
