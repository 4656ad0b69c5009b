"""An MDS dataset of images to one of latents: the whole of an encoding, of which passes.py does the work on a device."""

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.encoding.passes import Encoders, EncodeWork, encode_captions
from data_prep.encoding.pixels import Encoding
from data_prep.engines.engine import Engine
from data_prep.engines.local import IN_THIS_PROCESS, LocalEngine
from data_prep.mds.dataset import Dataset
from data_prep.mds.job import ALONE, Share, Tally
from data_prep.mds.parts import Columns
from data_prep.sources.folder import open_source
from data_prep.sources.image_mds import find_images
from diffusion.common.storage import Folder, open_folder, write
from diffusion.contracts.errors import DataError
from diffusion.contracts.manifest import EMPTY_CAPTIONS, Manifest
from diffusion.cost.hardware import own_device
from diffusion.datasets.shards import in_stream, shards_by_name
from diffusion.datasets.transforms import RECTANGLE, SQUARE
from diffusion.encoders.text import TextEncoders, tokenizer_digests
from diffusion.encoders.vae import Vae
from diffusion.families.networks import find_network
from diffusion.recipe.schema import EncoderSource

BUCKET = 'bucket'  # the resolution of each aspect bucket, as the dataset's record has it


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
    sizes = _bucket_sizes(source, streams) if resolutions is None else _squares(resolutions)
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
    text_sha256 = encoders.text_sha256
    dataset = Dataset(
        dest=open_folder(dest),
        parts=list(shards),
        identify=lambda name: shards[name].fingerprint,
        columns=columns,
        settings={
            'command': 'encode',
            'resolution': BUCKET if resolutions is None else sorted(set(resolutions)),
            'vae_sha256': vae.sha256,
            'text_encoder_sha256': text_sha256,
            'text_family': family,
            **({} if text is None else {'tokenizers_sha256': encoders.tokenizers_sha256}),
            'transform': transform,
            'batch_size': batch_size,  # the last bits of the moments depend on it
            'shard_bytes': shard_bytes,
        },
        described={
            'kind': 'latents',
            'source': {'path': str(source), 'format': 'image MDS', 'fingerprint_of_source': made_from.source.get('fingerprint')},
            'transform': transform,
            'encoder': vae.described(location.source, location.revision),
            'text_encoder': {} if text is None else _made_with(text, text_sha256, family),
            'captioner': made_from.captioner,
        },
        described_by_stream={
            stream: {'bucket': streams[stream].bucket} if resolutions is None else {'resolution': size[0]} for stream, size in sizes.items()
        },
    )
    work = EncodeWork(Encoding(folder, dataset.job, sizes, resolutions is None, columns, shard_bytes), encoders, batch_size)
    with dataset.job.begun(first=[in_stream(stream, name) for stream in columns for name in EMPTY_CAPTIONS.values()]):
        if text is not None and not share.merge_only:
            _write_empty_captions(text, dataset.dest, list(columns))
        return dataset.complete(lambda names: engine.map(work, [shards[name] for name in names]), share)


def _squares(resolutions: list[int]) -> dict[str, tuple[int, int]]:
    """(width, height) by stream; a single resolution needs none."""
    return {'' if len(resolutions) == 1 else str(side): (side, side) for side in sorted(set(resolutions))}


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


def _made_with(text: TextEncoders, text_sha256: str | None, family: str | None) -> dict[str, Any]:
    """What the manifest says of stored text embeddings."""
    made_by = {'sha256': text_sha256, 'tokenizers': tokenizer_digests(text), 'family': family}
    return {**made_by, 'empty_caption': EMPTY_CAPTIONS['text_embeddings'], 'dtype': 'float16'}


def _write_empty_captions(text: TextEncoders, dest: Folder, streams: list[str]) -> None:
    for column, encoded in encode_captions(text, ['']).items():
        buffer = io.BytesIO()
        np.save(buffer, encoded[0].cpu().numpy())
        for stream in streams:
            write(dest, in_stream(stream, EMPTY_CAPTIONS[column]), buffer.getvalue())
