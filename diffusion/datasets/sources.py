"""A recipe's streams: manifest and index.json of each, compared with one another and with the recipe; their aspect-ratio buckets. No torch.

In a dataset of streams WIDTHxHEIGHT every batch takes one. Streaming's `per_stream` batching makes the batches: of one stream each, the same on
all ranks, in an order that depends on seed and epoch alone. It gives up on a stream that does not fill a batch, and repeats or forgets samples
of one that does not fill its last. So here is decided beforehand how many samples an epoch takes from each, in whole batches, and said what that
leaves out.
"""

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from diffusion.common.storage import open_folder
from diffusion.common.text import counted
from diffusion.contracts.errors import DataError, ManifestError
from diffusion.contracts.manifest import INDEX_NAME, MANIFEST_NAME, Manifest, identity
from diffusion.datasets.shards import Disagreement, basename, disagreements, disagreements_of_streams, other_columns, read_index
from diffusion.recipe.autoencoder import AnyRecipe
from diffusion.recipe.contradictions import contradictions, is_bucket_name
from diffusion.recipe.schema import Stream, present

MAX_NAMED = 5  # disagreements of a dataset in one message
INGREDIENTS_NAME = 'ingredients.json'  # next to the manifest of a dataset that a run has made itself: what it was made of
Sizes = Mapping[str, Mapping[str, int]]
"""Samples by dataset and, in each, by aspect bucket."""


@dataclass(frozen=True)
class BucketShare:
    """Samples that an epoch takes from one bucket."""

    num_samples: int
    """There are."""
    due: int
    """An epoch would take of them: all, or what `proportion` says."""
    chosen: int
    """It takes, in whole batches."""

    @property
    def left_out(self) -> int:
        """Samples that are due and left out; a bucket that is filled up takes more."""
        return max(0, self.due - self.chosen)


def buckets_of(name: str, stream: Stream, manifest: Manifest) -> dict[str, Stream]:
    """The streams of a dataset of buckets, by `NAME/WIDTHxHEIGHT`; a dataset that is one bucket itself keeps its name.

    They have no proportion: it is the dataset's, and `shares` heeds it.

    Raises:
        ManifestError: its streams are something else than aspect buckets.
    """
    others = [bucket for bucket in manifest.streams if not is_bucket_name(bucket)]
    if others:
        raise ManifestError(
            f'stream {name} ({where(stream)}): manifest names the stream {others[0]}, which is no aspect bucket WIDTHxHEIGHT; convert the '
            'images with --buckets aspect:PX, or set data.aspect_buckets=false and name one of its streams'
        )
    whole = replace(stream, proportion=None)
    below = {
        f'{name}/{bucket}': replace(whole, remote=_below(stream.remote, bucket), local=_below(stream.local, bucket)) for bucket in manifest.streams
    }
    return below or {name: whole}


def where(stream: Stream) -> str:
    """Folder or URL of a stream's data."""
    return stream.remote or stream.local or ''


def _below(folder: str | None, bucket: str) -> str | None:
    return None if folder is None else f'{folder.rstrip("/")}/{bucket}'


def shares(
    num_samples: Mapping[str, Mapping[str, int]], proportions: Mapping[str, float | None], batch_size: int, filled: Collection[str]
) -> dict[str, BucketShare]:
    """Share of each bucket that holds samples in an epoch.

    Args:
        num_samples: of each bucket of each dataset.
        proportions: of each dataset, as in the recipe: for all or for none.
        batch_size: over all ranks.
        filled: datasets that repeat some samples to fill the last batch of a bucket; of others what does not fill one is left out.

    Raises:
        ManifestError: no bucket fills a batch.
    """
    sizes = {name: sum(buckets.values()) for name, buckets in num_samples.items()}
    weight = sum(proportion or 0 for proportion in proportions.values()) or 1
    result = {}
    for name, buckets in num_samples.items():
        proportion = proportions[name]
        for bucket, count in buckets.items():
            if count == 0:
                continue
            due = count if proportion is None else int(sum(sizes.values()) * proportion / weight * count / sizes[name])
            num_batches = -(-max(due, 1) // batch_size) if name in filled else due // batch_size
            result[bucket] = BucketShare(count, due, num_batches * batch_size)
    if not any(share.chosen for share in result.values()):
        most = max((share.due for share in result.values()), default=0)
        raise ManifestError(
            f'no aspect bucket of {", ".join(num_samples)} fills a batch: the largest has {counted(most, "sample")} an epoch, batch.global_size is '
            f'{batch_size:,}; lower it, or train on squares with data.aspect_buckets=false'
        )
    return result


def summary(found: Mapping[str, BucketShare], batch_size: int) -> str:
    """Table of all buckets that hold samples: what an epoch takes and leaves out."""
    due, chosen = sum(share.due for share in found.values()), sum(share.chosen for share in found.values())
    left_out = sum(share.left_out for share in found.values())
    unused = [name for name, share in found.items() if share.chosen == 0]
    width = max(len('bucket'), *map(len, found))
    lines = [
        f'aspect buckets: an epoch is {chosen // batch_size:,} batches of {batch_size:,}, each of one bucket; of {due:,} samples '
        f'{left_out:,} ({left_out / due:.1%}) fill no batch and are left out',
        f'  {"bucket":<{width}} {"samples":>13} {"an epoch":>13} {"batches":>9} {"left out":>9}',
        *(
            f'  {name:<{width}} {share.num_samples:>13,} {share.due:>13,} {share.chosen // batch_size:>9,} {share.left_out:>9,}'
            for name, share in found.items()
        ),
    ]
    if unused:
        lines.append(f'  never used, because they do not fill a batch: {", ".join(unused)}')
    return '\n'.join(lines)


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
    """Read the dataset of each stream or, of a dataset of aspect buckets, the buckets that hold samples.

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
    """Share of each aspect bucket in an epoch; evaluation, and training on photos, which are few, take all.

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
    """Read what a dataset says about itself, never from a cache.

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
