"""Turn an MDS data set of images into one of VAE latents, so that training need not encode again and again.

    python -m data_prep.encode SOURCE DEST --resolution 256 --encoders FOLDER_OR_HUB_ID [--revision COMMIT]

Each picture's short side is resized to the resolution and the centre cropped, as training does it; smaller pictures are left out
and counted. Stored are the VAE's moments (mean and log variance, float16, unscaled), so that every epoch draws a new
posterior sample, and the caption as text, so that caption dropout stays a matter of training.

Exit code 0 when all samples are accounted for, 2 when SOURCE, DEST or the encoders cannot be used.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from streaming import LocalDataset

from data_prep.command import run_command
from data_prep.parts import DataError, Part, PartTally, Tally, write_dataset
from diffusion.arguments import positive_int
from diffusion.datasets.manifest import Manifest
from diffusion.datasets.transforms import ImageError, open_image, square
from diffusion.models.encoders import FrozenEncoders
from diffusion.recipe.schema import Encoders


def encode(source: Path, dest: Path, resolution: int, location: Encoders, batch_size: int = 64) -> Tally:
    """Encode a data set; returns what became of the samples.

    Raises:
        DataError, ManifestError, EncoderError: SOURCE, DEST or the encoders cannot be used.
    """
    made_from = Manifest.read(source)
    if made_from.kind != 'images':
        raise DataError(f'{source}: manifest kind is {made_from.kind}; encode needs a data set of images, as data_prep.convert writes it')
    if made_from.num_samples == 0:
        raise DataError(f'{source}: holds no samples (dropped: {made_from.dropped}); there is nothing to encode')
    encoders = FrozenEncoders.load(location).to('cuda' if torch.cuda.is_available() else 'cpu')
    if resolution % encoders.downsampling:
        raise DataError(f'--resolution {resolution} is not a multiple of the {encoders.downsampling} pixels per latent of {location.source}')
    side = resolution // encoders.downsampling
    columns = {
        'key': ('str', 'key of the row in the source'),
        'caption': ('str', 'its caption'),
        'moments': (
            f'ndarray:float16:{2 * encoders.latent_channels},{side},{side}',
            'mean and log variance of the VAE posterior, unscaled',
        ),
    }
    parts = [
        Part(
            name=f'{i:05d}',
            fingerprint={'shard': shard.raw_data.basename, 'hashes': dict(shard.raw_data.hashes)},
            num_rows=shard.samples,
            rows=partial(shard_rows, source, shard),
        )
        for i, shard in enumerate(cast(list[Any], LocalDataset(local=str(source)).shards))
    ]
    encoder = {
        'source': location.source,
        'revision': location.revision,
        'vae_sha256': encoders.vae_sha256,
        'scaling_factor': encoders.scaling_factor,
        'downsampling': encoders.downsampling,
    }
    return write_dataset(
        dest,
        parts,
        columns,
        settings={'resolution': resolution, 'vae_sha256': encoders.vae_sha256},
        samples=lambda rows, tally: samples(rows, tally, encoders, resolution, batch_size),
        source={'path': str(source), 'format': 'image MDS'},
        kind='latents',
        resolution=resolution,
        transform='short side resized (bilinear, antialiased), centre cropped',
        encoder=encoder,
    )


def shard_rows(source: Path, shard: Any) -> Iterator[dict[str, Any]]:
    """The samples of an MDS shard, once its bytes are known to be those that were written.

    Raises:
        DataError: the shard is missing, or its SHA-256 is not that of the index.
    """
    path, expected = source / shard.raw_data.basename, shard.raw_data.hashes.get('sha256')
    if not path.exists():
        raise DataError(f'{path}: no such file, but index.json names it; copy it again, or convert again')
    with path.open('rb') as file:
        found = hashlib.file_digest(file, 'sha256').hexdigest()
    if expected is not None and found != expected:
        raise DataError(f'{path}: SHA-256 is {found}, index.json says {expected}; the file is damaged: copy it again, or convert again')
    for i in range(shard.samples):
        yield shard[i]


def samples(rows: Iterable[dict[str, Any]], tally: PartTally, encoders: FrozenEncoders, resolution: int, batch_size: int) -> Iterator[dict[str, Any]]:
    """Latents of the rows that are large enough, as MDS samples; the tally hears of every row."""
    squares = _squares(rows, tally, resolution)
    while batch := list(itertools.islice(squares, batch_size)):
        images = torch.stack([image for _, image in batch])
        moments = encoders.encode_images(images.to(encoders.device)).half().cpu().numpy()
        for (row, _), row_moments in zip(batch, moments, strict=True):
            if not np.isfinite(row_moments).all():
                tally.drop(row['key'], row['url'], 'latents not finite')
                continue
            tally.keep()
            yield {'key': row['key'], 'caption': row['caption'], 'moments': row_moments}


def _squares(rows: Iterable[dict[str, Any]], tally: PartTally, resolution: int) -> Iterator[tuple[dict[str, Any], torch.Tensor]]:
    """The rows whose pictures can be used, with the (3, R, R) uint8 square of each."""
    for row in rows:
        if min(row['width'], row['height']) < resolution:
            tally.drop(row['key'], row['url'], f'short side below {resolution} px')
            continue
        try:
            yield row, square(open_image(row['image']), resolution)
        except ImageError as error:
            tally.drop(row['key'], row['url'], str(error))


def main() -> int:
    parser = argparse.ArgumentParser(prog='python -m data_prep.encode', description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('source', type=Path, metavar='SOURCE', help='image MDS, as data_prep.convert writes it')
    parser.add_argument('dest', type=Path, metavar='DEST', help='folder for the latents MDS, new or begun by this command')
    parser.add_argument('--resolution', type=positive_int, required=True, metavar='PX', help='side of the encoded square')
    parser.add_argument('--encoders', required=True, metavar='WHERE', help='local folder in the diffusers layout, or a Hub id')
    parser.add_argument('--revision', metavar='COMMIT', help='commit of the Hub id')
    parser.add_argument('--batch-size', type=positive_int, default=64, help='pictures per pass of the VAE (default %(default)s)')
    args = parser.parse_args()
    location = Encoders(args.encoders, args.revision)
    return run_command(args.dest, lambda: encode(args.source, args.dest, args.resolution, location, args.batch_size))


if __name__ == '__main__':
    raise SystemExit(main())
