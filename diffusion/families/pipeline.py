"""Images of an exported model or adapter, drawn by diffusers' pipeline with every part of it loaded strictly."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers.utils import logging as diffusers_logging
from PIL import Image
from tqdm import tqdm

from diffusion.common.files import parse_json_object, replacing_folder
from diffusion.common.images import grid, save_png
from diffusion.common.text import first_line
from diffusion.contracts.errors import EncoderError
from diffusion.contracts.exported import LORA_FOLDER
from diffusion.cost.hardware import own_device
from diffusion.encoders.frozen_part import weights_sha256
from diffusion.encoders.pretrained import load_model
from diffusion.families.family import Family
from diffusion.families.registry import FAMILIES, family_of

LORA = Path(LORA_FOLDER, 'pytorch_lora_weights.safetensors')  # of an exported adapter
BATCH_SIZE = 16  # images drawn together unless told otherwise


def generate(
    model: Path,
    prompts: Sequence[str],
    seed: int,
    guidance: float | None = None,
    steps: int | None = None,
    batch_size: int = BATCH_SIZE,
    base: str | None = None,
    size: tuple[int, int] | None = None,
) -> Iterator[Image.Image]:
    """One image a prompt, as they are drawn; guidance and steps default to those of the recipe's sample grids.

    Args:
        base: where the model that an adapter belongs to is now, if it has moved.
        size: (width, height) in pixels; by default the model's own.

    Raises:
        EncoderError: the model cannot be loaded, or its files hold more or less than its weights.
    """
    pipeline, family = open_model(model, base)
    guidance, steps = settings_of(model, guidance, steps)
    for batch, seeds in tqdm(passes(family, prompts, seed, batch_size), desc='generate', unit='batch'):
        yield from draw(pipeline, family, batch, seeds, guidance, steps, size)


def passes(family: Family, prompts: Sequence[str], seed: int, batch_size: int) -> list[tuple[Sequence[str], range]]:
    """Prompts and seeds of each call of `draw`; prompt i has the seed `seed + i`."""
    batch_size = min(batch_size, family.pipeline_batch or batch_size)
    starts = range(0, len(prompts), batch_size)
    batches = [prompts[start : start + batch_size] for start in starts]
    return [(batch, range(seed + start, seed + start + len(batch))) for start, batch in zip(starts, batches, strict=True)]


def facts_of(model: Path) -> dict[str, Any]:
    """What export.json says of an exported model; nothing of a published one.

    Raises:
        EncoderError: it is damaged.
    """
    return _object_in(model / 'export.json') if (model / 'export.json').exists() else {}


def settings_of(model: Path, guidance: float | None, steps: int | None) -> tuple[float, int]:
    """Guidance scale and sampling steps; None stands for those of the recipe's sample grids."""
    facts = facts_of(model)
    return facts.get('guidance', 7.5) if guidance is None else guidance, steps or facts.get('steps', 50)


def open_model(model: Path, base: str | None = None) -> tuple[Any, Family]:
    """The pipeline of a diffusers folder or of an exported adapter, on the GPU if there is one, and its family.

    Args:
        base: where the model that an adapter belongs to is now, if it has moved.

    Raises:
        EncoderError: the model cannot be loaded, or its files hold more or less than its weights.
        InputError: PyTorch has no kernels for the GPU.
    """
    device = own_device()  # before anything is loaded
    if (model / 'model_index.json').exists():
        family = family_in(model)
        pipeline = open_pipeline(model, family)
    else:
        facts = facts_of(model)
        family = family_of(facts['base']['network'])
        pipeline = open_adapted(model, facts['base'], family, base)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline.to(device), family


def draw(
    pipeline: Any,
    family: Family,
    prompts: Sequence[str],
    seeds: Sequence[int],
    guidance: float,
    steps: int,
    size: tuple[int, int] | None = None,
    on_step: Callable[[int], object] | None = None,
) -> list[Image.Image]:
    """One image a prompt, each from the noise of its seed; all in one pass, of at most `family.pipeline_batch`.

    Args:
        size: (width, height) in pixels; by default the model's own.
        on_step: called after each step of the sampler with the number of steps done; an exception that it raises ends the drawing.
    """

    def after_step(_pipeline: Any, step: int, _time: Any, _tensors: Any) -> dict[str, Any]:
        if on_step is not None:
            on_step(step + 1)
        return {}

    return pipeline(
        list(prompts),
        num_inference_steps=steps,
        guidance_scale=guidance,
        generator=[torch.Generator().manual_seed(seed) for seed in seeds],  # the CPU's: the same noise on any device
        callback_on_step_end=after_step,
        **({} if size is None else {'width': size[0], 'height': size[1]}),
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


def open_adapted(model: Path, base: Mapping[str, Any], family: Family, moved: str | None) -> Any:
    """The pipeline of what an exported adapter belongs to, with the adapter.

    Args:
        base: what the adapter's export.json says of it.
        moved: the folder that it is in now.

    Raises:
        EncoderError: as `open_pipeline`; or it has other weights than those that the adapter was trained on.
    """
    source, revision = (moved, None) if moved is not None else (base['source'], base['revision'])
    if revision is None and not Path(source, 'model_index.json').is_file():
        raise EncoderError(
            f'{model}: the adapter belongs to {source}, which is no model in the diffusers layout on this machine; name the folder with --base, or '
            'export the adapter with --merged'
        )
    pipeline = open_pipeline(Path(source), family, revision)
    for name, digest in base['sha256'].items():
        if weights_sha256(getattr(pipeline, name)) != digest:
            raise EncoderError(
                f'{model}: its adapter was trained on another {name} than that of {source}; name the folder of the right one with --base'
            )
    pipeline.load_lora_weights(model / LORA.parent, weight_name=LORA.name)
    return pipeline


def open_pipeline(model: Path, family: Family, revision: str | None = None) -> Any:
    """The pipeline of a diffusers folder, or of OWNER/NAME on the Hub at a revision, its models loaded strictly.

    Raises:
        EncoderError: as `load_model`, or the folder lacks other parts of such a pipeline.
    """
    kind = family.pipeline_class
    parts = _object_in(model / 'model_index.json') if revision is None else kind.load_config(str(model), revision=revision)
    kinds = {(name, kind.__name__): kind for name, others in family.other_models.items() for kind in others}
    models = {
        name: load_model(kinds.get((name, parts[name][1]), usual), str(model), revision, name)
        for name, usual in family.pipeline_models.items()
        if _is_there(parts.get(name))
    }
    try:
        diffusers_logging.disable_progress_bar()  # over the five parts of the pipeline: the large ones are loaded
        return kind.from_pretrained(model, revision=revision, **models, use_safetensors=True)
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


def png_texts(label: str, prompt: str, start: Mapping[str, str], guidance: float, steps: int) -> dict[str, str]:
    """Texts for a PNG: what to repeat to draw its image again.

    Args:
        label: a short name of the model.
        start: what the noise came from.
    """
    return {'prompt': prompt, **start, 'guidance': f'{guidance:g}', 'steps': str(steps), 'model': label}


def write_images(images: Iterable[Image.Image], texts: Iterable[Mapping[str, str]], out: Path) -> None:
    """`0000.png` ... with these texts inside, and `grid.png` at the end; an earlier result in OUT is replaced."""
    drawn = []
    with replacing_folder(out) as temporary:
        for i, (text, image) in enumerate(zip(texts, images, strict=True)):
            save_png(image, temporary / f'{i:04d}.png', text)
            drawn.append(image)
        grid(drawn).save(temporary / 'grid.png')
