"""Shards of images to shards of latents: read, decoded and resized one shard at a time in each process, then encoded, and written."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data_prep.engines.batches import BatchWork, ShardMessages
from data_prep.mds.job import Job
from data_prep.mds.parts import Columns
from data_prep.mds.writing import PartEnd, PartsWriting
from diffusion.common.storage import Folder
from diffusion.contracts.errors import EncoderError
from diffusion.datasets.decode import ImageError
from diffusion.datasets.shards import Shard, read_shard
from diffusion.datasets.transforms import covered
from diffusion.encoders.text import TextEncoders, tokenizer_digests
from diffusion.encoders.vae import Vae
from diffusion.families.registry import family_of
from diffusion.recipe.schema import EncoderSource


@dataclass(frozen=True)
class Encoding:
    """Source and destination, and what each stream holds."""

    source: Folder
    job: Job
    sizes: Mapping[str, tuple[int, int]]
    """Width and height of each stream, in pixels."""
    by_bucket: bool
    """Whether an image stays in the stream that it is in; otherwise it goes into each."""
    columns: Mapping[str, Columns]
    shard_bytes: int

    def sizes_of(self, shard: Shard) -> Mapping[str, tuple[int, int]]:
        """The streams that a shard's images go into."""
        return {shard.stream: self.sizes[shard.stream]} if self.by_bucket else self.sizes


@dataclass(frozen=True)
class Pixels:
    """A batch of one part and one stream: (B, 3, H, W) uint8, and the rows they are of."""

    part: Shard
    stream: str
    images: Tensor
    rows: list[dict[str, Any]]

    def pin_memory(self) -> Pixels:
        """Pin the tensors for the DataLoader, which finds none in a class by itself."""
        return replace(self, images=self.images.pin_memory())


Message = Pixels | PartEnd | Exception
"""About a part, in this order: its batches and its end; or the error that reading it met."""


class PixelsOfShards(ShardMessages):
    """Messages about all rows of some shards."""

    def __init__(self, encoding: Encoding, shards: Sequence[Shard], batch_size: int):
        super().__init__(encoding.job, shards)
        self.encoding, self.batch_size = encoding, batch_size

    def of_shard(self, shard: Shard, scratch: Path) -> Iterator[Pixels | PartEnd]:
        sizes = self.encoding.sizes_of(shard)
        waiting: dict[str, list[tuple[Tensor, dict[str, Any]]]] = {stream: [] for stream in sizes}
        failures = []
        for row in read_shard(self.encoding.source, shard, scratch):
            content = row.pop('image')
            for stream, size in sizes.items():
                try:
                    if row['width'] < size[0] or row['height'] < size[1]:
                        raise ImageError(f'short side below {size[0]} px' if size[0] == size[1] else 'smaller than its aspect bucket')
                    pixels, crop = covered(content, *size)
                    geometry = {'size': np.array((row['original_height'], row['original_width']), np.int32), 'crop': np.array(crop, np.int32)}
                    waiting[stream].append((pixels, {**row, **geometry}))
                except ImageError as error:
                    failures.append((row['key'], row.get('url', ''), str(error)))
                if len(waiting[stream]) == batch_at(size, self.batch_size):
                    yield _batch(shard, stream, waiting[stream])
                    waiting[stream] = []
        yield from (_batch(shard, stream, rest) for stream, rest in waiting.items() if rest)
        yield PartEnd(shard, failures)


def batch_at(size_px: tuple[int, int], batch_size: int) -> int:
    """Images a pass: as many pixels as `batch_size` squares of 256 px have, or fewer."""
    return max(1, min(batch_size, batch_size * 256**2 // math.prod(size_px)))


def _batch(shard: Shard, stream: str, waiting: list[tuple[Tensor, dict[str, Any]]]) -> Pixels:
    return Pixels(shard, stream, torch.stack([pixels for pixels, _ in waiting]), [row for _, row in waiting])


class Writing(PartsWriting):
    """Writes the parts of an encoding."""

    def write(self, batch: Pixels, moments_on_device: Tensor, embeddings_on_device: Mapping[str, Tensor]) -> None:
        """Write an encoded batch; the tensors may not be computed yet."""
        writer, moments = self.writer(batch.part), moments_on_device.cpu().numpy()
        embeddings = {column: encoded.cpu().numpy() for column, encoded in embeddings_on_device.items()}
        for i, row in enumerate(batch.rows):
            if not np.isfinite(moments[i]).all():
                writer.drop(row['key'], row.get('url', ''), 'latents not finite')
                continue
            values = {**row, 'moments': moments[i], **{column: encoded[i] for column, encoded in embeddings.items()}}
            writer.keep({column: values[column] for column in self.columns[batch.stream]}, batch.stream)


@dataclass(frozen=True)
class Encoders:
    """The VAE and, if captions are stored too, the text encoders of one process.

    Attributes:
        location: where they come from.
        network: the model.network whose family's text encoders encode the captions; None: none do.
    """

    location: EncoderSource
    network: str | None
    vae: Vae
    text: TextEncoders | None
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @classmethod
    def find(cls, location: EncoderSource, network: str | None) -> Encoders:
        """Configurations and tokenizers; weights are read when they are first used.

        Raises:
            EncoderError: they cannot be read.
        """
        where = location.source, location.revision
        return cls(location, network, Vae.find(*where), None if network is None else family_of(network).find_text(*where))

    def load(self, device: torch.device) -> None:
        """Read the weights to `device`. Raises EncoderError if that fails."""
        for part in [self.vae, *(self.text.parts.values() if self.text is not None else [])]:
            part.to(device)
            _ = part.module

    @property
    def text_sha256(self) -> str | None:
        return None if self.text is None else ', '.join(part.sha256 for part in self.text.parts.values())

    @property
    def tokenizers_sha256(self) -> str | None:
        return None if self.text is None else ', '.join(tokenizer_digests(self.text).values())

    def encode(self, batch: Pixels) -> tuple[Tensor, dict[str, Tensor]]:
        """(B, 2C, h, w) float16 moments, and the captions by column. Of several threads one encodes at a time."""
        with self._lock:
            moments = self.vae.encode(batch.images.to(self.vae.device, non_blocking=True)).half()
            return moments, {} if self.text is None else encode_captions(self.text, [row['caption'] for row in batch.rows])

    def __reduce__(self) -> Any:
        return Encoders.find, (self.location, self.network)


def encode_captions(text: TextEncoders, captions: Sequence[str]) -> dict[str, Tensor]:
    """(B, ...) float16 by column, what the network sees of the captions."""
    return text.encode(text.tokenize(captions)).to_store()


@dataclass(frozen=True)
class EncodeWork(BatchWork[Message]):
    """Encodes shards of images; each becomes a part."""

    label = 'encode'

    encoding: Encoding
    encoders: Encoders
    batch_size: int

    @property
    def reads(self) -> Folder:
        return self.encoding.source

    @property
    def writes(self) -> Folder:
        return self.encoding.job.dest

    @property
    def device(self) -> torch.device:
        return self.encoders.vae.device

    def read(self, shards: Sequence[Shard]) -> PixelsOfShards:
        return PixelsOfShards(self.encoding, shards, self.batch_size)

    def writing(self) -> Writing:
        return Writing(self.encoding.job, self.encoding.columns, self.encoding.shard_bytes)

    def step(self, writing: Writing, batch: Pixels) -> None:
        writing.submit(writing.write, batch, *self.encoders.encode(batch))

    def load(self, device: torch.device) -> None:
        """The encoders are read from their location, and have to be those that the dataset was begun with."""
        self.encoders.load(device)
        encoders = self.encoders
        for name, sha256 in (('vae', encoders.vae.sha256), ('text_encoder', encoders.text_sha256), ('tokenizers', encoders.tokenizers_sha256)):
            begun_with = self.encoding.job.settings.get(f'{name}_sha256')
            if sha256 != begun_with:
                raise EncoderError(f'{self.encoders.location.source}: {name} has SHA-256 {sha256}, the dataset was begun with {begun_with}')

    def pack(self, message: Message) -> Any:
        """Arrays: Ray moves their memory without a copy, and pickles tensors."""
        return replace(message, images=message.images.numpy()) if isinstance(message, Pixels) else message  # type: ignore[arg-type]

    def unpack(self, packed: Any) -> Message:
        """Copy what comes from Ray: it cannot be written to, and PyTorch has no such tensors."""
        return replace(packed, images=torch.from_numpy(packed.images.copy())) if isinstance(packed, Pixels) else packed  # type: ignore[attr-defined]
