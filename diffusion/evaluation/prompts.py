"""The prompts of an evaluation, each with the id that its noise is keyed by; written once, for all ranks."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from diffusion.common.files import lock, read_json, write_text
from diffusion.common.text import counted
from diffusion.contracts.errors import DataError, InputError
from diffusion.evaluation.images import RealImages, parts_with


class Prompt(NamedTuple):
    """Attributes:
    id: keys the noise: position of the image in the dataset, or line of the file, from 0.
    text: what to draw.
    """

    id: int
    text: str


def read_prompts_file(path: Path) -> list[Prompt]:
    """A prompt a line.

    Raises:
        InputError: it cannot be read, is empty, or has an empty line: leaving one out would move the ids of all that follow.
    """
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f'{path}: cannot be read: {error}') from error
    empty = [number for number, line in enumerate(lines, start=1) if not line.strip()]
    if empty:
        numbers = ', '.join(map(str, empty[:5])) + (' ...' if len(empty) > 5 else '')
        raise InputError(f'{path}: {counted(len(empty), "empty line")} ({numbers}); a line number keys the noise of its prompt: remove or fill them')
    if not lines:
        raise InputError(f'{path}: holds no prompt; write one a line')
    return [Prompt(i, line.strip()) for i, line in enumerate(lines)]


def prompts_sha256(prompts: Sequence[Prompt]) -> str:
    return hashlib.sha256(json.dumps(prompts).encode()).hexdigest()


def captions_as_prompts(images: RealImages, ids: Sequence[int], seed: int, cache: Path) -> list[Prompt]:
    """One caption of each of these images, in the order of `ids`.

    The first process that needs them reads the dataset and leaves the result in the folder `cache`; others wait for it.

    Raises:
        DataError: an image has no caption, or the dataset is damaged.
    """
    digest = hashlib.sha256(json.dumps([images.identity, seed, ids]).encode()).hexdigest()[:16]
    store = cache / f'prompts-{digest}.json'
    cache.mkdir(parents=True, exist_ok=True)
    with store.with_suffix('.lock').open('w') as file:
        lock(file)
        if not store.exists():
            wanted, found, silent = set(ids), {}, []
            for part in parts_with(images, wanted):
                for image in images.read(part, wanted):
                    caption = image.caption(seed)
                    found[image.id] = caption
                    if not caption:
                        silent.append(image.key)
            if silent:
                raise DataError(
                    f'{images.where}: {counted(len(silent), "image")} without a caption, {silent[0]} for one; add captions, or name --prompts FILE'
                )
            write_text(store, json.dumps([[i, found[i]] for i in ids], ensure_ascii=False))
    return [Prompt(*pair) for pair in read_json(store, list[tuple[int, str]], DataError, 'remove it and run the same command again')]
