"""The contract between data_prep and training: `manifest.json` beside an MDS data set's `index.json`.

It says what the columns mean and what became of every input row. Training refuses a data set whose manifest contradicts
the recipe, and names the field. Nothing here imports torch.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from diffusion.files import parse_json_object
from diffusion.recipe.schema import Data, Recipe
from diffusion.storage import open_folder

MANIFEST_NAME = 'manifest.json'
INDEX_NAME = 'index.json'
MANIFEST_VERSION = 1
EMPTY_CAPTION_NAME = 'empty_caption.npy'
LEAST_BUCKET_AREA = 0.7  # of side x side; data_prep.convert's smallest have 0.75


class ManifestError(ValueError):
    """A data set has no readable manifest, or one that contradicts the recipe."""


@dataclass
class Manifest:
    """What an MDS data set says about itself.

    Attributes:
        kind: what the samples hold: `images` (the bytes of a picture) or `latents` (VAE moments).
        columns: MDS encoding and meaning of each column.
        num_samples: samples in the data set.
        attempted: input rows seen; equals num_samples plus all of `dropped`.
        dropped: input rows left out, by reason.
        notes: what was done to samples that were kept, and to how many.
        source: where it was made from, and a fingerprint of that.
        hashes: algorithms of the shard hashes in index.json.
        code_version: version of this package that wrote it.
        streams: the folders below that hold the samples, each a data set with a manifest of its own; empty if they are right here.
        bucket: what the pictures of this stream have in common: their sides or their aspect ratio; of latents, the size they were encoded at.
        min_side_px: shortest side of any image (kind `images`).
        resolution: side of the encoded square, in pixels (kind `latents`, unless encoded at the size of its bucket).
        transform: how a picture became what was encoded (kind `latents`).
        encoder: source, revision, vae_sha256, scaling_factor, downsampling, dtype of the VAE (kind `latents`); latents are stored unscaled.
        text_encoder: what the stored text embeddings were made with, if there are any.
    """

    kind: Literal['images', 'latents']
    columns: dict[str, dict[str, str]]
    num_samples: int
    attempted: int
    dropped: dict[str, int]
    source: dict[str, Any]
    hashes: list[str]
    code_version: str
    notes: dict[str, int] = field(default_factory=dict)
    streams: list[str] = field(default_factory=list)
    bucket: dict[str, Any] = field(default_factory=dict)
    min_side_px: int | None = None
    resolution: int | None = None
    transform: str | None = None
    encoder: dict[str, Any] = field(default_factory=dict)
    text_encoder: dict[str, Any] = field(default_factory=dict)
    version: int = MANIFEST_VERSION

    def __post_init__(self) -> None:
        counts = self.num_samples, self.attempted, *self.dropped.values(), *self.notes.values()
        if not all(type(count) is int and count >= 0 for count in counts):
            raise TypeError(f'num_samples, attempted, dropped and notes have to be counts, not {counts}')
        names = *self.hashes, *self.streams, *(column['encoding'] for column in self.columns.values())
        if not all(isinstance(name, str) for name in names):
            raise TypeError(f'hashes, streams and encodings of columns have to be text, not {names}')

    @property
    def bucket_px(self) -> tuple[int, int] | None:
        """(width, height) of an aspect bucket."""
        return (self.bucket['width_px'], self.bucket['height_px']) if 'width_px' in self.bucket else None

    @property
    def encoded_px(self) -> tuple[int, int] | None:
        """(width, height) of what was encoded (kind `latents`)."""
        if self.kind != 'latents':
            return None
        return self.bucket_px or ((self.resolution, self.resolution) if self.resolution else None)

    def to_json(self) -> str:
        """The content of the file."""
        return json.dumps(dataclasses.asdict(self), indent=1) + '\n'

    @classmethod
    def read(cls, where: str | Path) -> Manifest:
        """From a data set on a disk or in object storage; from there it is fetched anew, never taken from a cache of an older data set.

        Raises:
            ManifestError: missing, damaged, or of another version.
            StorageError: object storage cannot be reached.
        """
        path = f'{where}/{MANIFEST_NAME}'
        try:
            content = parse_json_object(open_folder(where).read(MANIFEST_NAME))
            if content.get('version') != MANIFEST_VERSION:
                raise ManifestError(f'{path}: version {content.get("version")}, this code reads {MANIFEST_VERSION}; convert again')
            return cls(**content)
        except FileNotFoundError:
            raise ManifestError(
                f'{path}: no such file; a data set is made by python -m data_prep.convert or python -m data_prep.encode, '
                'which write it when they have finished'
            ) from None
        except ManifestError:
            raise
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            raise ManifestError(f'{path}: not a manifest: {error}') from None


def identity(index: bytes, manifest: bytes) -> str:
    """SHA-256 of a data set: its shards with their hashes, and what its manifest says about them whatever version wrote it."""
    claims = {name: value for name, value in parse_json_object(manifest).items() if name != 'code_version'}
    return hashlib.sha256(index + json.dumps(claims, sort_keys=True).encode()).hexdigest()


def contradictions(manifest: Manifest, recipe: Recipe, setting: str, vae_sha256: str | None = None) -> list[str]:
    """Every way in which a dataset does not fit the recipe, each naming the manifest's field and the recipe's.

    Args:
        setting: by which the recipe names the dataset, such as `data.streams.train.local=FOLDER`.
    """
    data = recipe.data
    errors: list[str] = []
    if manifest.streams:
        names = ', '.join(manifest.streams)
        remedy = f'name the one to train on: {setting.rstrip("/")}/{manifest.streams[0]}, each further one as a stream of its own'
        if all(map(is_bucket_name, manifest.streams)):
            remedy += ', or train on all of these aspect-ratio buckets with data.aspect_buckets=true'
        return [f'manifest names the streams {names}; {remedy}']
    if manifest.kind != data.kind:
        return [f'manifest kind is {manifest.kind}, data.kind is {data.kind}; set data.kind={manifest.kind} or convert the data']
    if manifest.num_samples == 0:
        errors.append(f'manifest num_samples is 0 (dropped: {manifest.dropped or "nothing"}); there is nothing to train on')
    errors += _wrong_size(manifest, data)
    if manifest.kind == 'latents':
        made_with = manifest.encoder.get('vae_sha256')
        if vae_sha256 is not None and made_with != vae_sha256:
            errors.append(
                f'manifest encoder.vae_sha256 is {str(made_with)[:12]} ({manifest.encoder.get("source")}), the VAE of '
                f'model.encoders.source={recipe.model.encoders.source} has {vae_sha256[:12]}; these latents were made by another VAE'
            )
    return errors


def _wrong_size(manifest: Manifest, data: Data) -> list[str]:
    side, bucket = data.resolution, manifest.bucket_px
    if data.aspect_buckets:
        again = f'convert again with --buckets aspect:{side}' + ('' if manifest.kind == 'images' else ' and encode with --resolution bucket')
        if bucket is None:
            return [f'manifest bucket has no width_px and height_px, data.aspect_buckets is true; {again}, or set data.aspect_buckets=false']
        if not LEAST_BUCKET_AREA * side**2 <= math.prod(bucket) <= side**2:
            return [
                f'manifest bucket is {bucket[0]} x {bucket[1]} px, as much as a square of {math.isqrt(math.prod(bucket))}, data.resolution is '
                f'{side}; {again}, or set data.resolution to the PX of the --buckets aspect:PX that it was converted with'
            ]
        return []
    if manifest.kind == 'images':
        if manifest.min_side_px is not None and manifest.min_side_px < side:
            return [
                f'manifest min_side_px is {manifest.min_side_px}, data.resolution is {side}: small pictures would be '
                f'enlarged; convert again with --min-side {side}'
            ]
        return []
    if bucket is not None and bucket != (side, side):
        return [
            f'manifest bucket is {bucket[0]} x {bucket[1]} px, data.aspect_buckets is false; encode the images again with '
            f'--resolution {side}, or set data.aspect_buckets=true'
        ]
    if bucket is None and manifest.resolution != side:
        return [
            f'manifest resolution is {manifest.resolution}, data.resolution is {side}; encode the images again '
            f'with --resolution {side}, or set data.resolution={manifest.resolution}'
        ]
    return []


def is_bucket_name(stream: str) -> bool:
    """Whether a stream is called as an aspect bucket is: WIDTHxHEIGHT."""
    return re.fullmatch(r'\d+x\d+', stream) is not None
