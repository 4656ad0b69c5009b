"""The models of `encode`, and what they do to batches of pixels."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from data_prep.encoding.pixels import Encoding, Message, Pixels, PixelsOfShards
from data_prep.encoding.writing import Writing
from data_prep.engines.batches import BatchWork
from diffusion.common.storage import Folder
from diffusion.contracts.errors import EncoderError
from diffusion.datasets.shards import Shard
from diffusion.encoders.text import TextEncoders, tokenizer_digests
from diffusion.encoders.vae import Vae
from diffusion.families.registry import family_of
from diffusion.recipe.schema import EncoderSource


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
        return Writing(self.encoding)

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
        """What comes from Ray cannot be written to, and PyTorch has no such tensors."""
        return replace(packed, images=torch.from_numpy(packed.images.copy())) if isinstance(packed, Pixels) else packed  # type: ignore[attr-defined]
