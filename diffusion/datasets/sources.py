"""A recipe's streams: manifest and index.json of each, compared with one another and with the recipe; their aspect-ratio buckets. No torch.

In a dataset of streams WIDTHxHEIGHT every batch takes one. Streaming's `per_stream` batching makes the batches: of one stream each, the same on
all ranks, in an order that depends on seed and epoch alone. It gives up on a stream that does not fill a batch, and repeats or forgets samples
of one that does not fill its last. So here is decided beforehand how many samples an epoch takes from each, in whole batches, and said what that
leaves out.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from diffusion.common.storage import open_folder
from diffusion.common.text import counted
from diffusion.contracts.errors import DataError, ManifestError
from diffusion.contracts.manifest import INDEX_NAME, MANIFEST_NAME, Manifest, identity
from diffusion.datasets.shards import Disagreement, disagreements, disagreements_of_streams, other_columns, read_index
from diffusion.recipe.autoencoder import AnyRecipe
from diffusion.recipe.manifest_rules import is_bucket_name, manifest_errors
from diffusion.recipe.schema import Stream, present

MAX_NAMED = 5  # disagreements of a dataset in one message
INGREDIENTS_NAME = 'ingredients.json'  # next to the manifest of a dataset that a run has made itself: what it was made of
Sizes = Mapping[str, Mapping[str, int]]
"""Samples by dataset and, in each, by aspect bucket."""


@dataclass(frozen=True)
class StreamSource:
    """A dataset of a stream, or one of its aspect buckets."""

    dataset: str
    """Name of the recipe's stream."""
    stream: Stream
    """Places of its shards; a bucket has no proportion: it is the dataset's, and `shares` heeds it."""
    manifest: Manifest
    index: bytes
    """Content of index.json."""
    identity: str
    """SHA-256 of what makes this dataset this one."""
    choose: int | None = None
    """Samples of an epoch, of an aspect bucket."""


class BucketShare(NamedTuple):
    """Samples that an epoch takes from one bucket."""

    num_samples: int  # there are
    due: int  # all of them, or what `proportion` says
    chosen: int  # taken, in whole batches

    @property
    def left_out(self) -> int:
        """Samples that are due and left out; a bucket that is filled up takes more."""
        return max(0, self.due - self.chosen)


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


def where(stream: Stream) -> str:
    """Folder or URL of a stream's data."""
    return stream.remote or stream.local or ''


def buckets_of(name: str, stream: Stream, manifest: Manifest) -> dict[str, Stream]:
    """The streams of a dataset of buckets, by `NAME/WIDTHxHEIGHT`; a dataset that is one bucket itself keeps its name.

    Raises:
        ManifestError: its streams are something else than aspect buckets.
    """
    if others := [bucket for bucket in manifest.streams if not is_bucket_name(bucket)]:
        raise ManifestError(
            f'stream {name} ({where(stream)}): manifest names the stream {others[0]}, which is no aspect bucket WIDTHxHEIGHT; convert the '
            'images with --buckets aspect:PX, or set data.aspect_buckets=false and name one of its streams'
        )
    found = {}
    for bucket in manifest.streams:
        remote, local = (folder and f'{folder.rstrip("/")}/{bucket}' for folder in (stream.remote, stream.local))
        found[f'{name}/{bucket}'] = replace(stream, proportion=None, remote=remote, local=local)
    return found or {name: replace(stream, proportion=None)}


def shares(sizes: Sizes, streams: Mapping[str, Stream], batch_size: int, training: bool) -> dict[str, BucketShare]:
    """Share of each bucket that holds samples in an epoch.

    Evaluation, and training on photos, which are few, take all: they repeat some samples to fill the last batch of a bucket. Of other datasets what
    does not fill one is left out. An epoch of photos and drawn images alone has each as often as a batch has samples: otherwise the only portrait of
    six photos would fill a batch as four landscapes do.

    Args:
        streams: of the recipe, by dataset; all have a proportion or none has.
        batch_size: over all ranks.

    Raises:
        ManifestError: no bucket fills a batch.
    """
    views = batch_size if training and all(map(is_prepared, streams.values())) else 1
    in_all = views * sum(sum(buckets.values()) for buckets in sizes.values())
    weight = sum(stream.proportion or 0 for stream in streams.values()) or 1
    result = {}
    for name, buckets in sizes.items():
        stream = streams[name]
        for bucket, count in buckets.items():
            if count == 0:
                continue
            due = views * count if stream.proportion is None else int(in_all * stream.proportion / weight * count / sum(buckets.values()))
            num_batches = due // batch_size if training and not is_prepared(stream) else -(-max(due, 1) // batch_size)
            result[bucket] = BucketShare(count, due, num_batches * batch_size)
    if not any(share.chosen for share in result.values()):
        most = max((share.due for share in result.values()), default=0)
        raise ManifestError(
            f'no aspect bucket of {", ".join(sizes)} fills a batch: the largest has {counted(most, "sample")} an epoch, batch.global_size is '
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


def read_sources(
    recipe: AnyRecipe, section: str, streams: Mapping[str, Stream], vae_sha256: str | None = None, geometry: bool = False
) -> dict[str, StreamSource]:
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
    found: dict[str, StreamSource] = {}
    for name, stream in streams.items():
        root = _read(name, name, stream)
        sources = {name: root}
        if recipe.data.aspect_buckets:
            sources = {bucket: _read(name, bucket, below) for bucket, below in buckets_of(name, stream, root.manifest).items()}
            if root.manifest.streams:
                _agree(name, where(stream), disagreements_of_streams(root.manifest, sum(one.manifest.num_samples for one in sources.values())))
            sources = {bucket: source for bucket, source in sources.items() if source.manifest.num_samples}
        setting = f'{section}.{name}.{"remote" if stream.remote else "local"}={where(stream)}'
        errors = [
            f'stream {one} ({where(source.stream)}): {error}'
            for one, source in sources.items()
            for error in manifest_errors(source.manifest, recipe, setting, vae_sha256, geometry)
        ]
        if errors:
            raise ManifestError('\n'.join(errors))
        found |= sources
    return found


def batches_per_epoch(recipe: AnyRecipe, sizes: Sizes, streams: Mapping[str, Stream]) -> int:
    """Whole batches that an epoch of the training data fills; raises ManifestError if there is none."""
    size = recipe.batch.global_size
    if recipe.data.aspect_buckets:
        num_samples = sum(share.chosen for share in shares(sizes, streams, size, training=True).values())
    else:
        num_samples = epoch_of(sum(sum(buckets.values()) for buckets in sizes.values()), streams.values(), size)
    if num_samples < size:
        raise ManifestError(too_few(recipe, num_samples))
    return num_samples // size


def epoch_of(num_samples: int, streams: Iterable[Stream], batch_size: int) -> int:
    """Samples of an epoch without aspect buckets: as many as there are; with photos, which are few and repeated, whole batches.

    What fills no batch is left out at the end of an epoch, where Streaming's py1e puts more samples of small streams than of large ones: of 5 photos
    and 48 other images by halves, 47.5 % were photos.

    Args:
        batch_size: over all ranks.
    """
    return -(-num_samples // batch_size) * batch_size if any(map(is_prepared, streams)) else num_samples


def too_few(recipe: AnyRecipe, num_samples: int) -> str:
    """The error of training data of which an epoch fills no batch."""
    size = recipe.batch.global_size
    return f'the training data holds {counted(num_samples, "sample")} an epoch, fewer than batch.global_size {size}; lower it'


def store_text(sources: Mapping[str, StreamSource]) -> bool:
    """Whether the datasets store text embeddings; raises ManifestError if only some do."""
    without = [name for name, source in sources.items() if not source.manifest.text_encoder]
    if without and len(without) < len(sources):
        raise ManifestError(f'streams {", ".join(without)} store no text embeddings and the others do; encode all of them alike')
    return not without


def _read(dataset: str, name: str, stream: Stream) -> StreamSource:
    """Read what the dataset of a stream, or its bucket `name`, says about itself, never from a cache.

    Raises:
        DataError: index.json is missing or damaged, or it and the manifest disagree.
    """
    folder = where(stream)
    manifest, place = Manifest.read(folder), open_folder(folder)
    if manifest.streams:  # there is no index next to it, but one in each of its streams
        return StreamSource(dataset, stream, manifest, b'', '')
    remedy = 'copy the dataset again, or make it again'
    try:
        index = place.read(INDEX_NAME)
        listed = read_index(index)
    except FileNotFoundError as error:
        raise DataError(f'stream {name}: {folder}/{INDEX_NAME} does not exist; {remedy}') from error
    except ValueError as error:
        raise DataError(f'stream {name}: {folder}/{INDEX_NAME} {error}; {remedy}') from error
    _agree(name, folder, disagreements(manifest, listed, place))
    for shard in listed:
        if difference := other_columns(manifest, shard):
            raise DataError(f'stream {name}: {folder}/{shard.basename}: has the columns {difference}; {remedy}')
    if is_prepared(stream):  # by another machine's arithmetic its latents would differ in their last bits: it is what it was made of
        return StreamSource(dataset, stream, manifest, index, hashlib.sha256(place.read(INGREDIENTS_NAME)).hexdigest())
    return StreamSource(dataset, stream, manifest, index, identity(index, place.read(MANIFEST_NAME)))


def _agree(name: str, folder: str, found: list[Disagreement]) -> None:
    """Raise what the files of a dataset disagree about."""
    if found:
        more = [f'and {len(found) - MAX_NAMED} more'] if len(found) > MAX_NAMED else []
        lines = [*(f'stream {name}: {folder}/{one}' for one in found[:MAX_NAMED]), *more]
        raise DataError('\n'.join([*lines, f'python -m data_prep.audit {folder} says how to repair it']))
