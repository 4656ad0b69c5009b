"""Class images: drawn by the model as it is before training, and kept where all runs with the same base and the same settings find them.

    CACHE/DIGEST/drawn.json   what DIGEST is of, to be read by people
    CACHE/DIGEST/00000.png    image i, of the prompt i modulo their number, from the noise of seed + i

An image depends on its own prompt and seed alone and appears whole or not at all. So a run that was killed lacks what it was drawing, and runs
that draw at the same time share the work: each begins somewhere else and looks again before each pass.
"""

import hashlib
import io
import json
import os
import random
import sys
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any
from unittest import mock

from PIL import Image

from data_prep.engines.engine import progress_bar
from diffusion.checkpoints.initial import base_of, load_base
from diffusion.common.images import save_png
from diffusion.common.processes import failpoint
from diffusion.common.storage import Folder, open_folder, scratch_for, write
from diffusion.encoders.frozen import FrozenEncoders
from diffusion.encoders.frozen_part import weights_sha256
from diffusion.families.pipeline import DrawingSettings, draw, placed
from diffusion.families.registry import build_network, family_for
from diffusion.objectives import build_objective
from diffusion.recipe import Recipe
from diffusion.recipe.keys import hub_source
from diffusion.recipe.schema import Drawn

PIXELS_A_PASS = 4 * 1024**2  # four images of 1024 px fit next to SDXL on 24 GB
LONGEST_PASS = 16
DIGEST = 'sha256 of the pixels'  # in each file


class Base:
    """The model that draws, read only as far as is needed to tell it from others."""

    def __init__(self, recipe: Recipe):
        self.recipe, self.family, self.settings = recipe, family_for(recipe), DrawingSettings()
        self.encoders = FrozenEncoders.find(recipe.model.encoders, self.family.find_text)
        self.scheduler = self.family.scheduler(build_objective(recipe.model))

    def identity(self) -> dict[str, Any]:
        """Return how it draws, and its weights or the pinned commits that they come from."""
        path, encoders = base_of(self.recipe), self.recipe.model.encoders
        pinned = f'{encoders.source}@{encoders.revision}' if encoders.revision else self.encoders.digests
        sampler = {name: value for name, value in self.scheduler.config.items() if not name.startswith('_')}  # without diffusers' version
        if hub_source(path):
            return {'base': path, 'encoders': pinned, 'sampler': sampler, 'drawing': 'as the base says'}
        sha256, settings = weights_sha256(self.network), self.settings
        drawing = {'zeros_for_empty': settings.zeros_for_empty, 'scheduler': settings.scheduler and settings.scheduler.to_json_string()}
        return {'base': sha256, 'encoders': pinned, 'sampler': sampler, 'drawing': drawing}

    @cached_property
    def network(self) -> Any:
        network = build_network(self.recipe.model.network)
        with mock.patch.dict(os.environ):
            os.environ.pop('WORLD_SIZE', None)  # the other processes wait, and take no part in what those that load weights do together
            self.settings = load_base(network, self.recipe)
        return network.eval()

    def pipeline(self) -> Any:
        """Return its pipeline, on the GPU if there is one."""
        made = self.family.pipeline(self.network, self.encoders, self.scheduler, self.recipe.data.resolution)
        return placed(self.settings.apply(made), 'fp32' if self.recipe.train.precision == 'fp32' else 'bf16')


def settings_of(drawn: Drawn, recipe: Recipe) -> dict[str, Any]:
    """Settings that the images depend on, apart from the weights that draw them."""
    chosen = {name: getattr(drawn, name) for name in ('prompts', 'num_images', 'seed', 'guidance', 'steps')}
    return {**chosen, 'resolution': recipe.data.resolution, 'precision': 'fp32' if recipe.train.precision == 'fp32' else 'bf16'}


def cache_of(drawn: Drawn, recipe: Recipe, base: Base) -> tuple[Folder, str]:
    """The folder of these images, and what its name is the digest of."""
    facts = json.dumps({**settings_of(drawn, recipe), 'network': recipe.model.network, **base.identity()}, indent=1, ensure_ascii=False)
    return open_folder(f'{drawn.cache.rstrip("/")}/{hashlib.sha256(facts.encode()).hexdigest()[:16]}'), facts


def put_drawn(drawn: Drawn, recipe: Recipe, folder: Path) -> None:
    """Copy the images of a stream into an empty folder, each with its prompt in a .txt file; draw those that the cache lacks.

    Raises:
        EncoderError, CheckpointError: the model that draws cannot be read.
        StorageError: the cache does not answer.
    """
    base = Base(recipe)
    cache, facts = cache_of(drawn, recipe, base)
    prompts = [drawn.prompts[i % len(drawn.prompts)] for i in range(drawn.num_images)]
    at_once = min(max(1, PIXELS_A_PASS // recipe.data.resolution**2), LONGEST_PASS, base.family.pipeline_batch or LONGEST_PASS)
    missing, pipeline = _copy_drawn(range(drawn.num_images), cache, folder), None
    with progress_bar(total=drawn.num_images, initial=drawn.num_images - len(missing), unit='images', desc='draw', disable=not missing) as progress:
        while missing:
            if pipeline is None:
                write(cache, 'drawn.json', facts.encode())
                pipeline = base.pipeline()
            start = random.randrange(len(missing))
            chosen = (missing[start:] + missing[:start])[:at_once]
            how = drawn.guidance, drawn.steps, None, recipe.data.resolution
            images = draw(pipeline, base.family, [prompts[i] for i in chosen], [drawn.seed + i for i in chosen], *how)
            for i, image in zip(chosen, images, strict=True):
                with scratch_for(cache) as scratch:
                    save_png(image, scratch / _name(i), {DIGEST: _digest(image)})
                    cache.put(scratch / _name(i), _name(i))
                failpoint('finetuning.drawn')
            missing = _copy_drawn(missing, cache, folder)
            progress.update(drawn.num_images - len(missing) - progress.n)
    for i, prompt in enumerate(prompts):
        (folder / _name(i)).with_suffix('.txt').write_text(prompt)


def _name(i: int) -> str:
    return f'{i:05d}.png'


def _copy_drawn(wanted: Iterable[int], cache: Folder, folder: Path) -> list[int]:
    """Copy those of the wanted images that the cache holds as they were drawn into `folder`; return the others."""
    there, missing = cache.files(), []
    for i in wanted:
        content = cache.read(_name(i)) if _name(i) in there else None
        if content is not None and _is_as_drawn(content):
            (folder / _name(i)).write_bytes(content)
            continue
        missing.append(i)
        if content is not None:
            print(f'{cache.url}/{_name(i)}: is not what was drawn; it is drawn again', file=sys.stderr, flush=True)
    return missing


def _is_as_drawn(content: bytes) -> bool:
    """A run that reads another's images trains on no others than were drawn."""
    try:
        with Image.open(io.BytesIO(content), formats=('PNG',)) as image:
            return image.info.get(DIGEST) == _digest(image)
    except (OSError, ValueError, SyntaxError):  # what Pillow raises for damaged files
        return False


def _digest(image: Image.Image) -> str:
    return hashlib.sha256(f'{image.mode}{image.size}'.encode() + image.tobytes()).hexdigest()
