"""Datasets that a run makes of its photos and drawn images before its first step: latents in `RUN_FOLDER/prepared/data-NAME` for each stream.

Made once and kept, with `ingredients.json` next to the manifest: a later start finds it by them. It appears whole or not at all.
"""

import gc
import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from typing_extensions import TypedDict

from data_prep.converting.conversion import convert
from data_prep.encoding.dataset import encode
from data_prep.mds.job import Tally
from diffusion.checkpoints.initial import base_of
from diffusion.checkpoints.manifest import batches_of
from diffusion.checkpoints.reading import find_checkpoint, read_checkpoint, recipe_yaml
from diffusion.common.files import lock, read_json, replacing_folder, sync
from diffusion.common.processes import failpoint
from diffusion.common.storage import open_folder, scratch_for
from diffusion.common.text import print_message
from diffusion.contracts.errors import CheckpointError, DataError
from diffusion.contracts.manifest import INDEX_NAME, Manifest
from diffusion.datasets.sources import INGREDIENTS_NAME, is_prepared, located, where
from diffusion.datasets.transforms import RECTANGLE, SQUARE
from diffusion.encoders.frozen import Vae
from diffusion.families.registry import family_of, kernels_in_use
from diffusion.finetuning.drawn import put_drawn, settings_of
from diffusion.finetuning.photos import conversion_of, read_photos
from diffusion.recipe import Recipe, RecipeError, of_another_run, refuse_changes
from diffusion.recipe.schema import Stream
from diffusion.training.builder import STAGING
from diffusion.training.machine import fit_machine

SQUARES_A_PASS = 16  # of 256 px, through the VAE: one image of 1024 px
POLL_SEC = 0.5
LINES_SEC = 60  # between two lines of a rank that waits


def prepare(recipe: Recipe) -> None:
    """Make the datasets of the streams that name `photos` or `drawn`, unless they are there. All processes of a run call it, before it is built.

    The first process of the machine does the work, the others wait without a limit. Several machines do not share it: each would
    encode with its own arithmetic, and no two could read one another's shards.

    Raises:
        DataError: a photo cannot be used, or the photos of a run that has begun are others now.
        RecipeError: this machine cannot do what the recipe says; there are several, and the datasets are not there yet; or the recipe of a run that
            has begun is another one now.
        EncoderError, CheckpointError: the encoders, or the model that draws, cannot be read.
        StorageError: the cache of drawn images does not answer.
    """
    sections = [] if recipe.data.kind == 'synthetic' else ['data', *(['eval'] if recipe.eval.every else [])]
    streams = {section: {name: stream for name, stream in located(recipe, section).items() if is_prepared(stream)} for section in sections}
    if not any(streams.values()):
        return
    fit_machine(recipe, partial(kernels_in_use, recipe))
    folder = Path(recipe.run_folder) / 'prepared'
    done = folder / f'.done-{os.getppid()}'  # the launcher's number tells the processes of one start from those of another
    if int(os.environ.get('LOCAL_RANK', '0')) > 0:
        _wait_for(done)
        return
    with _alone_in(folder):
        every = [(f'{section}.streams.{name}', stream) for section, named in streams.items() for name, stream in named.items()]
        images = {stream.local: _images_of(key, stream, recipe) for key, stream in every}
        for section, named in streams.items():
            common = {
                'resolution': recipe.data.resolution,
                'transform': RECTANGLE if recipe.data.aspect_buckets else SQUARE,
                'vae_sha256': Vae.find(recipe.model.encoders.source, recipe.model.encoders.revision).sha256,
                'text': _text_of(recipe, section, named, images) if named else None,
            }
            for name, stream in named.items():
                _prepare_stream(recipe, f'{section}.streams.{name}', stream, {**images[stream.local], **common})
        _free_memory()
    if int(os.environ.get('LOCAL_WORLD_SIZE', '1')) > 1:
        done.touch()


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Another process may be at it: the run lock is taken later, when the processes of the run know of one another."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / '.lock').open('a')
        lock(file)
    except OSError as error:
        raise RecipeError(str(folder), [f'run_folder: {folder} cannot be written and locked: {error}; name one on another disk']) from error
    with file:
        yield


def _wait_for(done: Path) -> None:
    since = said = time.monotonic()
    while not done.exists():
        if time.monotonic() - said > LINES_SEC:
            said = time.monotonic()
            print_message(f'waiting since {said - since:.0f} s for the first process, which prepares {done.parent}')
        time.sleep(POLL_SEC)


def _images_of(key: str, stream: Stream, recipe: Recipe) -> dict[str, Any]:
    """Facts that tell a stream's images from others."""
    if stream.photos is not None:
        return {'photos': {photo.key: [photo.sha256, photo.captions] for photo in read_photos(stream.photos, recipe.data, f'{key}.photos')}}
    assert stream.drawn is not None
    return {'drawn': settings_of(stream.drawn, recipe), 'base': base_of(recipe)}


def _text_of(recipe: Recipe, section: str, streams: Mapping[str, Stream], images: Mapping[str | None, Mapping[str, Any]]) -> dict[str, str] | None:
    """The text encoders whose embeddings are stored: none if they are trained, or if another dataset of the section, or several captions of a photo,
    keep them in memory anyway."""
    others = [stream for name, stream in located(recipe, section).items() if name not in streams]
    several = any(len(captions) > 1 for named in images.values() for _, captions in named.get('photos', {}).values())
    trained = recipe.adapter is not None and recipe.adapter.text_encoders
    if trained or several or not all(Manifest.read(where(stream)).text_encoder for stream in others):
        return None
    return {'network': recipe.model.network, **_text_digests(recipe.model.network, recipe.model.encoders.source, recipe.model.encoders.revision)}


@cache
def _text_digests(network: str, source: str, revision: str | None) -> dict[str, str]:
    return family_of(network).find_text(source, revision).digests


class _RawData(TypedDict):
    basename: str
    bytes: int


class _Shard(TypedDict):
    raw_data: _RawData


class _Index(TypedDict):
    shards: list[_Shard]


def _has_all_shards(folder: Path) -> bool:
    """Check names and sizes; contents are compared by their hashes before they are used."""
    try:
        shards = [(path.parent, shard['raw_data']) for path in folder.rglob(INDEX_NAME) for shard in read_json(path, _Index)['shards']]
    except ValueError:  # damaged
        return False
    return all((place / raw['basename']).is_file() and (place / raw['basename']).stat().st_size == raw['bytes'] for place, raw in shards)


def _prepare_stream(recipe: Recipe, key: str, stream: Stream, ingredients: Mapping[str, Any]) -> None:
    """Make the dataset of a stream unless it is there, made of the same."""
    folder = Path(where(stream))
    now = json.loads(json.dumps(ingredients))  # as a file holds them: without tuples
    there = folder / INGREDIENTS_NAME
    try:
        then = read_json(there, dict[str, Any])
    except ValueError:  # damaged, or there is none
        then = {}
    expected = now
    if now['text'] and not any(name.startswith('tokenizer') for name in then.get('text') or ()):  # as earlier versions wrote it
        expected = {**now, 'text': {name: digest for name, digest in now['text'].items() if not name.startswith('tokenizer')}}
    if then in (now, expected) and _has_all_shards(folder):
        return
    if key.startswith('data.') and there.exists() and then not in (now, expected):
        _refuse_if_begun(recipe, key, folder, expected)
    if int(os.environ.get('WORLD_SIZE', '1')) > int(os.environ.get('LOCAL_WORLD_SIZE', '1')):
        raise RecipeError(
            recipe.name,
            [
                f'{key}: {folder} is not there, and it is prepared by a run on one machine alone; start this run on one machine first, with '
                'run_folder on a disk that all of them share, or make the dataset with data_prep'
            ],
        )
    _make(recipe, key, stream, folder, json.dumps(ingredients, indent=1, ensure_ascii=False), with_text=ingredients['text'] is not None)


def _refuse_if_begun(recipe: Recipe, key: str, folder: Path, now: Mapping[str, Any]) -> None:
    """Refuse to go on if the run has checkpoints that were trained on other images.

    Raises:
        RecipeError: the recipe has changed, a caption for all photos for example: it is named, and not what follows from it.
        DataError: the photos have, or what they were is damaged.
    """
    places = {recipe.checkpoint.folder, f'{recipe.run_folder}/{STAGING}'}
    if not any(batches_of(open_folder(place).files()) for place in places):
        return
    for place in places:
        with suppress(CheckpointError):  # in storage alone, or damaged: then the images are named
            refuse_changes(recipe, recipe_yaml(read_checkpoint(find_checkpoint(Path(place)))))
    then = read_json(folder / INGREDIENTS_NAME, dict[str, Any], DataError, f'delete {folder} to have it made again of the images that there are now')
    changed = [name for name in {**then, **now} if then.get(name) != now.get(name)]
    photos = [one['photos'] if isinstance(one.get('photos'), dict) else {} for one in (then, now)]
    named = sorted(photo for photo in {**photos[0], **photos[1]} if photos[0].get(photo) != photos[1].get(photo))
    raise DataError(
        f'{key}: {", ".join(changed)} changed since the run began{": " if named else ""}{", ".join(named)}; undo it, or train another run: '
        f'{of_another_run(recipe)}'
    )


def _make(recipe: Recipe, key: str, stream: Stream, folder: Path, ingredients: str, with_text: bool) -> None:
    data, encoders = recipe.data, recipe.model.encoders
    print_message(f'{key}: preparing {folder}')
    with scratch_for(open_folder(folder.parent)) as scratch, replacing_folder(folder) as latents:
        if stream.photos is not None:
            source, caption = stream.photos.folder, stream.photos.caption
        else:
            assert stream.drawn is not None
            source, caption = str(scratch / 'drawn'), None
            Path(source).mkdir()
            put_drawn(stream.drawn, recipe, Path(source))
            _free_memory()
        _all_kept(source, convert(source, scratch / 'images', conversion_of(data), caption=caption))
        network, sides = recipe.model.network if with_text else None, None if data.aspect_buckets else [data.resolution]
        _all_kept(source, encode(scratch / 'images', latents, sides, encoders, network, batch_size=SQUARES_A_PASS))
        for made in (latents, *(latents / bucket for bucket in Manifest.read(latents).streams)):
            (made / INGREDIENTS_NAME).write_text(ingredients)
            sync(made / INGREDIENTS_NAME)
        failpoint('finetuning.encoded')


def _free_memory() -> None:
    """Free what networks held that have drawn or encoded."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _all_kept(source: str, tally: Tally) -> None:
    if tally.dropped:
        raise DataError(f'{source}: {dict(tally.dropped)} of {tally.attempted} images could not be used; take them out, or fix them')
