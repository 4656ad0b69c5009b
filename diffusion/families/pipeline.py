"""Images of an exported model or adapter, drawn by diffusers' pipeline with every part of it loaded strictly."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, NotRequired

import diffusers
import torch
from diffusers.utils import logging as diffusers_logging
from PIL import Image
from pydantic import Field
from torch import nn
from tqdm import tqdm
from typing_extensions import TypedDict

from diffusion.common.files import parse_json_object, read_json, replacing_folder
from diffusion.common.images import grid, save_png
from diffusion.common.text import first_line
from diffusion.contracts.errors import EncoderError
from diffusion.contracts.exported import LORA_FOLDER
from diffusion.encoders.frozen_part import weights_sha256
from diffusion.encoders.pretrained import load_model
from diffusion.families.adapters import adapter_of, load_exported
from diffusion.families.family import Family
from diffusion.families.registry import FAMILIES, family_of
from diffusion.recipe.rules import network_names

LORA = Path(LORA_FOLDER, 'pytorch_lora_weights.safetensors')  # of an exported adapter
BATCH_SIZE = 16  # images drawn together unless told otherwise
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
    """What is read of export.json."""

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
        scheduler: its sampler; None leaves it to the objective.
    """

    zeros_for_empty: bool = False
    scheduler: Any = None

    @classmethod
    def read(cls, folder: Path) -> DrawingSettings:
        """Those of a diffusers folder on this machine; what it does not say is as in the class.

        Raises:
            EncoderError: model_index.json or the scheduler's configuration is damaged.
        """
        zeros, scheduler = False, None
        if (folder / 'model_index.json').exists():
            index = read_json(folder / 'model_index.json', dict[str, Any], EncoderError)
            kinds = {family.pipeline_class.__name__: family.pipeline_class for family in FAMILIES.values()}
            argument = inspect.signature(kinds.get(str(index.get('_class_name')), object)).parameters.get(ZEROS)
            zeros = argument is not None and bool(index.get(ZEROS, argument.default))
        if (folder / SCHEDULER).exists():
            config = read_json(folder / SCHEDULER, dict[str, Any], EncoderError)
            scheduler = scheduler_from(config, str(folder / SCHEDULER)) if '_class_name' in config else None
        return cls(zeros, scheduler)

    def apply(self, pipeline: Any) -> Any:
        """Return the pipeline, which draws by them from now on."""
        if self.scheduler is not None:
            pipeline.scheduler = self.scheduler
        if ZEROS in pipeline.config:
            pipeline.register_to_config(**{ZEROS: self.zeros_for_empty})
        return pipeline


def scheduler_from(config: Mapping[str, Any], where: str) -> Any:
    """Return the sampler of a scheduler_config.json, of one of diffusers' classes.

    Raises:
        EncoderError: it names another class, or holds what that refuses.
    """
    kind = getattr(diffusers, str(config.get('_class_name')), None)
    if not (isinstance(kind, type) and issubclass(kind, diffusers.SchedulerMixin)):
        raise EncoderError(f'{where}: _class_name is {config.get("_class_name")!r}, not one of the schedulers of diffusers {diffusers.__version__}')
    try:
        return kind.from_config(config)  # type: ignore[attr-defined]
    except Exception as error:  # of any class
        raise EncoderError(f'{where}: is no {kind.__name__}: {first_line(error, with_type=True)}') from error


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
    for batch, seeds in tqdm(passes(family, prompts, seed, batch_size), desc='generate', unit='batch'):
        yield from draw(pipeline, family, batch, seeds, guidance, steps, size)


def passes(family: Family, prompts: Sequence[str], seed: int, batch_size: int) -> list[tuple[Sequence[str], range]]:
    """Prompts and seeds of each call of `draw`; prompt i has the seed `seed + i`."""
    batch_size = min(batch_size, family.pipeline_batch or batch_size)
    starts = range(0, len(prompts), batch_size)
    batches = [prompts[start : start + batch_size] for start in starts]
    return [(batch, range(seed + start, seed + start + len(batch))) for start, batch in zip(starts, batches, strict=True)]


def facts_of(model: Path) -> ExportFacts:
    """What export.json says of an exported model; nothing of a published one.

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


def device_here() -> torch.device:
    """The GPU if there is one."""
    return torch.device('cuda' if torch.cuda.is_available() else 'cpu')


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
    return pipeline.to(device_here())


def open_model(model: Path, base: str | None = None, precision: str | None = None) -> tuple[Any, Family]:
    """The pipeline of a diffusers folder or of an exported adapter, on the GPU if there is one, and its family.

    Args:
        base: where the model that an adapter belongs to is now, if it has moved.
        precision: `fp32` or `bf16`, of weights and arithmetic; None takes `precision_on` the device.

    Raises:
        EncoderError: the model cannot be loaded, or its files hold more or less than its weights.
    """
    precision = precision or precision_on(device_here())
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


def base_of_adapter(model: Path) -> tuple[BaseFacts, Family]:
    """What export.json says of the model that an exported adapter belongs to, and that model's family.

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
    pipeline = open_pipeline(Path(source), family, revision)
    for name in family.pipeline_models.keys() - {'safety_checker'}:
        part = getattr(pipeline, name, None)
        if part is None or weights_sha256(part) != base['sha256'].get(name):
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
        EncoderError: as `load_model`, or the folder lacks other parts of such a pipeline.
    """
    kind = family.pipeline_class
    parts = _object_in(model / 'model_index.json') if revision is None else kind.load_config(str(model), revision=revision)
    kinds = {(name, kind.__name__): kind for name, others in family.other_models.items() for kind in others}
    models = {
        name: load_model(kinds.get((name, parts[name][1]), usual), str(model), revision, name, dtype=dtype)
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
