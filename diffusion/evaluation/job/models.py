"""The model to evaluate, and how it draws.

A model is an exported folder or adapter, a published model in the Hub's cache, or a checkpoint, which is exported first. Prompts are drawn in fixed
chunks: the same bits on any rank, after any restart.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from diffusers.utils import logging as diffusers_logging
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from PIL import Image
from torch import Tensor
from transformers.utils import logging as transformers_logging

from diffusion.checkpoints.exporting import export
from diffusion.checkpoints.manifest import sha256_of
from diffusion.common.files import lock, read_json
from diffusion.common.images import to_pil
from diffusion.common.storage import LocalFolder
from diffusion.contracts.errors import CheckpointError, InputError
from diffusion.cost.hardware import own_device
from diffusion.datasets.keyed_random import Draw, by_id, normal
from diffusion.encoders.frozen import Vae
from diffusion.encoders.pretrained import load_config, load_scheduler
from diffusion.evaluation.job.images import Prompt
from diffusion.families.adapters import adapter_of
from diffusion.families.family import Family
from diffusion.families.pipeline import (
    LORA,
    ExportFacts,
    base_of_adapter,
    facts_of,
    family_in,
    open_model,
    part_classes,
    precision_on,
    read_index,
    scheduler_from,
    settings_of,
)

EXPORTED = 'model'  # folder in OUT
ASKED = 'model.json'  # file in OUT: the checkpoint or run folder that was exported
SPACINGS = ('leading', 'linspace', 'trailing')  # of timesteps, as diffusers names them


@dataclass(frozen=True)
class DrawingModel:
    """A model on the disk."""

    asked: str  # what the user named
    folder: Path  # in the diffusers layout, or an exported adapter
    base: str | None = None  # where the model that an adapter belongs to is now, if it has moved

    @cached_property
    def facts(self) -> ExportFacts:
        return facts_of(self.folder)

    @cached_property
    def sha256(self) -> str:
        """Digest of all files that decide what is drawn: weights, configurations, tokenizers, sampler; of an adapter also of its base."""
        files = sorted(path for path in self.folder.rglob('*') if path.is_file() and path.suffix in ('.safetensors', '.json', '.txt', '.model'))
        names = [(path.relative_to(self.folder).as_posix(), sha256_of(path)) for path in files if path.name != 'export.json']
        decisive: list[object] = [names, self.facts['base']['sha256'] if 'base' in self.facts else None]
        if self.is_adapter:
            base, _ = base_of_adapter(self.folder)
            decisive += [asdict(adapter_of(self.folder)), base.get('scheduler'), base.get('force_zeros_for_empty_prompt')]
        return hashlib.sha256(json.dumps(decisive).encode()).hexdigest()

    @property
    def label(self) -> str:
        """A short name: of the run and the checkpoint, or of the folder."""
        return f'{Path(self.asked).name} {Path(self.facts["checkpoint"]).stem}' if 'checkpoint' in self.facts else Path(self.asked).name

    @property
    def is_adapter(self) -> bool:
        return not (self.folder / 'model_index.json').is_file()

    @property
    def layout(self) -> tuple[str, str | None]:
        """Source and revision of the pipeline in the diffusers layout: the folder, or what an adapter belongs to."""
        if not self.is_adapter:
            return str(self.folder), None
        base, _ = base_of_adapter(self.folder)
        return (base['source'], base['revision']) if self.base is None else (self.base, None)

    @cached_property
    def family(self) -> Family:
        return base_of_adapter(self.folder)[1] if self.is_adapter else family_in(self.folder)

    @cached_property
    def own_scheduler(self) -> Any:
        """The sampler that it was exported with, or that an adapter's base had when it was trained."""
        config = base_of_adapter(self.folder)[0].get('scheduler') if self.is_adapter else None
        if config is not None:
            return scheduler_from(config, f'{self.asked}: export.json: base.scheduler')
        return load_scheduler(part_classes(self.family, *self.layout)['scheduler'], *self.layout)

    @property
    def sampler(self) -> str:
        return type(self.own_scheduler).__name__

    @cached_property
    def vae(self) -> Vae:
        return Vae.find(*self.layout)

    @cached_property
    def downsampling(self) -> int:
        """Pixels along a side of a latent."""
        return self.vae.downsampling

    @property
    def resolution(self) -> int:
        """Side in pixels of what it was trained on, or what a published one draws unless told otherwise."""
        if 'resolution' in self.facts:
            return self.facts['resolution']
        source, revision = self.layout
        if self.family.default_px:
            return self.family.default_px
        network = load_config(self.family.pipeline_parts[self.family.component][0], source, revision, self.family.component)
        return read_index(source, revision).get('default_sample_size') or network['sample_size'] * self.downsampling

    def scheduler(self, sampler: str) -> Any:
        """The model's own sampler, or another one with its settings.

        Args:
            sampler: a class, or `CLASS@SPACING` with diffusers' `timestep_spacing` in place of the model's.

        Raises:
            InputError: it does not fit the model.
        """
        sampler, _, spacing = sampler.partition('@')
        if spacing not in ('', *SPACINGS):
            raise InputError(f'{self.asked}: {sampler}@{spacing}: unknown spacing of timesteps; known: {", ".join(SPACINGS)}')
        changes = {'timestep_spacing': spacing} if spacing else {}
        own = self.own_scheduler
        if sampler == self.sampler:
            return type(own).from_config(own.config, **changes) if changes else own
        fitting = {other.__name__: other for other in own.compatibles}
        if sampler not in fitting:
            raise InputError(f'{self.asked}: cannot draw with {sampler}; with its {self.sampler}, or {", ".join(sorted(fitting)) or "no other"}')
        return fitting[sampler].from_config(own.config, **changes)

    def open(self, sampler: str) -> Any:
        """The pipeline, on this process's device, with a sampler as `scheduler` takes it."""
        pipeline, _ = open_model(self.folder, self.base, 'fp32')
        pipeline.scheduler = self.scheduler(sampler)
        return pipeline


def find_model(asked: str, out: Path, revision: str | None = None, base: str | None = None) -> DrawingModel:
    """Find what the user named. A checkpoint is exported into OUT once, with its EMA weights; other processes wait for that."""
    folder = Path(asked)
    if revision is not None:
        if folder.exists():
            raise InputError(f'{asked}: is on this machine, and --revision is of a model on the Hub; leave the option out')
        try:
            return DrawingModel(f'{asked}@{revision}', Path(snapshot_download(asked, revision=revision, local_files_only=True)), base)
        except (LocalEntryNotFoundError, HfHubHTTPError, ValueError, OSError):
            raise InputError(
                f"{asked}: revision {revision} is not in the Hub's cache on this machine, and nothing is downloaded here; "
                f'run hf download {asked} --revision {revision} first'
            ) from None
    if (folder / 'model_index.json').is_file() or (folder / LORA).is_file():
        return DrawingModel(asked, folder, base)
    refuse_absent(asked, revision)
    return DrawingModel(asked, _exported(folder, out), base)


def refuse_absent(asked: str, revision: str | None) -> None:
    """Raises InputError: it is not on this machine, and not said to be on the Hub."""
    if revision is None and not Path(asked).exists():
        hint = '; of a model on the Hub name the commit too: --revision COMMIT' if asked.count('/') == 1 and not asked.startswith(('/', '.')) else ''
        raise InputError(f'{asked}: no such file or folder{hint}')


def _exported(checkpoint: Path, out: Path) -> Path:
    folder, asked = out / EXPORTED, json.dumps({'checkpoint': str(checkpoint.resolve())}).encode()
    out.mkdir(parents=True, exist_ok=True)
    with (out / '.model.lock').open('w') as file:
        lock(file)
        if not LocalFolder(str(out)).swap(ASKED, None, asked):
            then = read_json(out / ASKED, dict[str, Any], CheckpointError, 'name another OUT').get('checkpoint')
            raise CheckpointError(f'{out}: was begun with {then}, now it is {checkpoint}; name another OUT')
        if not (folder / 'export.json').is_file():  # also if the run has newer checkpoints by now: what was begun is finished
            try:
                export(checkpoint, folder)
            except Exception:
                (out / ASKED).unlink()  # or OUT would be taken for begun with what cannot be exported
                raise
    return folder


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
    """Draw single images of an evaluation again; those of a chunk of the same size differ from the evaluation's by rounding at most."""
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
    device, images = pipeline.vae.device, []
    for start in range(0, len(chunk), together):
        part = chunk[start : start + together]
        ids = torch.tensor([prompt.id for prompt in part])
        with torch.autocast(device.type, torch.bfloat16) if precision == 'bf16' else nullcontext():
            latents = pipeline(
                prompt=[prompt.text for prompt in part],
                latents=normal(seed, by_id(ids), Draw.NOISE, family.noise_shape(pipeline, resolution)),  # on the CPU: alike everywhere
                num_inference_steps=steps,
                output_type='latent',
                **family.call_options(guidance, (resolution, resolution)),
            ).images
        decoded = pipeline.vae.decode(family.unscaled(pipeline, latents), return_dict=False)[0]
        levels = pipeline.image_processor.postprocess(decoded, output_type='pt') * 255
        images.append(levels.round().to(torch.uint8).cpu())  # rounded as diffusers' pipelines round them
    return torch.cat(images)
