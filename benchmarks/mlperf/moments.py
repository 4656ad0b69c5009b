"""The reference's tars of moments and captions become parts of an MDS dataset of latents, one part a tar."""

import io
import tarfile
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import numpy as np

from data_prep.engines.engine import count_row, map_parts
from data_prep.mds.dataset import Columns, Dataset, PartWriter
from data_prep.mds.job import ALONE, Job, Share, Tally
from data_prep.sources.base import Part, captions_of, readable
from data_prep.sources.folder import open_source
from diffusion.common.storage import Folder, fingerprint, open_folder
from diffusion.contracts.errors import DataError
from diffusion.encoders.frozen import Vae
from diffusion.recipe.schema import EncoderSource

SIDE = 64  # of the latents: 512 px
SUFFIXES = ('npy', 'txt')
TRANSFORM = (
    'short side resized to 512 px (bicubic), centre cropped, encoded from levels 0..1 where the VAE expects -1..1 (mlcommons/training, issue 721)'
)


def convert_moments(source: str, dest: str, encoders: EncoderSource, processes: int = 0, shard_bytes: int = 64 << 20, share: Share = ALONE) -> Tally:
    """Convert a folder of tars; returns what became of the samples.

    Args:
        encoders: where the VAE is whose moments these are.
        processes: of this host; 0: this one alone.
        shard_bytes: size at which a shard is closed.
        share: which of several hosts this is.

    Raises:
        DataError, EncoderError: SOURCE, DEST or the encoders cannot be used.
        IncompleteError, StorageError: something outside failed; the same call resumes.
    """
    folder = open_source(source)
    names = {name: stat for name, stat in sorted(folder.files().items()) if name.endswith('.tar') and '/' not in name}
    parts = {part.name: part for part in (Part(PurePosixPath(name).stem, {name: stat}) for name, stat in names.items())}
    if not parts:
        raise DataError(f'{source}: holds no .tar; name the folder with the tars of moments, 00000.tar and so on')
    vae = Vae.find(encoders.source, encoders.revision)
    columns: Columns = {
        'key': ('str', 'name of the sample in its tar'),
        'caption': ('str', 'its caption'),
        'moments': (f'ndarray:float16:{2 * vae.latent_channels},{SIDE},{SIDE}', 'mean and log variance of the VAE posterior, unscaled'),
    }
    dataset = Dataset(
        dest=open_folder(dest),
        parts=parts,
        identify=lambda part: work.identity(part),
        columns={'': columns},
        settings={'command': 'benchmarks.mlperf.data', 'vae_sha256': vae.sha256, 'shard_bytes': shard_bytes},
        described={
            'kind': 'latents',
            'source': {'path': source, 'format': 'MLPerf moments'},
            'resolution': SIDE * vae.downsampling,
            'transform': TRANSFORM,
            'encoder': vae.described(encoders.source, encoders.revision),
        },
    )
    work = MomentsWork(folder, dataset.job, columns, (2 * vae.latent_channels, SIDE, SIDE), shard_bytes)
    with dataset.job.begun():
        return dataset.complete(lambda missing: map_parts(work, missing, processes, 'converting'), share)


@dataclass(frozen=True)
class MomentsWork:
    """A tar becomes a part; picklable."""

    folder: Folder
    job: Job
    columns: Columns
    shape: tuple[int, int, int]
    shard_bytes: int

    def identity(self, part: Part) -> dict[str, Any]:
        """Return what changes when the tar does."""
        return fingerprint(self.folder, part.files)

    def __call__(self, part: Part) -> Tally:
        (name,), identity = part.files, self.identity(part)
        with closing(PartWriter(self.job, part.name, {'': self.columns}, self.shard_bytes)) as writer:
            with readable(f'{self.folder.url}/{name}'), tarfile.open(self.folder.fetch(name, writer.scratch), 'r:') as tar:
                for key, content in samples_of(tar):
                    self._add(writer, f'{part.name}/{key}', content)
                    count_row()
            return writer.commit(identity)

    def _add(self, writer: PartWriter, key: str, content: dict[str, bytes]) -> None:
        captions, not_text = captions_of(content.get('txt'))
        moments = _moments(content['npy']) if 'npy' in content else None
        if not captions:
            writer.drop(key, '', not_text or 'no caption')
        elif moments is None:
            writer.drop(key, '', 'moments cannot be read' if 'npy' in content else 'no moments')
        elif moments.shape not in (self.shape, (1, *self.shape)):
            raise DataError(f'{key}: moments of the shape {moments.shape}, expected {(1, *self.shape)}; these are not the tars of moments of 512 px')
        else:
            with np.errstate(over='ignore'):  # it is looked for below
                half = moments.reshape(self.shape).astype(np.float16)
            if np.isfinite(half).all():
                writer.keep({'key': key, 'caption': captions[0], 'moments': half})
            else:
                writer.drop(key, '', 'moments not finite')


def samples_of(tar: tarfile.TarFile) -> Iterator[tuple[str, dict[str, bytes]]]:
    """(key, content by suffix) of each sample, whose files lie next to each other and share the name up to its first dot."""
    key, content = '', dict[str, bytes]()
    for member in tar:
        stem, _, suffix = PurePosixPath(member.name).name.partition('.')
        if not member.isfile() or not stem:
            continue
        if stem != key and content:
            yield key, content
            content = {}
        key = stem
        if suffix in SUFFIXES:
            file = tar.extractfile(member)
            content[suffix] = file.read() if file else b''
    if content:
        yield key, content


def _moments(content: bytes) -> np.ndarray | None:
    """An array of numbers; None if it is none. What is pickled is not read."""
    try:
        moments = np.load(io.BytesIO(content), allow_pickle=False)
    except (ValueError, EOFError, OSError):
        return None
    return moments if isinstance(moments, np.ndarray) and moments.dtype.kind == 'f' else None
