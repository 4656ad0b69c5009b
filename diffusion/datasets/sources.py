"""A recipe's streams, read: manifest and index.json of each, compared with one another and with the recipe. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from diffusion.common.storage import open_folder
from diffusion.contracts.errors import DataError
from diffusion.contracts.manifest import INDEX_NAME, MANIFEST_NAME, Manifest, ManifestError, identity
from diffusion.datasets.buckets import BucketShare, buckets_of, shares, where
from diffusion.datasets.index import Disagreement, basename, disagreements, disagreements_of_streams, other_columns, read_index
from diffusion.recipe.contradictions import contradictions
from diffusion.recipe.schema import Recipe, Stream

MAX_NAMED = 5  # disagreements of a dataset in one message


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


def read_sources(recipe: Recipe, section: str, streams: Mapping[str, Stream], vae_sha256: str | None = None) -> dict[str, dict[str, StreamSource]]:
    """By stream, its dataset or, of a dataset of aspect buckets, those buckets that hold samples.

    Args:
        section: of the recipe that names them: `data.streams` or `eval.streams`.
        vae_sha256: digest of the recipe's VAE; None does not compare it with that of the latents.

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
            for error in contradictions(source.manifest, recipe, setting, vae_sha256)
        ]
        if errors:
            raise ManifestError('\n'.join(errors))
        found[name] = sources
    return found


def together(found: Mapping[str, Mapping[str, StreamSource]]) -> dict[str, StreamSource]:
    """The datasets of all streams."""
    return {name: source for sources in found.values() for name, source in sources.items()}


def shares_of(
    found: Mapping[str, Mapping[str, StreamSource]], streams: Mapping[str, Stream], batch_size: int, training: bool
) -> dict[str, BucketShare]:
    """What an epoch takes from each aspect bucket; evaluation takes all.

    Args:
        batch_size: over all ranks.

    Raises:
        ManifestError: no bucket fills a batch.
    """
    num_samples = {name: {bucket: source.manifest.num_samples for bucket, source in sources.items()} for name, sources in found.items()}
    return shares(num_samples, {name: stream.proportion for name, stream in streams.items()}, batch_size, fill=not training)


def batches_per_epoch(recipe: Recipe, found: Mapping[str, Mapping[str, StreamSource]], streams: Mapping[str, Stream]) -> int:
    """Whole batches that an epoch of the training data fills.

    Raises:
        ManifestError: none.
    """
    size = recipe.batch.global_size
    if recipe.data.aspect_buckets:
        num_samples = sum(share.chosen for share in shares_of(found, streams, size, training=True).values())
    else:
        num_samples = sum(source.manifest.num_samples for source in together(found).values())
    if num_samples < size:
        raise ManifestError(too_few(recipe))
    return num_samples // size


def too_few(recipe: Recipe) -> str:
    """The error of training data that fill no batch."""
    return f'the training data holds fewer samples than batch.global_size {recipe.batch.global_size}; lower it'


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
        raise DataError(f'stream {name}: {folder}/{INDEX_NAME} does not exist; copy the data set again, or make it again') from error
    try:
        entries = read_index(index)
    except ValueError as error:
        raise DataError(f'stream {name}: {folder}/{INDEX_NAME} {error}; copy the data set again, or make it again') from error
    _agree(name, folder, disagreements(manifest, entries, open_folder(folder)))
    for entry in entries:
        if difference := other_columns(manifest, entry):
            raise DataError(f'stream {name}: {folder}/{basename(entry)}: has the columns {difference}; copy the data set again, or make it again')
    return StreamSource(stream, manifest, index, identity(index, open_folder(folder).read(MANIFEST_NAME)))


def _agree(name: str, folder: str, found: list[Disagreement]) -> None:
    """Raise what the files of a dataset disagree about."""
    if found:
        more = [f'and {len(found) - MAX_NAMED} more'] if len(found) > MAX_NAMED else []
        lines = [*(f'stream {name}: {folder}/{one}' for one in found[:MAX_NAMED]), *more]
        raise DataError('\n'.join([*lines, f'python -m data_prep.audit {folder} says how to repair it']))
