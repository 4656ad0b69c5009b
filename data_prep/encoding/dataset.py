"""An MDS dataset of images to one of latents: shards are read, decoded and resized one at a time in each process, then encoded, and written."""

import io
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from data_prep.engines.batches import BatchWork, ImageBatch, PartEnd
from data_prep.engines.engine import IN_THIS_PROCESS, Engine, LocalEngine
from data_prep.mds.dataset import Columns, Dataset, PartWriter
from data_prep.mds.job import ALONE, Share, Tally
from data_prep.sources.folder import open_source
from data_prep.sources.mds import find_images
from diffusion.common.storage import Folder, open_folder, write
from diffusion.contracts.errors import DataError, EncoderError
from diffusion.contracts.manifest import EMPTY_CAPTIONS, Manifest
from diffusion.cost.hardware import own_device
from diffusion.datasets.decode import ImageError
from diffusion.datasets.shards import Shard, in_stream, read_shard, shards_by_name
from diffusion.datasets.transforms import RECTANGLE, SQUARE, covered
from diffusion.encoders.frozen import Vae
from diffusion.encoders.text import TextEncoders
from diffusion.families.networks import find_network
from diffusion.families.registry import family_of
from diffusion.recipe.schema import EncoderSource

BUCKET = 'bucket'  # the resolution of each aspect bucket, as the dataset's record has it


@dataclass(frozen=True)
class Encoders:
    """The VAE and, if captions are stored too, the text encoders of one process."""

    location: EncoderSource  # where they come from
    network: str | None  # the model.network whose family's text encoders encode the captions; None: none do
    vae: Vae
    text: TextEncoders | None
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @classmethod
    def find(cls, location: EncoderSource, network: str | None) -> Self:
        """Configurations and tokenizers; weights are read when they are first used. Raises EncoderError: they cannot be read."""
        where = location.source, location.revision
        return cls(location, network, Vae.find(*where), None if network is None else family_of(network).find_text(*where))

    def load(self, device: torch.device) -> None:
        """Read the weights to `device`. Raises EncoderError if that fails."""
        for part in [self.vae, *(self.text.parts.values() if self.text is not None else [])]:
            part.to(device)
            _ = part.module

    def digests(self) -> dict[str, str | None]:
        """Digests of what is loaded, as DEST's record has them."""
        found: dict[str, str | None] = {'vae_sha256': self.vae.sha256, 'text_encoder_sha256': None}
        if self.text is not None:
            found['text_encoder_sha256'] = ', '.join(part.sha256 for part in self.text.parts.values())
            found['tokenizers_sha256'] = ', '.join(self.text.tokenizer_digests.values())
        return found

    def encode(self, batch: ImageBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """(B, 2C, h, w) float16 moments of (B, 3, H, W) uint8, and the captions by column. Of several threads one encodes at a time."""
        with self._lock:
            moments = self.vae.encode(batch.inputs['images'].to(self.vae.device, non_blocking=True)).half()
            return moments, {} if self.text is None else encode_captions(self.text, [row['caption'] for row in batch.rows])

    def __reduce__(self) -> Any:
        return Encoders.find, (self.location, self.network)


def encode_captions(text: TextEncoders, captions: Sequence[str]) -> dict[str, Tensor]:
    """(B, ...) float16 by column, what the network sees of the captions."""
    return text.encode(text.tokenize(captions)).to_store()


@dataclass(frozen=True)
class EncodeWork(BatchWork):
    """Encodes shards of images; each becomes a part."""

    label = 'encode'

    encoders: Encoders
    sizes: Mapping[str, tuple[int, int]]
    """Width and height of each stream, in pixels."""
    by_bucket: bool
    """Whether an image stays in the stream that it is in; otherwise it goes into each."""

    @property
    def device(self) -> torch.device:
        return self.encoders.vae.device

    def load(self, device: torch.device) -> None:
        """The encoders are read from their location, and have to be those that the dataset was begun with."""
        self.encoders.load(device)
        for name, sha256 in self.encoders.digests().items():
            begun_with = self.job.settings.get(name)
            if sha256 != begun_with:
                what = name.removesuffix('_sha256')
                raise EncoderError(f'{self.encoders.location.source}: {what} has SHA-256 {sha256}, the dataset was begun with {begun_with}')

    def batches(self, shard: Shard, scratch: Path) -> Iterator[ImageBatch | PartEnd]:
        sizes = {shard.stream: self.sizes[shard.stream]} if self.by_bucket else self.sizes
        waiting: dict[str, list[tuple[Tensor, dict[str, Any]]]] = {stream: [] for stream in sizes}
        failures = []
        for row in read_shard(self.source, shard, scratch):
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

    def compute(self, batch: ImageBatch) -> tuple[Tensor, dict[str, Tensor]]:
        return self.encoders.encode(batch)

    def write(self, writer: PartWriter, batch: ImageBatch, *computed: Any) -> None:
        moments, embeddings = computed[0].cpu().numpy(), {column: encoded.cpu().numpy() for column, encoded in computed[1].items()}
        for i, row in enumerate(batch.rows):
            if not np.isfinite(moments[i]).all():
                writer.drop(row['key'], row.get('url', ''), 'latents not finite')
                continue
            values = {**row, 'moments': moments[i], **{column: encoded[i] for column, encoded in embeddings.items()}}
            writer.keep({column: values[column] for column in self.columns[batch.stream]}, batch.stream)


def batch_at(size_px: tuple[int, int], batch_size: int) -> int:
    """Images a pass: as many pixels as `batch_size` squares of 256 px have, or fewer."""
    return max(1, min(batch_size, batch_size * 256**2 // math.prod(size_px)))


def _batch(shard: Shard, stream: str, waiting: list[tuple[Tensor, dict[str, Any]]]) -> ImageBatch:
    return ImageBatch(shard, stream, {'images': torch.stack([pixels for pixels, _ in waiting])}, [row for _, row in waiting])


def encode(
    source: str | Path,
    dest: str | Path,
    resolutions: list[int] | None,
    location: EncoderSource,
    network: str | None = None,
    batch_size: int = 64,
    engine: Engine = IN_THIS_PROCESS,
    shard_bytes: int = 64 << 20,
    share: Share = ALONE,
) -> Tally:
    """Encode a dataset; returns what became of the samples, each counted once a resolution.

    Args:
        resolutions: sides of the encoded squares in pixels; several become streams named after them. None: each image at the size of
            the aspect bucket that it is in, in a stream of the same name.
        network: store the captions, too, as the text encoders of this network's family encode them; None: latents alone.
        batch_size: images of 256 px per pass of the VAE; of larger ones as many pixels.
        engine: who does the work. The local one encodes on this process's device; its processes read, decode and resize.
        shard_bytes: size at which a shard is closed.
        share: which of several devices or hosts this is.

    Raises:
        DataError, ManifestError, EncoderError: SOURCE, DEST or the encoders cannot be used.
        InputError: PyTorch has no kernels for the GPU.
        IncompleteError, StorageError: something outside failed; the same call resumes.
    """
    made_from, folder = find_images(source, 'encode'), open_source(source)
    device = own_device() if isinstance(engine, LocalEngine) else None
    encoders = Encoders.find(location, network)
    vae, text = encoders.vae, encoders.text
    if device is not None:
        encoders.load(device)
    streams = {stream: Manifest.read(f'{source}/{stream}') for stream in made_from.streams} or {'': made_from}
    if resolutions is None:
        sizes = _bucket_sizes(source, streams)
    else:  # a single resolution needs no stream
        sizes = {'' if len(resolutions) == 1 else str(side): (side, side) for side in sorted(set(resolutions))}
    for side in sorted({side for size in sizes.values() for side in size}):
        if side % vae.downsampling:
            raise DataError(f'--resolution {side} is not a multiple of the {vae.downsampling} pixels per latent of {location.source}')
    shards = shards_by_name(folder, made_from)
    several_captions = any('captions' in manifest.columns for manifest in streams.values())
    if several_captions and text is not None:
        raise DataError(f'{source}: has several captions a sample; --text-embeddings stores one: leave it out, training encodes the text as it goes')
    columns = {stream: columns_of(vae, text, size, several_captions) for stream, size in sizes.items()}
    transform = RECTANGLE if resolutions is None else SQUARE
    family = None if network is None else find_network(network).family  # the same encoders encode otherwise for another family, by a mask for example
    digests = encoders.digests()
    dataset = Dataset(
        dest=open_folder(dest),
        parts=shards,
        identify=lambda shard: shard.fingerprint,
        columns=columns,
        settings={
            'command': 'encode',
            'resolution': BUCKET if resolutions is None else sorted(set(resolutions)),
            'vae_sha256': digests['vae_sha256'],
            'text_encoder_sha256': digests['text_encoder_sha256'],
            'text_family': family,
            **{name: digest for name, digest in digests.items() if name == 'tokenizers_sha256'},
            'transform': transform,
            'batch_size': batch_size,  # the last bits of the moments depend on it
            'shard_bytes': shard_bytes,
        },
        described={
            'kind': 'latents',
            'source': {'path': str(source), 'format': 'image MDS', 'fingerprint_of_source': made_from.source.get('fingerprint')},
            'transform': transform,
            'encoder': vae.described(location.source, location.revision),
            'text_encoder': {} if text is None else text_encoder_facts(text, family),
            'captioner': made_from.captioner,
        },
        described_by_stream={
            stream: {'bucket': streams[stream].bucket} if resolutions is None else {'resolution': size[0]} for stream, size in sizes.items()
        },
    )
    work = EncodeWork(folder, dataset.job, columns, shard_bytes, batch_size, encoders, sizes, by_bucket=resolutions is None)
    with dataset.job.begun(first=[in_stream(stream, name) for stream in columns for name in EMPTY_CAPTIONS.values()]):
        if text is not None and not share.merge_only:
            write_empty_captions(text, dataset.dest, list(columns))
        return dataset.complete(partial(engine.map, work), share)


def _bucket_sizes(source: str | Path, streams: Mapping[str, Manifest]) -> dict[str, tuple[int, int]]:
    """(width, height) of each stream's aspect bucket."""
    sizes = {stream: manifest.bucket_px for stream, manifest in streams.items()}
    others = [stream for stream, size in sizes.items() if size is None]
    if others:
        raise DataError(
            f'{source}: --resolution {BUCKET} needs streams of aspect buckets, and {others[0] or "this dataset"} is none; convert the images '
            'with --buckets aspect:PX, or give --resolution in pixels to encode squares'
        )
    return {stream: size for stream, size in sizes.items() if size is not None}


def columns_of(vae: Vae, text: TextEncoders | None, size_px: tuple[int, int], several_captions: bool) -> Columns:
    """Columns of the stream of a (width, height)."""
    width, height = (side // vae.downsampling for side in size_px)
    columns = {
        'key': ('str', 'key of the row in the source'),
        'caption': ('str', 'its caption; the first of several'),
        'moments': (
            f'ndarray:float16:{2 * vae.latent_channels},{height},{width}',
            'mean and log variance of the VAE posterior, unscaled',
        ),
        'size': ('ndarray:int32:2', 'height and width of the original image in pixels, before any resizing'),
        'crop': ('ndarray:int32:2', 'top and left of what was encoded, in pixels of the resized image'),
    }
    if several_captions:
        columns['captions'] = ('json', '[[caption, weight], ...]; the weights add up to 1')
    if text is not None:
        columns['text_embeddings'] = (f'ndarray:float16:{text.length},{text.width}', 'the encoded caption, token by token')
        if text.pooled_width is not None:
            columns['pooled_embeddings'] = (f'ndarray:float16:{text.pooled_width}', 'the encoded caption as one vector')
    return columns


def text_encoder_facts(text: TextEncoders, family: str | None) -> dict[str, Any]:
    """Return the section of the manifest about stored text embeddings."""
    made_by = {'sha256': ', '.join(part.sha256 for part in text.parts.values()), 'tokenizers': text.tokenizer_digests, 'family': family}
    return {**made_by, 'empty_caption': EMPTY_CAPTIONS['text_embeddings'], 'dtype': 'float16'}


def write_empty_captions(text: TextEncoders, dest: Folder, streams: list[str]) -> None:
    for column, encoded in encode_captions(text, ['']).items():
        buffer = io.BytesIO()
        np.save(buffer, encoded[0].cpu().numpy())
        for stream in streams:
            write(dest, in_stream(stream, EMPTY_CAPTIONS[column]), buffer.getvalue())
