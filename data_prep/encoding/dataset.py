"""An MDS dataset of images to one of latents: the whole of an encoding, of which passes.py does the work on a device."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from data_prep.encoding.passes import Encoding, encode_captions, encode_parts
from data_prep.mds.dataset import Dataset
from data_prep.mds.job import ALONE, Share
from data_prep.mds.parts import Columns, in_stream
from data_prep.mds.shards import agreed_shards
from data_prep.mds.tally import Tally
from data_prep.mds.workers import progress_bar
from data_prep.sources.folder import open_source
from diffusion.common.storage import Folder, open_folder, write
from diffusion.contracts.errors import DataError
from diffusion.contracts.manifest import EMPTY_CAPTION_NAME, Manifest
from diffusion.datasets.transforms import RECTANGLE, SQUARE
from diffusion.encoders.frozen import FrozenEncoders
from diffusion.recipe.schema import EncoderSource

BUCKET = 'bucket'  # the resolution of each aspect bucket, as the dataset's record has it


def encode(
    source: str | Path,
    dest: str | Path,
    resolutions: list[int] | None,
    location: EncoderSource,
    text_embeddings: bool = False,
    batch_size: int = 64,
    processes: int = 0,
    shard_bytes: int = 64 << 20,
    share: Share = ALONE,
    merge_only: bool = False,
    launched: bool = False,
) -> Tally:
    """Encode a dataset; returns what became of the samples, each counted once a resolution.

    Args:
        resolutions: sides of the encoded squares in pixels; several become streams named after them. None: each image at the size of
            the aspect bucket that it is in, in a stream of the same name.
        text_embeddings: store the encoded captions, too.
        batch_size: images of 256 px per pass of the VAE; of larger ones as many pixels.
        processes: workers that read, decode and resize; 0: this process does it in between.
        shard_bytes: size at which a shard is closed.
        share: which of several devices or hosts this is.
        merge_only: write nothing but what is merged from the parts of all.
        launched: the other ranks run now, started by the same launcher; the first one merges.

    Raises:
        DataError, ManifestError, EncoderError: SOURCE, DEST or the encoders cannot be used.
        IncompleteError, StorageError: something outside failed; the same call resumes.
    """
    made_from, folder = Manifest.read(source), open_source(source)
    if made_from.kind != 'images':
        raise DataError(f'{source}: manifest kind is {made_from.kind}; encode needs a dataset of images, as data_prep.convert writes it')
    if made_from.num_samples == 0:
        raise DataError(f'{source}: holds no samples (dropped: {made_from.dropped}); there is nothing to encode')
    device = torch.device('cuda', int(os.environ.get('LOCAL_RANK', '0'))) if torch.cuda.is_available() else torch.device('cpu')
    if device.type == 'cuda':
        torch.cuda.set_device(device)  # or pinned memory would go through the first GPU
    encoders = FrozenEncoders.load(location).to(device)
    streams = {stream: Manifest.read(f'{source}/{stream}') for stream in made_from.streams} or {'': made_from}
    sizes = _bucket_sizes(source, streams) if resolutions is None else _squares(resolutions)
    for side in sorted({side for size in sizes.values() for side in size}):
        if side % encoders.downsampling:
            raise DataError(f'--resolution {side} is not a multiple of the {encoders.downsampling} pixels per latent of {location.source}')
    listed = agreed_shards(folder, made_from)
    shards = {shard.name: shard for shard in listed}
    if len(shards) < len(listed):
        raise DataError(f'{source}: index.json names {len(listed)} shards under {len(shards)} names; do not use data from this source')
    several_captions = any('captions' in manifest.columns for manifest in streams.values())
    if several_captions and text_embeddings:
        raise DataError(f'{source}: has several captions a sample; --text-embeddings stores one: leave it out, training encodes the text as it goes')
    columns = {stream: columns_of(encoders, size, several_captions, text_embeddings) for stream, size in sizes.items()}
    transform = RECTANGLE if resolutions is None else SQUARE
    text_sha256 = encoders.digests['text_encoder'] if text_embeddings else None
    dataset = Dataset(
        dest=open_folder(dest),
        parts=list(shards),
        identify=lambda name: shards[name].fingerprint,
        columns=columns,
        settings={
            'command': 'encode',
            'resolution': BUCKET if resolutions is None else sorted(set(resolutions)),
            'vae_sha256': encoders.vae_sha256,
            'text_encoder_sha256': text_sha256,
            'transform': transform,
            'shard_bytes': shard_bytes,
        },
        described={
            'kind': 'latents',
            'source': {'path': str(source), 'format': 'image MDS', 'fingerprint_of_source': made_from.source.get('fingerprint')},
            'transform': transform,
            'encoder': {
                'source': location.source,
                'revision': location.revision,
                'vae_sha256': encoders.vae_sha256,
                'scaling_factor': encoders.scaling_factor,
                'downsampling': encoders.downsampling,
                'dtype': 'float16',
                'computed_in': 'float32',
            },
            'text_encoder': {'sha256': text_sha256, 'empty_caption': EMPTY_CAPTION_NAME, 'dtype': 'float16'} if text_embeddings else {},
        },
        described_by_stream={
            stream: {'bucket': streams[stream].bucket} if resolutions is None else {'resolution': size[0]} for stream, size in sizes.items()
        },
    )
    now = Tally()
    with dataset.job.begun():
        if not merge_only:
            if text_embeddings:
                _write_empty_caption(encoders, dataset.dest, list(columns))
            missing = [shards[name] for name in dataset.missing(share)]
            encoding = Encoding(folder, dataset.job, sizes, resolutions is None, columns, shard_bytes)
            total = sum(shard.num_samples for shard in missing)
            with progress_bar(total=total, unit='images', desc='encode', disable=not missing) as progress:
                for tally in encode_parts(encoding, encoders, text_embeddings, missing, batch_size, processes, progress):
                    now.add(tally)
        if launched:  # all ranks were started together, so the first one can wait for the others and show the whole
            if share.rank > 0:
                return now
            dataset.wait()
        return dataset.finish(ALONE if merge_only or launched else share, now)


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


def columns_of(encoders: FrozenEncoders, size_px: tuple[int, int], several_captions: bool, text_embeddings: bool) -> Columns:
    """Columns of the stream of a (width, height)."""
    width, height = (side // encoders.downsampling for side in size_px)
    columns = {
        'key': ('str', 'key of the row in the source'),
        'caption': ('str', 'its caption; the first of several'),
        'moments': (
            f'ndarray:float16:{2 * encoders.latent_channels},{height},{width}',
            'mean and log variance of the VAE posterior, unscaled',
        ),
        'size': ('ndarray:int32:2', 'height and width of the original image in pixels, before any resizing'),
        'crop': ('ndarray:int32:2', 'top and left of what was encoded, in pixels of the resized image'),
    }
    if several_captions:
        columns['captions'] = ('json', '[[caption, weight], ...]; the weights add up to 1')
    if text_embeddings:
        columns['text_embeddings'] = (f'ndarray:float16:{encoders.text.length},{encoders.text.width}', 'last hidden state of the caption')
    return columns


def _write_empty_caption(encoders: FrozenEncoders, dest: Folder, streams: list[str]) -> None:
    buffer = io.BytesIO()
    np.save(buffer, encode_captions(encoders, [''])[0].cpu().numpy())
    for stream in streams:
        write(dest, in_stream(stream, EMPTY_CAPTION_NAME), buffer.getvalue())
