"""Images of an exported model or adapter, drawn by diffusers' pipeline with every part of it loaded strictly."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, NotRequired

import diffusers
import torch
from PIL import Image
from pydantic import Field
from torch import nn
from tqdm import tqdm
from typing_extensions import TypedDict

from diffusion.common.command_line import MAX_SIDE_PX
from diffusion.common.files import read_json, replacing_folder
from diffusion.common.images import grid, save_png
from diffusion.common.text import first_line
from diffusion.contracts.errors import LORA_FOLDER, EncoderError
from diffusion.cost.hardware import own_device
from diffusion.encoders.frozen_part import weights_sha256
from diffusion.encoders.pretrained import (
    describe,
    hub_problem_of,
    load_model,
    load_scheduler,
    load_tokenizer,
    make_scheduler,
    read_configs,
    tokenizer_sha256,
)
from diffusion.families.adapters import adapter_of, load_exported
from diffusion.families.family import Family
from diffusion.families.registry import FAMILIES, family_of
from diffusion.recipe.rules import network_names

LORA = Path(LORA_FOLDER, 'pytorch_lora_weights.safetensors')  # of an exported adapter, for diffusers
KOHYA = 'kohya.safetensors'  # next to it, for other programs
BATCH_SIZE = 16  # images drawn together unless told otherwise
NUM_NAMED = 7  # classes or parts that a message names
ALIASES = {  # names that published folders, and those of transformers 4, give to what a family has
    'CLIPFeatureExtractor': 'CLIPImageProcessor',
    'CLIPTokenizerFast': 'CLIPTokenizer',
    'Qwen2TokenizerFast': 'Qwen2Tokenizer',
    'T5TokenizerFast': 'T5Tokenizer',
}
SCHEDULER = 'scheduler/scheduler_config.json'
ZEROS: Final = 'force_zeros_for_empty_prompt'  # of SDXL's model_index.json
EXPORT_AGAIN = 'restore the file, or export the model again: python -m diffusion.export CHECKPOINT OUT'


class BaseFacts(TypedDict):
    """The model that an exported adapter belongs to; `source` is a folder, or OWNER/NAME at a `revision` of the Hub."""

    network: str
    source: str
    revision: str | None
    sha256: dict[str, str]
    force_zeros_for_empty_prompt: NotRequired[bool]
    scheduler: NotRequired[dict[str, Any]]


class ExportFacts(TypedDict, total=False):
    """Fields of export.json that are read."""

    checkpoint: str
    batches: int
    resolution: Annotated[int, Field(ge=1, le=65536)]
    guidance: Annotated[float, Field(ge=1, le=1000)]
    steps: Annotated[int, Field(ge=1, le=1000)]
    base: BaseFacts


@dataclass(frozen=True)
class DrawingSettings:
    """How a published model draws, which is part of what it is: whatever is trained from it keeps that.

    Attributes:
        zeros_for_empty: guidance leads away from zeros, not from the encoded empty caption.
        scheduler: its sampler; None leaves it to the objective, which takes Euler's steps along the path of a flow by itself.
    """

    zeros_for_empty: bool = False
    scheduler: Any = None

    @classmethod
    def read(cls, folder: Path) -> DrawingSettings:
        """Read the settings of a diffusers folder on this machine; those that it does not state have the defaults of the class.

        Raises:
            EncoderError: model_index.json or the scheduler's configuration is damaged.
        """
        index = read_configs(str(folder), None, '').get('model_index.json', {})
        kinds = {family.pipeline_class.__name__: family.pipeline_class for family in FAMILIES.values()}
        argument = inspect.signature(kinds.get(str(index.get('_class_name')), object)).parameters.get(ZEROS)
        zeros = argument is not None and bool(index.get(ZEROS, argument.default))
        config = read_configs(str(folder), None, 'scheduler').get('scheduler_config.json', {})
        scheduler = scheduler_from(config, str(folder / SCHEDULER)) if '_class_name' in config else None
        return cls(zeros, None if isinstance(scheduler, diffusers.FlowMatchEulerDiscreteScheduler) else scheduler)

    def apply(self, pipeline: Any) -> Any:
        """Return the pipeline, which draws by them from now on."""
        if self.scheduler is not None:
            pipeline.scheduler = self.scheduler
        if ZEROS in pipeline.config:
            pipeline.register_to_config(**{ZEROS: self.zeros_for_empty})
        return pipeline


def scheduler_from(config: Mapping[str, Any], where: str) -> Any:
    """Return the sampler of a scheduler_config.json, of a class of diffusers that a family lists.

    Raises:
        EncoderError: it names another class, or as `make_scheduler`.
    """
    name, known = str(config.get('_class_name')), {name for family in FAMILIES.values() for name in family.schedulers}
    if name not in known:
        raise EncoderError(f'{where}: _class_name is {name[:60]!r}, none of the samplers that this project draws with: {", ".join(sorted(known))}')
    return make_scheduler(getattr(diffusers, name), config, where)


def generate(
    model: Path,
    prompts: Sequence[str],
    seed: int,
    guidance: float | None = None,
    steps: int | None = None,
    batch_size: int = BATCH_SIZE,
    base: str | None = None,
    size: tuple[int, int] | None = None,
    precision: str | None = None,
) -> Iterator[Image.Image]:
    """One image a prompt, as they are drawn; guidance and steps default to those of the recipe's sample grids.

    Args:
        base: where the model that an adapter belongs to is now, if it has moved.
        size: (width, height) in pixels; by default the model's own.
        precision: see `open_model`.

    Raises:
        EncoderError: the model cannot be loaded, or its files hold more or less than its weights.
    """
    pipeline, family = open_model(model, base, precision)
    guidance, steps = settings_of(model, guidance, steps)
    resolution = facts_of(model).get('resolution')
    for batch, seeds in tqdm(passes(family, prompts, seed, batch_size), desc='generate', unit='batch'):
        yield from draw(pipeline, family, batch, seeds, guidance, steps, size, resolution)


def passes(family: Family, prompts: Sequence[str], seed: int, batch_size: int) -> list[tuple[Sequence[str], range]]:
    """Prompts and seeds of each call of `draw`; prompt i has the seed `seed + i`."""
    batch_size = min(batch_size, family.pipeline_batch or batch_size)
    starts = range(0, len(prompts), batch_size)
    batches = [prompts[start : start + batch_size] for start in starts]
    return [(batch, range(seed + start, seed + start + len(batch))) for start, batch in zip(starts, batches, strict=True)]


def facts_of(model: Path) -> ExportFacts:
    """Contents of export.json of an exported model; empty of a published one.

    Raises:
        EncoderError: it is damaged.
    """
    path = model / 'export.json'
    return read_json(path, ExportFacts, EncoderError, EXPORT_AGAIN) if path.exists() else ExportFacts()


def settings_of(model: Path, guidance: float | None, steps: int | None) -> tuple[float, int]:
    """Guidance scale and sampling steps; None stands for those of the recipe's sample grids."""
    facts = facts_of(model)
    return facts.get('guidance', 7.5) if guidance is None else guidance, steps or facts.get('steps', 50)


def precision_on(device: torch.device) -> str:
    """Precision of drawing where nothing else is asked for."""
    return 'bf16' if device.type == 'cuda' else 'fp32'


def placed(pipeline: Any, precision: str) -> Any:
    """Return the pipeline with its networks on the GPU if there is one, in `fp32` or `bf16`, and without a bar of its own."""
    if precision == 'bf16':
        for part in pipeline.components.values():
            if isinstance(part, nn.Module):
                nn.Module.to(part, torch.bfloat16)  # diffusers' own warns of an empty list of modules
        prepare = pipeline.prepare_latents

        def prepare_rounded(batch: int, channels: int, height: int, width: int, dtype: torch.dtype, *others: Any) -> torch.Tensor:
            return prepare(batch, channels, height, width, torch.float32, *others).to(dtype)

        pipeline.prepare_latents = prepare_rounded  # PyTorch draws other numbers in bf16: a seed would be another image
    pipeline.set_progress_bar_config(disable=True)
    return pipeline.to(own_device())


def open_model(model: Path, base: str | None = None, precision: str | None = None) -> tuple[Any, Family]:
    """The pipeline of a diffusers folder or of an exported adapter, on the GPU if there is one, and its family.

    Args:
        base: where the model that an adapter belongs to is now, if it has moved.
        precision: `fp32` or `bf16`, of weights and arithmetic; None takes `precision_on` the device.

    Raises:
        EncoderError: the model cannot be loaded, or its files hold more or less than its weights.
        InputError: PyTorch has no kernels for the GPU.
    """
    precision = precision or precision_on(own_device())  # before anything is loaded
    if (model / 'model_index.json').exists():
        family = family_in(model)
        pipeline = open_pipeline(model, family, dtype=torch.bfloat16 if precision == 'bf16' else torch.float32)
    else:
        family, pipeline = open_adapted(model, base)
    return placed(pipeline, precision), family


def draw(
    pipeline: Any,
    family: Family,
    prompts: Sequence[str],
    seeds: Sequence[int],
    guidance: float,
    steps: int,
    size: tuple[int, int] | None = None,
    resolution: int | None = None,
    on_step: Callable[[int], object] | None = None,
) -> list[Image.Image]:
    """One image a prompt, each from the noise of its seed; all in one pass, of at most `family.pipeline_batch`.

    Args:
        size: (width, height) in pixels; by default the model's own.
        resolution: side of what it was trained on, for a pipeline that does not know it.
        on_step: called after each step of the sampler with the number of steps done; an exception that it raises ends the drawing.
    """

    def after_step(_pipeline: Any, step: int, _time: Any, _tensors: Any) -> dict[str, Any]:
        if on_step is not None:
            on_step(step + 1)
        return {}

    return pipeline(
        prompt=list(prompts),
        num_inference_steps=steps,
        generator=[torch.Generator().manual_seed(seed) for seed in seeds],  # the CPU's: the same noise on any device
        callback_on_step_end=after_step,
        **family.call_options(guidance, size, resolution),
    ).images


def family_in(model: Path) -> Family:
    """The family whose pipeline a diffusers folder names.

    Raises:
        EncoderError: none of ours has it.
    """
    name = read_index(str(model), None).get('_class_name')
    known = {family.pipeline_class.__name__: family for family in FAMILIES.values()}
    if not isinstance(name, str) or name not in known:
        raise EncoderError(f'{model}: is for {str(name)[:60]}; this project draws with {", ".join(known)}')
    return known[name]


def read_index(source: str, revision: str | None) -> dict[str, Any]:
    """Read model_index.json of a diffusers folder, or of OWNER/NAME on the Hub at a revision.

    Raises:
        EncoderError: it is missing or damaged, or names code.
    """
    index = read_configs(source, revision, '').get('model_index.json')
    if index is None:
        reason = hub_problem_of(source) or 'has no model_index.json'
        raise EncoderError(f'{describe(source, revision)}: {reason}; python -m diffusion.export CHECKPOINT OUT writes a model')
    return index


def part_classes(family: Family, source: str, revision: str | None) -> dict[str, Any]:
    """Return the class of each part that model_index.json lists, by its folder: only those that the family knows, and none imported by its name.

    Raises:
        EncoderError: as `read_index`; or it lists a part or a class that such a pipeline has not.
    """
    classes: dict[str, Any] = {}
    for name, entry in read_index(source, revision).items():
        known = {kind.__name__: kind for kind in family.pipeline_parts.get(name, ())}
        if name == 'scheduler':
            known = {kind: getattr(diffusers, kind) for kind in family.schedulers}
        if name.startswith('_') or entry == [None, None] or not (known or isinstance(entry, list | dict)):
            continue  # a part that the model does without, or a setting
        library, kind = entry if isinstance(entry, list) and len(entry) == 2 and all(isinstance(text, str) for text in entry) else ('', '')
        chosen = known.get(ALIASES.get(kind, kind))
        if chosen is None or library not in chosen.__module__.split('.'):
            allowed = ', '.join(list(known or (*family.pipeline_parts, 'scheduler'))[:NUM_NAMED])
            raise EncoderError(
                f'{describe(source, revision)}: model_index.json: {name}: {json.dumps(entry)[:100]} is no part of '
                f'{family.pipeline_class.__name__} that this project loads; known are {allowed}'
            )
        classes[name] = chosen
    return classes


def base_of_adapter(model: Path) -> tuple[BaseFacts, Family]:
    """Return the record in export.json of the model that an exported adapter belongs to, and that model's family.

    Raises:
        EncoderError: it is damaged, says nothing, or names no network of ours.
    """
    base = facts_of(model).get('base')
    if base is None or base['network'] not in network_names():
        what = 'does not say which model its adapter belongs to (base)' if base is None else f'base.network: unknown network {base["network"]!r}'
        raise EncoderError(f'{model / "export.json"}: {what}; {EXPORT_AGAIN}')
    return base, family_of(base['network'])


def open_adapted(model: Path, moved: str | None) -> tuple[Family, Any]:
    """The pipeline, in float32, of what an exported adapter belongs to, with the adapter; it draws as the base did when the adapter was trained.

    Args:
        moved: the folder that the base is in now; None takes the one that export.json names.

    Raises:
        EncoderError: as `open_pipeline`; or the base has other weights than those that the adapter was trained on; or the adapter's file does not
            hold exactly the weights that its recipe describes.
    """
    (base, family), adapter = base_of_adapter(model), adapter_of(model)
    source, revision = (moved, None) if moved is not None else (base['source'], base['revision'])
    if revision is None and not Path(source, 'model_index.json').is_file():
        raise EncoderError(
            f'{model}: the adapter belongs to {source}, which is no model in the diffusers layout on this machine; name the folder with --base, or '
            'export the adapter with --merged'
        )
    wanted, given = family.pipeline_class.__name__, read_index(source, revision).get('_class_name')
    if given != wanted and given in {other.pipeline_class.__name__ for other in FAMILIES.values()}:
        raise EncoderError(f'{model}: its adapter belongs to a {wanted}, and {source} is a {given}; name the folder of the right one with --base')
    pipeline = open_pipeline(Path(source), family, revision)
    for name in family.pipeline_parts.keys() - {'safety_checker', 'feature_extractor'}:
        part, digest = getattr(pipeline, name, None), tokenizer_sha256 if name.startswith('tokenizer') else weights_sha256
        if digest is tokenizer_sha256 and name not in base['sha256']:
            continue  # exports of earlier versions have none
        if part is None or digest(part) != base['sha256'].get(name):
            raise EncoderError(
                f'{model}: its adapter was trained on another {name} than that of {source}; name the folder of the right one with --base'
            )
    if ZEROS in base and 'scheduler' in base:  # exports of earlier versions leave it to the base
        DrawingSettings(base[ZEROS], scheduler_from(base['scheduler'], f'{model / "export.json"}: base.scheduler')).apply(pipeline)
    load_exported(pipeline.components, adapter, family, model / LORA)
    return family, pipeline


def open_pipeline(model: Path, family: Family, revision: str | None = None, dtype: torch.dtype = torch.float32) -> Any:
    """The pipeline of a diffusers folder, or of OWNER/NAME on the Hub at a revision, its models loaded strictly, in `dtype`.

    Raises:
        EncoderError: as `part_classes` and `load_model`, or the folder lacks other parts of such a pipeline.
    """
    kind, source, where = family.pipeline_class, str(model), describe(str(model), revision)
    classes, index = part_classes(family, source, revision), read_index(source, revision)
    missing = [name for name in (*family.pipeline_parts, 'scheduler') if name not in classes and name not in kind._optional_components]
    if missing:
        raise EncoderError(f'{where}: model_index.json lists no {missing[0]}; export or download the folder again')
    parts: dict[str, Any] = dict.fromkeys(kind._optional_components)
    try:
        for name, part in sorted(classes.items()):  # so text encoders come before tokenizers
            if name == 'scheduler':
                parts[name] = load_scheduler(part, source, revision)
            elif name.startswith('tokenizer'):
                parts[name] = load_tokenizer(source, revision, name, parts[name.replace('tokenizer', 'text_encoder')].config, part)
            elif issubclass(part, nn.Module):
                parts[name] = load_model(part, source, revision, name, dtype=dtype)
            else:
                parts[name] = part.from_dict(read_configs(source, revision, name)['preprocessor_config.json'])
        # The pipeline's own `from_pretrained` would import whatever module model_index.json names.
        pipeline: Any = kind(**parts, **{name: index[name] for name in inspect.signature(kind).parameters if name in index and name not in parts})
        latents = parts[family.component].config.get('sample_size') or 0
        side = index.get('default_sample_size') or (max(latents) if isinstance(latents, list | tuple) else latents) * pipeline.vae_scale_factor
        if side > MAX_SIDE_PX:
            raise ValueError(f'it draws {side:,} pixels a side, at most {MAX_SIDE_PX:,} are drawn')
    except EncoderError:
        raise
    except Exception as error:  # of parts that do not fit each other, or settings of another type
        raise EncoderError(f'{where}: cannot be opened as a {kind.__name__}: {first_line(error, with_type=True)}') from error
    return pipeline


def png_texts(label: str, prompt: str, start: Mapping[str, str], guidance: float, steps: int, precision: str) -> dict[str, str]:
    """Texts for a PNG: what to repeat to draw its image again.

    Args:
        label: a short name of the model.
        start: what the noise came from.
    """
    return {'prompt': prompt, **start, 'guidance': f'{guidance:g}', 'steps': str(steps), 'precision': precision, 'model': label}


def write_images(images: Iterable[Image.Image], texts: Iterable[Mapping[str, str]], out: Path) -> None:
    """`0000.png` ... with these texts inside, and `grid.png` at the end; an earlier result in OUT is replaced."""
    drawn = []
    with replacing_folder(out) as temporary:
        for i, (text, image) in enumerate(zip(texts, images, strict=True)):
            save_png(image, temporary / f'{i:04d}.png', text)
            drawn.append(image)
        grid(drawn).save(temporary / 'grid.png')
