"""Datasets that a run makes of its photos and drawn images before its first step: latents in `RUN_FOLDER/prepared/data-NAME` for each stream.

Made once and kept, with `ingredients.json` next to the manifest: a later start finds it by them. It appears whole or not at all.
"""

import gc
import json
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from streaming import MDSWriter

from data_prep.encoding.dataset import batch_at, columns_of, encode_captions, text_encoder_facts, write_empty_captions
from data_prep.engines.engine import progress_bar
from data_prep.mds.dataset import Columns
from diffusion import __version__
from diffusion.checkpoints.initial import base_of
from diffusion.checkpoints.manifest import batches_of
from diffusion.checkpoints.reading import find_checkpoint, read_checkpoint, recipe_yaml
from diffusion.common.files import lock, read_json, replacing_folder, sync
from diffusion.common.processes import failpoint
from diffusion.common.storage import open_folder, scratch_for
from diffusion.common.text import print_message
from diffusion.contracts.errors import CheckpointError, DataError
from diffusion.contracts.manifest import INDEX_NAME, LOSS_MAP, MANIFEST_NAME, Manifest
from diffusion.cost.hardware import own_device
from diffusion.datasets.shards import HASH, read_index
from diffusion.datasets.sources import INGREDIENTS_NAME, is_prepared, located, where
from diffusion.datasets.transforms import RECTANGLE, SQUARE, cover, covered
from diffusion.encoders.frozen import FrozenEncoders
from diffusion.families.networks import find_network
from diffusion.families.registry import family_of, kernels_in_use
from diffusion.finetuning.drawn import put_drawn, settings_of
from diffusion.finetuning.photos import OF_FOLDERS, Photo, read_photos
from diffusion.recipe import Recipe, RecipeError, of_another_run, refuse_changes
from diffusion.recipe.schema import Photos, Stream
from diffusion.training.builder import STAGING
from diffusion.training.machine import fit_machine

SQUARES_A_PASS = 16  # of 256 px, through the VAE: one image of 1024 px
LINES_SEC = 60  # between two lines of a rank that waits


def prepare_streams(recipe: Recipe) -> None:
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
        since = said = time.monotonic()
        while not done.exists():
            if time.monotonic() - said > LINES_SEC:
                said = time.monotonic()
                print_message(f'waiting since {said - since:.0f} s for the first process, which prepares {folder}')
            time.sleep(0.5)
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        held = (folder / '.lock').open('a')
        lock(held)  # another process may be at it: the run lock is taken later, when the processes of the run know of one another
    except OSError as error:
        raise RecipeError(str(folder), [f'run_folder: {folder} cannot be written and locked: {error}; name one on another disk']) from error
    with held:
        every = [(f'{section}.streams.{name}', stream) for section, named in streams.items() for name, stream in named.items()]
        images = {key: _facts_of_images(key, stream, recipe) for key, stream in every}
        encoders = FrozenEncoders.find(recipe.model.encoders, family_of(recipe.model.network).find_text)
        keeps_text = not any(map(_has_several_captions, images.values()))
        for section, named in streams.items():
            common = {
                'resolution': recipe.data.resolution,
                'transform': RECTANGLE if recipe.data.aspect_buckets else SQUARE,
                'vae_sha256': encoders.vae.sha256,
                'text': _text_facts(recipe, section, encoders) if named and keeps_text else None,
            }
            for name, stream in named.items():
                key = f'{section}.streams.{name}'
                _prepare_stream(recipe, key, stream, {**images[key], **common}, encoders)
        del encoders
        _free_memory()
    if int(os.environ.get('LOCAL_WORLD_SIZE', '1')) > 1:
        done.touch()


def _facts_of_images(key: str, stream: Stream, recipe: Recipe) -> dict[str, Any]:
    """Facts that tell a stream's images from others."""
    if stream.photos is not None:
        outside = {} if stream.photos.loss_outside is None else {'loss_outside': stream.photos.loss_outside}
        photos = read_photos(stream.photos, recipe.data, f'{key}.photos')
        return {'photos': {photo.key: [photo.sha256, photo.captions] for photo in photos}, **outside}
    assert stream.drawn is not None
    return {'drawn': settings_of(stream.drawn, recipe), 'base': base_of(recipe)}


def _has_several_captions(facts: Mapping[str, Any]) -> bool:
    return any(len(captions) > 1 for _, captions in facts.get('photos', {}).values())


def _text_facts(recipe: Recipe, section: str, encoders: FrozenEncoders) -> dict[str, str] | None:
    """The text encoders whose embeddings are stored: none if they are trained, or if another dataset of the section keeps them in memory anyway."""
    others = [stream for stream in located(recipe, section).values() if not is_prepared(stream)]
    trained = recipe.adapter is not None and recipe.adapter.text_encoders
    if trained or not all(Manifest.read(where(stream)).text_encoder for stream in others):
        return None
    return {'network': recipe.model.network, **encoders.text.digests}


def _prepare_stream(recipe: Recipe, key: str, stream: Stream, ingredients: Mapping[str, Any], encoders: FrozenEncoders) -> None:
    """Make the dataset of a stream unless it is there, made of the same."""
    folder = Path(where(stream))
    record = folder / INGREDIENTS_NAME
    try:
        then = read_json(record, dict[str, Any])
    except ValueError:  # damaged, or there is none
        then = {}
    now = expected = json.loads(json.dumps(ingredients))  # as a file holds them: without tuples
    if now['text'] and not any(name.startswith('tokenizer') for name in then.get('text') or ()):  # as earlier versions wrote it
        expected = {**now, 'text': {name: digest for name, digest in now['text'].items() if not name.startswith('tokenizer')}}
    is_same = then in (now, expected)
    if is_same and _has_all_shards(folder):
        return
    if key.startswith('data.') and record.exists() and not is_same:
        _refuse_if_begun(recipe, key, folder, expected)
    if int(os.environ.get('WORLD_SIZE', '1')) > int(os.environ.get('LOCAL_WORLD_SIZE', '1')):
        error = (
            f'{key}: {folder} is not there, and it is prepared by a run on one machine alone; start this run on one machine first, with '
            'run_folder on a disk that all of them share, or make the dataset with data_prep'
        )
        raise RecipeError(recipe.name, [error])
    print_message(f'{key}: preparing {folder}')
    with scratch_for(open_folder(folder.parent)) as scratch, replacing_folder(folder) as latents:
        if stream.drawn is not None:
            put_drawn(stream.drawn, recipe, scratch)
            _free_memory()
        photos = stream.photos or Photos(str(scratch))
        _encode(read_photos(photos, recipe.data, f'{key}.photos'), photos.folder, recipe, ingredients, encoders, latents)
        for manifest in [*latents.rglob(MANIFEST_NAME)]:
            manifest.with_name(INGREDIENTS_NAME).write_text(json.dumps(ingredients, indent=1, ensure_ascii=False))
        for path in latents.rglob('*.*'):
            sync(path)
        failpoint('finetuning.encoded')


def _has_all_shards(folder: Path) -> bool:
    """Check names and sizes; contents are compared by their hashes before they are used."""
    try:
        found = [(index.parent / shard.basename, shard) for index in folder.rglob(INDEX_NAME) for shard in read_index(index.read_bytes())]
    except ValueError:  # damaged
        return False
    return all(path.is_file() and path.stat().st_size == shard.num_bytes for path, shard in found)


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


def _encode(photos: Iterable[Photo], source: str, recipe: Recipe, ingredients: Mapping[str, Any], encoders: FrozenEncoders, latents: Path) -> None:
    """Write photos as the dataset that `data_prep.convert` and `data_prep.encode` would make of them: squares, or a stream for each aspect bucket."""
    vae, text, device = encoders.vae, encoders.text if ingredients['text'] else None, own_device()
    outside = ingredients.get('loss_outside')
    encoders.to(device)
    streams, kept = dict[str, tuple[MDSWriter, Columns, tuple[int, int]]](), Counter[str]()
    total = len(ingredients['photos']) if 'photos' in ingredients else ingredients['drawn']['num_images']
    with progress_bar(total=total, unit='images', desc='encode') as progress:
        for batch in _batches(photos):
            bucket, size_px = batch[0].bucket, batch[0].train_px
            if bucket not in streams:
                columns = columns_of(vae, text, size_px, _has_several_captions(ingredients))
                if outside is not None:
                    width, height = (side // vae.downsampling for side in size_px)
                    columns = {**columns, LOSS_MAP: (f'ndarray:float16:{height},{width}', 'factor of the loss by place in the latents')}
                encodings = {column: encoding for column, (encoding, _) in columns.items()}
                streams[bucket] = MDSWriter(out=str(latents / bucket), columns=encodings, hashes=[HASH], progress_bar=False), columns, size_px
            writer, columns, _ = streams[bucket]
            pixels, crops = zip(*(covered(photo.content, *size_px) for photo in batch), strict=True)
            try:
                encoded = {'moments': vae.encode(torch.stack(pixels).to(device)).half()}
                if text is not None:
                    encoded |= encode_captions(text, [photo.captions[0][0] for photo in batch])
            except torch.cuda.OutOfMemoryError as error:
                what = f'{len(batch)} images of {size_px[0]} x {size_px[1]} px'
                less = 'free it of other processes, or encode them apart by data_prep.encode with a small --batch-size'
                raise DataError(f'{source}: the GPU has too little memory for {what}: {error}; {less}') from error
            arrays = {column: values.cpu().numpy() for column, values in encoded.items()}
            if outside is not None:
                arrays[LOSS_MAP] = np.stack([loss_map(photo, outside, vae.downsampling) for photo in batch])
            for i, (photo, crop) in enumerate(zip(batch, crops, strict=True)):
                if not np.isfinite(arrays['moments'][i]).all():
                    raise DataError(f'{source}/{photo.key}: its latents are not finite; take it out of the folder, or name another VAE')
                sample: dict[str, Any] = {'key': photo.key, 'caption': photo.captions[0][0], 'captions': photo.captions}
                sample |= {'size': np.array(photo.size_px[::-1], np.int32), 'crop': np.array(crop, np.int32)}
                sample |= {column: values[i] for column, values in arrays.items()}
                writer.write({column: sample[column] for column in columns})
            kept[bucket] += len(batch)
            progress.update(len(batch))
    whole = Manifest(
        kind='latents',
        columns={},
        num_samples=kept.total(),
        attempted=kept.total(),
        dropped={},
        source={'path': source, 'format': OF_FOLDERS},
        hashes=[HASH],
        code_version=__version__,
        streams=sorted(filter(None, streams)),
        transform=ingredients['transform'],
        encoder=vae.described(recipe.model.encoders.source, recipe.model.encoders.revision),  # type: ignore[arg-type]
        text_encoder={} if text is None else text_encoder_facts(text, find_network(recipe.model.network).family),
    )
    (latents / MANIFEST_NAME).write_text(whole.to_json())
    for bucket, (writer, columns, (width, height)) in streams.items():
        writer.finish()
        described: dict[str, Any] = {name: {'encoding': encoding, 'meaning': meaning} for name, (encoding, meaning) in columns.items()}
        size = {'bucket': {'width_px': width, 'height_px': height}} if bucket else {'resolution': width}
        manifest = replace(whole, columns=described, num_samples=kept[bucket], attempted=kept[bucket], streams=[], **size)
        (latents / bucket / MANIFEST_NAME).write_text(manifest.to_json())
    if text is not None:
        write_empty_captions(text, open_folder(latents), list(streams))


def loss_map(photo: Photo, outside: float, downsampling: int) -> np.ndarray:
    """(h, w) float16 factors of a photo's loss: 1 in its mask and `outside` around it, averaged over the pixels of each latent."""
    (width, height), mask = photo.train_px, photo.mask
    if mask is None:
        return np.ones((height // downsampling, width // downsampling), np.float16)
    inside = cover(mask.convert('RGB'), width, height)[0].numpy() / 255
    blocks = inside.reshape(height // downsampling, downsampling, width // downsampling, downsampling)
    return (outside + (1 - outside) * blocks.mean((1, 3))).astype(np.float16)


def _batches(photos: Iterable[Photo]) -> Iterator[list[Photo]]:
    """Yield photos of one aspect bucket, as many as go through the VAE together."""
    waiting = dict[str, list[Photo]]()
    for photo in photos:
        batch = waiting.setdefault(photo.bucket, [])
        batch.append(photo)
        if len(batch) == batch_at(photo.train_px, SQUARES_A_PASS):
            yield waiting.pop(photo.bucket)
    yield from waiting.values()


def _free_memory() -> None:
    """Free what networks held that have drawn or encoded."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
