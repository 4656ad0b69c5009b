"""Checks of each shard and each sample of a dataset; the part of the audit that runs in worker processes."""

import hashlib
import io
import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from data_prep.engines.engine import count_row
from data_prep.mds.oddities import BLANK, CLIP_TOKENS, LONG, content_hashes, is_blank, least_tokens
from diffusion.common.storage import Folder, StorageError, scratch_for
from diffusion.common.text import counted
from diffusion.contracts.manifest import EMPTY_CAPTIONS, Manifest
from diffusion.datasets.decode import ImageError, canonical
from diffusion.datasets.shards import DamagedShard, Shard, captions_of, other_columns, read_shard

THUMBNAIL_PX = 160
NUM_NAMED = 3  # keys of samples with an oddity
DAMAGED = 'damaged shard'


class Scale(NamedTuple):
    """Bins of a histogram, the same in all processes, and how it is shown. What lies beyond the bins is counted in the outermost ones."""

    start: float
    step: float
    num_bins: int
    title: str
    span: float  # of values that is shown at least, so that one bar does not fill the image
    text: Callable[[float], str] = '{:,.0f}'.format

    def bin_of(self, value: float) -> int:
        return min(max(math.floor((value - self.start) / self.step), 0), self.num_bins - 1)

    def middles(self) -> np.ndarray:
        """The value in the middle of each bin."""
        return self.start + self.step * (np.arange(self.num_bins) + 0.5)


def _ratio(log2: float) -> str:
    return f'{2**log2:.3g}:1' if log2 >= 0 else f'1:{2**-log2:.3g}'


SCALES = {
    'width': Scale(0, 1, 8193, 'width, pixels', 40),
    'height': Scale(0, 1, 8193, 'height, pixels', 40),
    'aspect': Scale(-4 - 1 / 128, 1 / 64, 513, 'aspect ratio, width : height', 3, _ratio),  # log2; squares are in the middle of a bin
    'caption': Scale(0, 1, 2049, 'length of the caption, characters', 20),
    'mean': Scale(-4, 0.01, 801, 'mean of a latent, scaled as in training', 0.4, '{:.2f}'.format),
    'std': Scale(0, 0.01, 801, 'standard deviation of a latent, scaled as in training', 0.4, '{:.2f}'.format),
}


class InvalidSample(ValueError):
    """A sample is not what the manifest promises: `what` is the same for all such samples, `detail` is of this one."""

    def __init__(self, what: str, detail: str = ''):
        super().__init__(what, detail)
        self.what, self.detail = what, detail


class Problem(NamedTuple):
    """Something wrong with a file of the dataset, or with some samples of a shard; `detail` describes one of those."""

    what: str
    where: str
    detail: str
    num_samples: int = 0

    def __str__(self) -> str:
        where = '' if self.where in self.detail else f'{self.where}: '  # what read_shard says names the file
        more = f' ({counted(self.num_samples, "sample")})' if self.num_samples > 1 else ''
        return f'{where}{self.detail}{more}'


class Thumbnail(NamedTuple):
    """An image for the report: a sample, small."""

    position: int
    content: bytes
    media_type: str
    caption: str
    label: str


@dataclass
class Findings:
    """Results for some samples; those of shards add up to those of the dataset."""

    checked: int = 0  # samples looked at; the unsound ones and those of damaged shards are among them
    unsound: Counter[str] = field(default_factory=Counter)  # samples with a problem, by the first that was found
    problems: list[Problem] = field(default_factory=list)
    histograms: dict[str, np.ndarray] = field(default_factory=dict)  # by the name of the scale; of sound samples
    thumbnails: list[Thumbnail] = field(default_factory=list)
    keys: dict[int, np.ndarray] = field(default_factory=dict)  # 8 bytes of the hash of each key, by number of the shard
    hashes: dict[int, np.ndarray] = field(default_factory=dict)  # (samples, 3) position and `content_hashes` of sound samples, by number of the shard
    odd: Counter[str] = field(default_factory=Counter)  # sound samples with an oddity
    odd_keys: dict[str, list[tuple[int, str]]] = field(default_factory=dict)  # position and key of the first of them

    @property
    def sound(self) -> int:
        return self.checked - self.unsound.total()

    def add(self, other: 'Findings') -> None:
        self.checked += other.checked
        self.unsound.update(other.unsound)
        self.problems += other.problems
        self.thumbnails += other.thumbnails
        self.keys |= other.keys
        self.hashes |= other.hashes
        self.odd.update(other.odd)
        for oddity, keys in other.odd_keys.items():
            self.odd_keys[oddity] = sorted([*self.odd_keys.get(oddity, []), *keys])[:NUM_NAMED]
        for name, counts in other.histograms.items():
            self.histograms[name] = self.histograms.get(name, 0) + counts

    def measure(self, name: str, value: float) -> None:
        counts = self.histograms.setdefault(name, np.zeros(SCALES[name].num_bins, np.int64))
        counts[SCALES[name].bin_of(value)] += 1

    def note(self, oddity: str, position: int, key: str) -> None:
        self.odd[oddity] += 1
        if len(named := self.odd_keys.setdefault(oddity, [])) < NUM_NAMED:
            named.append((position, key))

    def reject(self, shard: Shard, what: str, detail: str, num_samples: int) -> None:
        self.unsound[what] += num_samples
        self.problems.append(Problem(what, shard.path, detail, num_samples))


class ShardTask(NamedTuple):
    """A shard to look at."""

    number: int  # in the dataset
    shard: Shard
    position: int  # of its first sample in the dataset
    samples: range | frozenset[int]  # which of them to check
    shown: frozenset[int]  # which of those to show in the report


@dataclass(frozen=True)
class Audit:
    """Checks shards, by the manifest of each stream; goes to the worker processes."""

    folder: Folder
    manifests: Mapping[str, Manifest]

    def __call__(self, task: ShardTask) -> Findings:
        findings, shard = Findings(), task.shard
        unsound: dict[str, list[str]] = {}
        keys, hashes = [], list[bytes]()
        try:
            self._check_columns(shard)
            with scratch_for() as scratch:  # not in the dataset: it may be one that others share, or read-only
                for i, row in enumerate(read_shard(self.folder, shard, scratch)):
                    if i not in task.samples:
                        continue
                    keys.append(key_hash(row))
                    try:
                        hashes.append((task.position + i).to_bytes(8, sys.byteorder) + self._look(row, task, i, findings))
                    except InvalidSample as error:
                        unsound.setdefault(error.what, []).append(f'sample {i}, key {row.get("key")!r}' + f': {error.detail}' * bool(error.detail))
                    findings.checked += 1
                    count_row()
        except DamagedShard as error:
            findings.reject(shard, DAMAGED, str(error), len(task.samples))
        except InvalidSample as error:
            findings.reject(shard, error.what, error.detail, len(task.samples))
        except StorageError:
            raise
        except Exception as error:  # the file's hash is true, but it is no MDS shard of these columns: anything can be raised
            findings.reject(shard, 'unreadable samples', f'from sample {findings.checked} on: {error!r}', len(task.samples) - findings.checked)
        findings.checked = len(task.samples)
        for what, details in unsound.items():
            findings.reject(shard, what, details[0], len(details))
        findings.keys[task.number] = np.frombuffer(b''.join(keys), np.uint64)
        findings.hashes[task.number] = np.frombuffer(b''.join(hashes), np.uint64).reshape(-1, 3)
        return findings

    def _check_columns(self, shard: Shard) -> None:
        """Raises InvalidSample: the shard has other columns than the manifest, or some that would run code when it is read."""
        from streaming.base.format.mds.encodings import is_mds_encoding_safe  # imports torch

        manifest = self.manifests[shard.stream]
        if difference := other_columns(manifest, shard):
            raise InvalidSample('columns are not those of the manifest', difference)
        for name, column in manifest.columns.items():
            if not is_mds_encoding_safe(column['encoding']):
                raise InvalidSample('reading it could run code', f'column {name} is {column["encoding"]}; do not use data from this source')

    def _look(self, row: dict[str, Any], task: ShardTask, i: int, findings: Findings) -> bytes:
        """Check and measure a sample; returns its `content_hashes`."""
        manifest = self.manifests[task.shard.stream]
        captions, images = check_captions(row), manifest.kind == 'images'
        caption, _ = captions[0]
        measures, image, label = (look_at_image if images else look_at_latents)(row, manifest)
        for name, value in measures.items():
            findings.measure(name, value)
        findings.measure('caption', len(caption))
        if images and is_blank(image):
            findings.note(BLANK, task.position + i, row['key'])
        if any(least_tokens(caption) > max_tokens(manifest) for caption, _ in captions):
            findings.note(LONG, task.position + i, row['key'])
        if i in task.shown:
            small, content, form = image.convert('RGB'), io.BytesIO(), 'jpeg' if images else 'png'
            small.thumbnail((THUMBNAIL_PX, THUMBNAIL_PX))
            small.save(content, form, quality=85)
            findings.thumbnails.append(Thumbnail(task.position + i, content.getvalue(), f'image/{form}', caption, label))
        return content_hashes(row['image'] if images else row['moments'].tobytes(), captions)


def max_tokens(manifest: Manifest) -> int:
    """Return how many tokens of a caption the stored embeddings hold; CLIP's number where there are none."""
    stored = manifest.columns['text_embeddings']['encoding'] if 'text_embeddings' in manifest.columns else ''  # ndarray:float16:77,1024
    return int(found[1]) if (found := re.fullmatch(r'ndarray:\w+:(\d+),\d+', stored)) else CLIP_TOKENS


def key_hash(row: dict[str, Any]) -> bytes:
    """8 bytes in place of a sample's key: of forty datasets of a billion samples, one has two keys that share them by chance."""
    return hashlib.blake2b(str(row.get('key', '')).encode(), digest_size=8).digest()


def check_captions(row: dict[str, Any]) -> list[tuple[str, float]]:
    """The captions and their weights, if all are there and can be drawn from. Raises InvalidSample: they are not."""
    try:
        captions = captions_of(row)
        total = sum(weight for _, weight in captions)
        empty = [i for i, (caption, _) in enumerate(captions) if not caption.strip()]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InvalidSample('captions are not [[caption, weight], ...]', repr(error)) from error
    if empty or not captions:
        raise InvalidSample('empty caption', f'number {empty[0] + 1} of {len(captions)}' if len(captions) > 1 else '')
    if not abs(total - 1) < 1e-6:
        raise InvalidSample('weights of the captions do not add up to 1', f'they add up to {total}')
    return captions


def look_at_image(row: dict[str, Any], manifest: Manifest) -> tuple[dict[str, float], Image.Image, str]:
    """Return what is measured in a sample of kind `images`, its image, and a label for it.

    Raises:
        InvalidSample: it cannot be decoded, or contradicts a column or the manifest.
    """
    try:
        decoded = canonical(row['image'])
    except ImageError as error:
        raise InvalidSample('image cannot be decoded', str(error)) from error
    width, height = decoded.image.size
    side, bucket, sha256 = min(width, height), manifest.bucket, hashlib.sha256(row['image']).hexdigest()
    stated, stated_sha256 = (row.get('width', width), row.get('height', height)), row.get('sha256', sha256) if row.get('reencoded') == '' else sha256
    fits = side >= bucket.get('min_side_px', 0) and width >= bucket.get('width_px', 0) and height >= bucket.get('height_px', 0)
    size = f'{width} x {height}'
    for holds, what, detail in (
        (not decoded.reencoded, 'image is not plain upright RGB or grey', decoded.reencoded),
        (stated == (width, height), 'width or height is not that of the image', f'the columns say {stated[0]} x {stated[1]}, it has {size}'),
        (stated_sha256 == sha256, 'sha256 is not that of the image', f'the column says {stated_sha256}, the bytes have {sha256}'),
        (
            side >= (manifest.min_side_px or 0),
            "image is smaller than the manifest's min_side_px",
            f'{size}, the least is {manifest.min_side_px} px',
        ),
        (fits and side < (bucket.get('below_px') or math.inf), 'image is not of its bucket', f'{size} in {bucket}'),
    ):
        if not holds:
            raise InvalidSample(what, detail)
    return {'width': width, 'height': height, 'aspect': math.log2(width / height)}, decoded.image, f'{width} × {height}'


def look_at_latents(row: dict[str, Any], manifest: Manifest) -> tuple[dict[str, float], Image.Image, str]:
    """The same of a sample of kind `latents`. Raises InvalidSample: an array is not of the shape in the manifest, or not finite."""
    for name in ('moments', *(column for column in EMPTY_CAPTIONS if column in manifest.columns)):
        array, promised = row[name], manifest.columns[name]['encoding']
        found = f'ndarray:{array.dtype}:{",".join(map(str, array.shape))}'
        if found != promised:
            raise InvalidSample(f'{name} are not of the shape in the manifest', f'{found}, the manifest says {promised}')
        if not np.isfinite(array).all():
            raise InvalidSample(f'{name} are not finite', f'{np.count_nonzero(~np.isfinite(array))} of {array.size} values')
    geometry = {name: row[name].tolist() for name in ('size', 'crop') if name in row}
    if min(geometry.get('size', [1])) < 1 or min(geometry.get('crop', [0])) < 0:
        raise InvalidSample('size or crop is not that of an image', str(geometry))
    mean = row['moments'][: len(row['moments']) // 2].astype(np.float32)
    scaled = (mean - manifest.encoder.get('shift_factor', 0)) * manifest.encoder.get('scaling_factor', 1)  # as training sees it
    return {'mean': float(scaled.mean()), 'std': float(scaled.std())}, false_colours(mean), ' × '.join(map(str, manifest.encoded_px or ())) + ' px'


def false_colours(latent: np.ndarray) -> Image.Image:
    """The first three channels of (C, H, W) as red, green and blue, each stretched to its range."""
    channels = np.resize(latent, (3, *latent.shape[1:]))
    low, high = np.percentile(channels, [2, 98], axis=(1, 2), keepdims=True)
    stretched = np.clip((channels - low) / np.maximum(high - low, 1e-6), 0, 1)
    return Image.fromarray((255 * stretched).astype(np.uint8).transpose(1, 2, 0))
