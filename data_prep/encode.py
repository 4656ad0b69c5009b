"""Turn an MDS data set of images into one of VAE latents, so that training need not encode again and again.

    composer data_prep/encode.py SOURCE DEST --resolution 256 [512] --encoders FOLDER_OR_HUB_ID [--revision COMMIT]
    composer data_prep/encode.py SOURCE DEST --resolution bucket ...      SOURCE was converted with --buckets aspect:PX
    python -m data_prep.encode ...                                        the same on one device

Each picture's short side is resized to the resolution and the centre cropped, as training does it; smaller pictures are left out
and counted. Stored are the VAE's moments (mean and log variance, float16, unscaled), so that every epoch draws a new
posterior sample, and the caption as text, so that caption dropout stays a matter of training. Several resolutions become the streams
DEST/256, DEST/512 ... in one reading. With --resolution bucket each picture is resized until it covers its aspect bucket, and the centre
cropped; DEST has the streams WIDTHxHEIGHT of SOURCE, for data.aspect_buckets=true. Text is cheap to encode while training and its
embeddings are ten times the size of the latents; --text-embeddings stores them nevertheless, and those of the empty caption in
empty_caption.npy.

SOURCE and DEST are folders or URLs (s3://, gs://, oci://). Run the same command again after a stop: it goes on.
"""

from __future__ import annotations

import sys

if not __package__:  # run as a file: Python has put this folder first, where data_prep/inspect.py would hide the standard library's
    sys.path[0] = __file__.rpartition('/data_prep/')[0] or '.'

import io
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from data_prep.command import add_sharing_options, parser, run_command, shard_mb
from data_prep.encoding import Encoding, encode_captions, encode_parts
from data_prep.errors import DataError
from data_prep.mds.dataset import ALONE, Dataset, Share
from data_prep.mds.parts import Columns, in_stream
from data_prep.mds.shards import list_shards
from data_prep.mds.tally import Tally
from data_prep.mds.workers import progress_bar
from diffusion.arguments import positive_int
from diffusion.datasets.manifest import EMPTY_CAPTION_NAME, Manifest
from diffusion.datasets.transforms import RECTANGLE, SQUARE
from diffusion.models.encoders import FrozenEncoders, weights_sha256
from diffusion.processes import end_with_parent
from diffusion.recipe.schema import Encoders
from diffusion.storage import Folder, open_folder, write

BUCKET = 'bucket'
MAX_WORKERS = 16  # a device: what they have ready waits in shared memory


def encode(
    source: str | Path,
    dest: str | Path,
    resolutions: list[int] | None,
    location: Encoders,
    text_embeddings: bool = False,
    batch_size: int = 64,
    processes: int = 0,
    shard_bytes: int = 64 << 20,
    share: Share = ALONE,
    merge_only: bool = False,
    launched: bool = False,
) -> Tally:
    """Encode a data set; returns what became of the samples, each counted once a resolution.

    Args:
        resolutions: sides of the encoded squares in pixels; several become streams named after them. None: each picture at the size of
            the aspect bucket that it is in, in a stream of the same name.
        text_embeddings: store the encoded captions, too.
        batch_size: pictures of 256 px per pass of the VAE; of larger ones as many pixels.
        processes: workers that read, decode and resize; 0: this process does it in between.
        shard_bytes: size at which a shard is closed.
        share: which of several devices or hosts this is.
        merge_only: write nothing but what is merged from the parts of all.
        launched: the other ranks run now, started by the same launcher; the first one merges.

    Raises:
        DataError, ManifestError, EncoderError: SOURCE, DEST or the encoders cannot be used.
        IncompleteError, StorageError: something outside failed; the same call goes on.
    """
    made_from, folder = Manifest.read(source), open_folder(source)
    if made_from.kind != 'images':
        raise DataError(f'{source}: manifest kind is {made_from.kind}; encode needs a data set of images, as data_prep.convert writes it')
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
    listed = list_shards(folder, made_from)
    shards = {shard.name: shard for shard in listed}
    if len(shards) < len(listed):
        raise DataError(f'{source}: index.json names {len(listed)} shards under {len(shards)} names; do not use data from this source')
    several_captions = any('captions' in manifest.columns for manifest in streams.values())
    if several_captions and text_embeddings:
        raise DataError(f'{source}: has several captions a sample; --text-embeddings stores one: leave it out, training encodes the text as it goes')
    columns = {stream: columns_of(encoders, size, several_captions, text_embeddings) for stream, size in sizes.items()}
    transform = RECTANGLE if resolutions is None else SQUARE
    text_sha256 = weights_sha256(encoders.text_encoder) if text_embeddings else None
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
    dataset.begin()
    now = Tally()
    if not merge_only:
        if text_embeddings:
            _write_empty_caption(encoders, dataset.dest, list(columns))
        missing = [shards[name] for name in dataset.missing(share)]
        encoding = Encoding(folder, dataset.dest, sizes, resolutions is None, columns, shard_bytes)
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
            f'{source}: --resolution {BUCKET} needs streams of aspect buckets, and {others[0] or "this data set"} is none; convert the pictures '
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
    }
    if several_captions:
        columns['captions'] = ('json', '[[caption, weight], ...]; the weights add up to 1')
    if text_embeddings:
        columns['text_embeddings'] = (f'ndarray:float16:{encoders.text_length},{encoders.text_width}', 'last hidden state of the caption')
    return columns


def _write_empty_caption(encoders: FrozenEncoders, dest: Folder, streams: list[str]) -> None:
    buffer = io.BytesIO()
    np.save(buffer, encode_captions(encoders, [''])[0].cpu().numpy())
    for stream in streams:
        write(dest, in_stream(stream, EMPTY_CAPTION_NAME), buffer.getvalue())


def _resolution(text: str) -> int | None:
    return None if text == BUCKET else positive_int(text)


def main() -> int:
    options = parser('data_prep.encode', __doc__)
    options.add_argument('source', metavar='SOURCE', help='image MDS, as data_prep.convert writes it')
    options.add_argument('dest', metavar='DEST', help='folder or URL for the latents MDS, new or begun by this command')
    options.add_argument(
        '--resolution',
        type=_resolution,
        required=True,
        nargs='+',
        metavar='PX',
        help=f'side of the encoded square; several make streams; {BUCKET}: each picture at the size of its aspect bucket',
    )
    options.add_argument('--encoders', required=True, metavar='WHERE', help='local folder in the diffusers layout, or a Hub id')
    options.add_argument('--revision', metavar='COMMIT', help='commit of the Hub id')
    options.add_argument('--text-embeddings', action='store_true', help='store the encoded captions too: ten times the size')
    options.add_argument(
        '--batch-size',
        type=positive_int,
        default=64,
        help='pictures of 256 px a pass; of larger ones as many pixels (default %(default)s)',
    )
    options.add_argument('--shard-mb', type=shard_mb, default=64, metavar='MB', help='size of a shard (default %(default)s)')
    add_sharing_options(options)
    args = options.parse_args()
    by_bucket = None in args.resolution
    if by_bucket and len(args.resolution) > 1:
        options.error(f'--resolution {BUCKET} stands alone; encode squares into another DEST')
    launched = args.world_size > 1 and 'LOCAL_RANK' in os.environ
    if launched:
        end_with_parent()  # a killed launcher must not leave this rank behind, writing beside the next run
    location = Encoders(args.encoders, args.revision)
    return run_command(
        args.dest,
        lambda: encode(
            args.source,
            args.dest,
            None if by_bucket else args.resolution,
            location,
            text_embeddings=args.text_embeddings,
            batch_size=args.batch_size,
            processes=min(args.processes, MAX_WORKERS),
            shard_bytes=args.shard_mb << 20,
            share=Share(args.rank, args.world_size),
            merge_only=args.merge,
            launched=launched,
        ),
    )


if __name__ == '__main__':
    raise SystemExit(main())
