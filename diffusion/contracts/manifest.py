"""The contract between data_prep and training: `manifest.json` next to an MDS dataset's `index.json`.

It says what the columns mean and what became of every input row. Training refuses a dataset whose manifest contradicts
the recipe, and names the field. Nothing here imports torch.
"""

import dataclasses
import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NotRequired, Self

from typing_extensions import TypedDict

from diffusion.common.files import parse_json_object, parse_typed
from diffusion.common.storage import open_folder
from diffusion.contracts.errors import ManifestError

MANIFEST_NAME = 'manifest.json'
INDEX_NAME = 'index.json'
MANIFEST_VERSION = 1
# Columns of encoded captions, and the files next to the manifest that hold those of the empty caption.
EMPTY_CAPTIONS = {'text_embeddings': 'empty_caption.npy', 'pooled_embeddings': 'empty_caption_pooled.npy'}
LOSS_MAP = 'loss_map'  # column of photos with masks


class ColumnFacts(TypedDict):
    """MDS encoding of a column, and its meaning in words."""

    encoding: str
    meaning: NotRequired[str]


class BucketFacts(TypedDict, total=False):
    """Sides of an aspect bucket, or the range of the shorter side, in pixels."""

    width_px: int
    height_px: int
    min_side_px: int
    below_px: int | None


class EncoderFacts(TypedDict, total=False):
    """The VAE that made the moments, which are stored unscaled."""

    source: str
    revision: str | None
    vae_sha256: str
    scaling_factor: float
    shift_factor: float
    downsampling: int
    dtype: str
    computed_in: str


@dataclass
class Manifest:
    """The manifest of an MDS dataset."""

    kind: Literal['images', 'latents']  # what the samples hold: the bytes of an image, or VAE moments
    columns: dict[str, ColumnFacts]
    num_samples: int
    attempted: int  # input rows seen; equals num_samples plus all of `dropped`
    dropped: dict[str, int]  # input rows left out, by reason
    source: dict[str, Any]  # where it was made from, and a fingerprint of that
    hashes: list[str]  # algorithms of the shard hashes in index.json
    code_version: str  # version of this package that wrote it
    notes: dict[str, int] = field(default_factory=dict)  # what was done to samples that were kept, and to how many
    # The folders below that hold the samples, each a dataset with a manifest of its own; empty if they are right here.
    streams: list[str] = field(default_factory=list)
    # What the images of this stream have in common: their sides or their aspect ratio; of latents, the size they were encoded at.
    bucket: BucketFacts = field(default_factory=BucketFacts)
    min_side_px: int | None = None  # shortest side of any image (kind `images`)
    resolution: int | None = None  # side of the encoded square, in pixels (kind `latents`, unless encoded at the size of its bucket)
    transform: str | None = None  # how an image became what was encoded (kind `latents`)
    encoder: EncoderFacts = field(default_factory=EncoderFacts)  # of kind `latents`
    # What the stored text embeddings were made with, if there are any: digests of encoders and tokenizers, family, dtype.
    text_encoder: dict[str, Any] = field(default_factory=dict)
    captioner: dict[str, Any] = field(default_factory=dict)  # the model that wrote captions (`recaption`), its prompt and settings, if one did
    version: int = MANIFEST_VERSION

    def __post_init__(self) -> None:
        counts = self.num_samples, self.attempted, *self.dropped.values(), *self.notes.values()
        if min(counts) < 0:
            raise ValueError(f'num_samples, attempted, dropped and notes have to be counts, not {counts}')
        sizes = self.resolution, self.min_side_px, self.encoder.get('downsampling'), *self.bucket.values()
        if any(isinstance(size, int) and size < 1 for size in sizes):
            raise ValueError(f'resolution, min_side_px, encoder.downsampling and sides of a bucket have to be above 0, not {sizes}')

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
        return json.dumps(dataclasses.asdict(self), indent=1) + '\n'

    @classmethod
    def read(cls, where: str | Path) -> Self:
        """Read the manifest of a dataset on a disk or in object storage, never from a cache of an older dataset.

        Raises:
            ManifestError: missing, damaged, or of another version.
            StorageError: object storage cannot be reached.
        """
        path = f'{where}/{MANIFEST_NAME}'
        try:
            content = open_folder(where).read(MANIFEST_NAME)
            said = parse_json_object(content)
            if said.get('version') != MANIFEST_VERSION:
                raise ManifestError(f'{path}: version {said.get("version")}, this code reads {MANIFEST_VERSION}; convert again')
            if unknown := sorted(said.keys() - cls.__dataclass_fields__.keys()):
                raise ManifestError(
                    f'{path}: has the field {unknown[0]!r}, which this code does not know; convert again, or use the version that wrote it'
                )
            return parse_typed(content, cls)
        except FileNotFoundError:
            raise ManifestError(
                f'{path}: no such file; a dataset is made by python -m data_prep.convert or python -m data_prep.encode, '
                'which write it when they have finished'
            ) from None
        except ManifestError:
            raise
        except ValueError as error:
            raise ManifestError(f'{path}: not a manifest: {error}') from None


def identity(index: bytes, manifest: bytes) -> str:
    """Return the SHA-256 of a dataset: its shards with their hashes, and its manifest without the version of the code that wrote it."""
    claims = {name: value for name, value in parse_json_object(manifest).items() if name != 'code_version'}
    return hashlib.sha256(index + json.dumps(claims, sort_keys=True).encode()).hexdigest()
