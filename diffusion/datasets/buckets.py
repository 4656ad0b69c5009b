"""Aspect-ratio buckets: a dataset of streams WIDTHxHEIGHT, of which every batch takes one.

Streaming's `per_stream` batching makes the batches: of one stream each, the same on all ranks, in an order that depends on seed and epoch
alone. It gives up on a stream that does not fill a batch, and repeats or forgets samples of one that does not fill its last. So here
is decided beforehand how many samples an epoch takes from each, in whole batches, and said what that leaves out.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from diffusion.common.text import counted
from diffusion.contracts.errors import ManifestError
from diffusion.contracts.manifest import Manifest
from diffusion.recipe.contradictions import is_bucket_name
from diffusion.recipe.schema import Stream


@dataclass(frozen=True)
class BucketShare:
    """What an epoch takes from one bucket."""

    num_samples: int
    """There are."""
    due: int
    """An epoch would take of them: all, or what `proportion` says."""
    chosen: int
    """It takes, in whole batches."""

    @property
    def left_out(self) -> int:
        """Of those due; a bucket that is filled up takes more."""
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
    """Where a stream's data come from."""
    return stream.remote or stream.local or ''


def _below(folder: str | None, bucket: str) -> str | None:
    return None if folder is None else f'{folder.rstrip("/")}/{bucket}'


def shares(
    num_samples: Mapping[str, Mapping[str, int]], proportions: Mapping[str, float | None], batch_size: int, filled: Collection[str]
) -> dict[str, BucketShare]:
    """What an epoch takes from each bucket that holds samples.

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
    """What an epoch takes and leaves out, in a table of all buckets that hold samples."""
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
