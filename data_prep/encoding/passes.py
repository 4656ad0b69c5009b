"""Batches of pixels to latents without the accelerator waiting: workers read, decode and resize; this thread encodes; another one writes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from tqdm import tqdm

from data_prep.encoding.pixels import Encoding, Message, PartEnd, Pixels, PixelsOfShards
from data_prep.encoding.writing import Writing
from data_prep.engines.engine import Resources, StreamedWork
from data_prep.engines.local import WorkerKilled, progress_bar
from data_prep.mds.tally import Tally
from diffusion.common.processes import end_with_parent
from diffusion.common.storage import Folder
from diffusion.contracts.errors import DataError, EncoderError
from diffusion.datasets.shards import Shard
from diffusion.encoders.text import TextEncoders
from diffusion.encoders.vae import Vae
from diffusion.families.registry import family_of
from diffusion.recipe.schema import EncoderSource

MAX_WORKERS = 16  # a device: what they have ready waits in shared memory


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
class EncodeWork(StreamedWork[Shard, Message, Tally]):
    """Encodes shards of images; each becomes a part."""

    label, unit, uses_gpu = 'encode', 'images', True

    encoding: Encoding
    encoders: Encoders
    batch_size: int

    @property
    def reads(self) -> Folder:
        return self.encoding.source

    @property
    def writes(self) -> Folder:
        return self.encoding.job.dest

    def name(self, shard: Shard) -> str:
        return shard.name

    def file(self, shard: Shard) -> str:
        return shard.path

    def count(self, shard: Shard, tally: Tally) -> int:
        return shard.num_samples

    def here(self, shards: Sequence[Shard], processes: int) -> Iterator[Tally]:
        """Tallies of the parts as they are committed, encoded on the device that the encoders are on."""
        workers = min(processes, len(shards), MAX_WORKERS)
        loader = DataLoader(
            PixelsOfShards(self.encoding, shards, self.batch_size),
            batch_size=None,
            num_workers=workers,
            prefetch_factor=4 if workers else None,
            worker_init_fn=_begin_worker if workers else None,
            pin_memory=self.encoders.vae.device.type == 'cuda',
        )
        total = sum(shard.num_samples for shard in shards)
        with progress_bar(total=total, unit=self.unit, desc=self.label, disable=not shards) as progress:
            try:
                yield from self._encode(_counted(loader, progress))
            except RuntimeError as error:
                if not str(error).startswith('DataLoader worker (pid'):
                    raise
                raise WorkerKilled from error

    def messages(self, shard: Shard) -> Generator[Message]:
        yield from PixelsOfShards(self.encoding, [shard], self.batch_size)

    def start_fed(self, resources: Resources) -> Callable[[Iterator[Message]], Tally]:
        """The encoders are read from their location, and have to be those that the dataset was begun with.

        Raises:
            EncoderError: they are others, or cannot be read; or there is no GPU where one was promised.
        """
        if resources.gpus and not torch.cuda.is_available():
            raise EncoderError('the cluster gives a GPU to this process, and PyTorch sees none; install a PyTorch of its CUDA version')
        torch.set_num_threads(resources.cpus)
        self.encoders.load(torch.device('cuda' if resources.gpus else 'cpu'))
        for name, sha256 in (('vae', self.encoders.vae.sha256), ('text_encoder', self.encoders.text_sha256)):
            begun_with = self.encoding.job.settings[f'{name}_sha256']
            if sha256 != begun_with:
                raise EncoderError(f'{self.encoders.location.source}: {name} has SHA-256 {sha256}, the dataset was begun with {begun_with}')
        return self._encode_part

    def _encode_part(self, messages: Iterator[Message]) -> Tally:
        (tally,) = self._encode(messages)
        return tally

    def _encode(self, messages: Iterable[Message]) -> Iterator[Tally]:
        """Tallies of the parts that the messages are about, as they are committed; those of several parts may come mixed."""
        with Writing(self.encoding) as writing:
            for message in messages:
                if isinstance(message, Exception):
                    raise message
                if isinstance(message, PartEnd):
                    writing.submit(writing.end, message)
                else:
                    try:
                        writing.submit(writing.write, message, *self.encoders.encode(message))
                    except torch.cuda.OutOfMemoryError as error:
                        less = f'try {max(1, self.batch_size // 2)}, in another DEST if this one has parts: their bits depend on it'
                        raise DataError(f'the GPU has too little memory for --batch-size {self.batch_size}: {error}; {less}') from error
                yield from writing.committed()
            writing.finish()
            yield from writing.committed()

    def pack(self, message: Message) -> Any:
        """Arrays: Ray moves their memory without a copy, and pickles tensors."""
        return replace(message, images=message.images.numpy()) if isinstance(message, Pixels) else message  # type: ignore[arg-type]

    def unpack(self, packed: Any) -> Message:
        """What comes from Ray cannot be written to, and PyTorch has no such tensors."""
        return replace(packed, images=torch.from_numpy(packed.images.copy())) if isinstance(packed, Pixels) else packed  # type: ignore[attr-defined]


def _counted(messages: Iterable[Message], progress: tqdm) -> Iterator[Message]:
    for message in messages:
        yield message
        if isinstance(message, PartEnd):
            progress.update(message.part.num_samples)


def _begin_worker(_: int) -> None:
    end_with_parent()
