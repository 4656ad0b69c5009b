"""Models in memory, what visitors may ask of them, and how they draw one request at a time: what `diffusion.generate` would draw, to the byte."""

import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import torch

from data_prep.converting.buckets import AspectBuckets
from diffusion.common.images import save_png
from diffusion.common.text import counted
from diffusion.contracts.errors import InputError
from diffusion.cost.hardware import own_device
from diffusion.evaluation.job.models import DrawingModel
from diffusion.families.family import Family
from diffusion.families.pipeline import draw, open_model, passes, png_texts, precision_on, settings_of

MAX_PROMPT_LETTERS = 2000  # text encoders read 77 to 256 tokens
MAX_GUIDANCE = 30
MAX_SEED = 2**32 - 1  # browsers hold whole numbers up to 2^53
KEPT_DRAWINGS = 200  # whose files remain for browsers that still show them
BUCKETS_FROM_PX = 128  # below, multiples of 64 pixels are no choice of aspect ratios


class Limits(NamedTuple):
    """Largest values of one drawing: one visitor must not occupy the GPU."""

    num_images: int
    steps: int


@dataclass(frozen=True)
class DrawingRequest:
    """Values that a visitor has chosen.

    Args:
        seed: of the first image; image i has `seed + i`.
        size: (width, height) in pixels; None for the model's own.
    """

    prompt: str
    seed: int
    guidance: float
    steps: int
    num_images: int
    size: tuple[int, int] | None = None


def read_request(prompt: Any, seed: Any, guidance: Any, steps: Any, num_images: Any, size: tuple[int, int] | None, limits: Limits) -> DrawingRequest:
    """Check values from a browser, which may be anything: a page's own limits bind nobody.

    Raises:
        InputError: one of them is missing, no number, or beyond its limit.
    """
    if not isinstance(prompt, str) or not prompt.strip():
        raise InputError('The prompt is empty: say what to draw.')
    if len(prompt) > MAX_PROMPT_LETTERS:
        raise InputError(f'The prompt has {len(prompt):,} letters; {MAX_PROMPT_LETTERS:,} are allowed. Shorten it.')
    try:
        prompt.encode()
    except UnicodeEncodeError as error:  # half of a surrogate pair
        raise InputError('The prompt holds a character that is none; write it again.') from error
    num_images = int(_number('Images', num_images, 1, limits.num_images))
    return DrawingRequest(
        prompt=prompt.strip(),
        seed=int(_number('Seed', seed, 0, MAX_SEED - num_images + 1)),
        guidance=float(_number('Guidance', guidance, 1, MAX_GUIDANCE, whole=False)),
        steps=int(_number('Steps', steps, 1, limits.steps)),
        num_images=num_images,
        size=size,
    )


def _number(name: str, value: Any, least: int, most: int, whole: bool = True) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most or (whole and value != int(value)):
        given = 'missing' if value is None else f'{str(value)[:40]}'
        raise InputError(f'{name} is {given}; give a {"whole " if whole else ""}number from {least} to {most}.')
    return value


class Stopped(Exception):
    """The visitor, or the end of the server, has stopped a drawing."""


@dataclass(frozen=True)
class LoadedModel:
    """A pipeline, and how it is drawn with.

    Args:
        label: a short name, unique among the models served together.
        resolution: side in pixels of what it was trained on.
        guidance, steps: the recipe's.
        precision: `fp32` or `bf16`.
    """

    label: str
    pipeline: Any
    family: Family
    resolution: int
    guidance: float
    steps: int
    precision: str

    @property
    def device(self) -> str:
        return torch.cuda.get_device_name(self.pipeline.device) if self.pipeline.device.type == 'cuda' else 'the CPU'

    @property
    def latent_shape(self) -> tuple[int, int]:
        """(channels, side) of the noise that an image of its own size starts from."""
        return self.pipeline.vae.config.latent_channels, self.resolution // self.pipeline.vae_scale_factor

    def num_unread_tokens(self, prompt: str) -> int:
        """How many tokens of a prompt its text encoders cut off; of the one that reads least."""
        tokenizers = [part for name, part in self.pipeline.components.items() if name.startswith('tokenizer') and part is not None]
        return max(0, *(len(tokenizer(prompt, verbose=False).input_ids) - tokenizer.model_max_length for tokenizer in tokenizers))


class DrawnFiles(NamedTuple):
    """PNGs with prompt, seed, guidance, steps and model inside, and the time that they took, without waiting for others' drawings."""

    files: list[Path]
    elapsed_sec: float


def load(folders: Sequence[Path], base: str | None = None, precision: str | None = None) -> list[LoadedModel]:
    """Open models as `diffusion.generate` does.

    Raises:
        EncoderError: one cannot be loaded.
    """
    precision = precision or precision_on(own_device())
    found = [DrawingModel(str(folder), folder, base) for folder in folders]
    labels = [model.label for model in found]
    if len(set(labels)) < len(labels):
        labels = [model.asked for model in found]
    return [
        LoadedModel(label, *open_model(model.folder, base, precision), model.resolution, *settings_of(model.folder, None, None), precision)
        for label, model in zip(labels, found, strict=True)
    ]


class ImageServer:
    """Draws one request at a time, into PNG files that are kept for a while.

    Args:
        folder: for the files.
        batch_size: images drawn together, as `--batch-size` of diffusion.generate.
    """

    def __init__(self, models: Sequence[LoadedModel], folder: Path, limits: Limits, batch_size: int):
        self.models = models
        self.limits = limits
        self.closed = threading.Event()
        self.stops: dict[str, threading.Event] = {}  # by session: the drawing that an open page waits for
        self._folder = folder
        self._batch_size = batch_size
        self._one_at_a_time = threading.Lock()
        self._kept: deque[Path] = deque()

    def sizes(self) -> list[tuple[int, int]]:
        """(width, height) that all models may be asked for besides their own: the buckets of aspect ratios around it."""
        sides = {model.resolution for model in self.models}
        if len(sides) > 1 or min(sides) < BUCKETS_FROM_PX:
            return []
        (side,) = sides
        return [size for size in AspectBuckets(side).sizes() if size != (side, side)]

    def stop(self, session: str) -> None:
        """End the drawing of a session, if it has one."""
        self.stops.pop(session, threading.Event()).set()

    def draw(self, model: LoadedModel, request: DrawingRequest, stop: threading.Event, on_step: Callable[[int, int], object]) -> DrawnFiles:
        """Draw the images of one model.

        Args:
            stop: ends the drawing after the step in progress once it is set.
            on_step: called after each step with the number done, of how many.

        Raises:
            Stopped: `stop` is set, or the server ends.
            InputError: the GPU's memory does not suffice.
        """
        batches = passes(model.family, [request.prompt] * request.num_images, request.seed, self._batch_size)

        def after_step(number: int, step: int) -> None:
            if stop.is_set() or self.closed.is_set():
                raise Stopped
            on_step(number * request.steps + min(step, request.steps), len(batches) * request.steps)  # some samplers take a step more

        with self._one_at_a_time:
            started = time.perf_counter()
            images = []
            for number, (prompts, seeds) in enumerate(batches):
                after_step(number, 0)
                try:
                    how = request.guidance, request.steps, request.size, model.resolution, partial(after_step, number)
                    images += draw(model.pipeline, model.family, prompts, seeds, *how)
                except torch.OutOfMemoryError as error:
                    torch.cuda.empty_cache()
                    raise InputError(
                        f'The GPU has no memory left for {counted(len(prompts), "image")} of this size at once; ask for fewer or smaller ones.'
                    ) from error
            elapsed_sec = time.perf_counter() - started
            return DrawnFiles(self._save(model, request, images), elapsed_sec)

    def _save(self, model: LoadedModel, request: DrawingRequest, images: Sequence[Any]) -> list[Path]:
        folder = self._folder / uuid4().hex
        folder.mkdir()
        name = ''.join(letter if letter.isalnum() or letter in '-_.' else '-' for letter in model.label).strip('-.')
        files = []
        for seed, image in enumerate(images, request.seed):
            files.append(folder / f'{name}-seed{seed}.png')
            save_png(image, files[-1], png_texts(model.label, request.prompt, {'seed': str(seed)}, request.guidance, request.steps, model.precision))
        self._kept.append(folder)
        if len(self._kept) > KEPT_DRAWINGS:
            shutil.rmtree(self._kept.popleft(), ignore_errors=True)
        return files
