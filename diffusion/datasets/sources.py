"""A recipe's streams, read: manifest and index.json of each, compared with one another and with the recipe. Imports no torch."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from diffusion.common.storage import open_folder
from diffusion.common.text import counted
from diffusion.contracts.errors import DataError, ManifestError
from diffusion.contracts.manifest import INDEX_NAME, MANIFEST_NAME, Manifest, identity
from diffusion.datasets.buckets import BucketShare, buckets_of, shares, where
from diffusion.datasets.index import Disagreement, basename, disagreements, disagreements_of_streams, other_columns, read_index
from diffusion.recipe.autoencoder import AnyRecipe
from diffusion.recipe.contradictions import contradictions
from diffusion.recipe.schema import Stream, present

MAX_NAMED = 5  # disagreements of a dataset in one message
INGREDIENTS_NAME = 'ingredients.json'  # next to the manifest of a dataset that a run has made itself: what it was made of


Sizes = Mapping[str, Mapping[str, int]]
"""Samples by dataset and, in each, by aspect bucket."""


@dataclass(frozen=True)
class StreamSource:
    """A Streaming stream to be."""

    stream: Stream
    manifest: Manifest
    index: bytes
    """Content of index.json."""
    identity: str
    """SHA-256 of what makes this dataset this one."""
    choose: int | None = None
    """Samples of an epoch, of an aspect bucket."""


def is_prepared(stream: Stream) -> bool:
    """Whether the run makes the stream's dataset itself, of photos or of images that it draws (finetuning/)."""
    return stream.photos is not None or stream.drawn is not None


def located(recipe: AnyRecipe, section: str) -> dict[str, Stream]:
    """The streams of `data` or `eval`; the dataset of one that the run makes itself is in the run folder."""
    streams = present(getattr(recipe, section).streams)
    folder = Path(recipe.run_folder) / 'prepared'
    return {
        name: replace(stream, local=str(folder / f'{section}-{name.replace("/", "-")}')) if is_prepared(stream) else stream
        for name, stream in streams.items()
    }


def read_sources(
    recipe: AnyRecipe, section: str, streams: Mapping[str, Stream], vae_sha256: str | None = None, geometry: bool = False
) -> dict[str, dict[str, StreamSource]]:
    """By stream, its dataset or, of a dataset of aspect buckets, those buckets that hold samples.

    Args:
        section: of the recipe that names them: `data.streams` or `eval.streams`.
        vae_sha256: digest of the recipe's VAE; None does not compare it with that of the latents.
        geometry: the network's family reads size and crop of an image.

    Raises:
        ManifestError: a dataset has no manifest, or contradicts the recipe.
        DataError: its index.json is missing or damaged, or it and the manifest disagree.
        StorageError, StorageRefusal: storage does not answer, or not to this.
    """
    found = {}
    for name, stream in streams.items():
        root = _read(name, stream)
        sources = {name: root}
        if recipe.data.aspect_buckets:
            sources = {bucket: _read(bucket, below) for bucket, below in buckets_of(name, stream, root.manifest).items()}
            if root.manifest.streams:
                _agree(name, where(stream), disagreements_of_streams(root.manifest, sum(one.manifest.num_samples for one in sources.values())))
            sources = {bucket: source for bucket, source in sources.items() if source.manifest.num_samples}
        setting = f'{section}.{name}.{"remote" if stream.remote else "local"}={where(stream)}'
        errors = [
            f'stream {one} ({where(source.stream)}): {error}'
            for one, source in sources.items()
            for error in contradictions(source.manifest, recipe, setting, vae_sha256, geometry)
        ]
        if errors:
            raise ManifestError('\n'.join(errors))
        found[name] = sources
    return found


def together(found: Mapping[str, Mapping[str, StreamSource]]) -> dict[str, StreamSource]:
    """The datasets of all streams."""
    return {name: source for sources in found.values() for name, source in sources.items()}


def sizes_of(found: Mapping[str, Mapping[str, StreamSource]]) -> Sizes:
    """Samples of each dataset."""
    return {name: {bucket: source.manifest.num_samples for bucket, source in sources.items()} for name, sources in found.items()}


def shares_of(sizes: Sizes, streams: Mapping[str, Stream], batch_size: int, training: bool) -> dict[str, BucketShare]:
    """What an epoch takes from each aspect bucket; evaluation, and training on photos, which are few, take all.

    Args:
        batch_size: over all ranks.

    Raises:
        ManifestError: no bucket fills a batch.
    """
    filled = {name for name, stream in streams.items() if not training or is_prepared(stream)}
    return shares(sizes, {name: stream.proportion for name, stream in streams.items()}, batch_size, filled)


def batches_per_epoch(recipe: AnyRecipe, sizes: Sizes, streams: Mapping[str, Stream]) -> int:
    """Whole batches that an epoch of the training data fills.

    Raises:
        ManifestError: none.
    """
    size = recipe.batch.global_size
    if recipe.data.aspect_buckets:
        num_samples = sum(share.chosen for share in shares_of(sizes, streams, size, training=True).values())
    else:
        num_samples = epoch_of(sum(sum(buckets.values()) for buckets in sizes.values()), streams, size)
    if num_samples < size:
        raise ManifestError(too_few(recipe, num_samples))
    return num_samples // size


def epoch_of(num_samples: int, streams: Mapping[str, Stream], batch_size: int) -> int:
    """Samples of an epoch without aspect buckets: as many as there are; with photos, which are few and repeated, whole batches.

    What fills no batch is left out at the end of an epoch, where Streaming's py1e puts more samples of small streams than of large ones: of 5 photos
    and 48 other images by halves, 47.5 % were photos.

    Args:
        batch_size: over all ranks.
    """
    return -(-num_samples // batch_size) * batch_size if any(is_prepared(stream) for stream in streams.values()) else num_samples


def too_few(recipe: AnyRecipe, num_samples: int) -> str:
    """The error of training data of which an epoch fills no batch."""
    size = recipe.batch.global_size
    return f'the training data holds {counted(num_samples, "sample")} an epoch, fewer than batch.global_size {size}; lower it'


def store_text(sources: Mapping[str, StreamSource]) -> bool:
    """Whether the datasets store text embeddings.

    Raises:
        ManifestError: some do and some do not.
    """
    without = [name for name, source in sources.items() if not source.manifest.text_encoder]
    if without and len(without) < len(sources):
        raise ManifestError(f'streams {", ".join(without)} store no text embeddings and the others do; encode all of them alike')
    return not without


def _read(name: str, stream: Stream) -> StreamSource:
    """What a dataset says about itself, never taken from a cache.

    Raises:
        DataError: index.json is missing or damaged, or it and the manifest disagree.
    """
    folder = where(stream)
    manifest = Manifest.read(folder)
    if manifest.streams:  # there is no index next to it, but one in each of its streams
        return StreamSource(stream, manifest, b'', '')
    try:
        index = open_folder(folder).read(INDEX_NAME)
    except FileNotFoundError as error:
        raise DataError(f'stream {name}: {folder}/{INDEX_NAME} does not exist; copy the dataset again, or make it again') from error
    try:
        entries = read_index(index)
    except ValueError as error:
        raise DataError(f'stream {name}: {folder}/{INDEX_NAME} {error}; copy the dataset again, or make it again') from error
    _agree(name, folder, disagreements(manifest, entries, open_folder(folder)))
    for entry in entries:
        if difference := other_columns(manifest, entry):
            raise DataError(f'stream {name}: {folder}/{basename(entry)}: has the columns {difference}; copy the dataset again, or make it again')
    if is_prepared(stream):  # by another machine's arithmetic its latents would differ in their last bits: it is what it was made of
        return StreamSource(stream, manifest, index, hashlib.sha256(open_folder(folder).read(INGREDIENTS_NAME)).hexdigest())
    return StreamSource(stream, manifest, index, identity(index, open_folder(folder).read(MANIFEST_NAME)))


def _agree(name: str, folder: str, found: list[Disagreement]) -> None:
    """Raise what the files of a dataset disagree about."""
    if found:
        more = [f'and {len(found) - MAX_NAMED} more'] if len(found) > MAX_NAMED else []
        lines = [*(f'stream {name}: {folder}/{one}' for one in found[:MAX_NAMED]), *more]
        raise DataError('\n'.join([*lines, f'python -m data_prep.audit {folder} says how to repair it']))
