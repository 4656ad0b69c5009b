"""Parts of an evaluation on the disk, each written whole: features, statistics of real features in their place, and drawn images that are kept.

A network computes features of fixed batches, the last one padded, so that they are the same whoever computes them.
"""

import hashlib
import io
import json
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from diffusion import __version__
from diffusion.checkpoints.manifest import sha256_of
from diffusion.common.files import parse_json, replacing, replacing_folder, write_text
from diffusion.common.images import to_pil
from diffusion.common.text import brief, counted, first_line
from diffusion.contracts.errors import DataError, InputError
from diffusion.contracts.manifest import INDEX_NAME, MANIFEST_NAME, Manifest
from diffusion.datasets.shards import HASH
from diffusion.datasets.transforms import SQUARE
from diffusion.evaluation.features.networks import FeatureNetwork, in_batches
from diffusion.evaluation.job.images import Prompt, RealImages
from diffusion.evaluation.metrics.distances import Gaussian, gaussian

SAMPLE_ID = 'id'  # in parts of real images: the ids of the rows
SUFFIXES_OF_STATISTICS = ('.npz', '.safetensors')
PUBLISHED = 'inception'  # feature of published statistics: pytorch-fid's mu and sigma
COLUMNS = {  # of images that are kept: encoding and meaning
    'key': ('str', 'id of the prompt'),
    'url': ('str', 'empty: the image was drawn'),
    'caption': ('str', 'the prompt'),
    'image': ('bytes', 'PNG'),
    'width': ('int32', 'pixels'),
    'height': ('int32', 'pixels'),
}


@dataclass(frozen=True)
class FeatureParts:
    """Files of a folder with the same features in each, numbered in the order of the rows."""

    folder: Path
    numbers: Sequence[int]

    def path(self, number: int) -> Path:
        return self.folder / f'{number:05d}.safetensors'

    def missing(self) -> list[int]:
        """Numbers of the parts that are not there yet."""
        return [number for number in self.numbers if not self.path(number).exists()]

    def put(self, number: int, features: Mapping[str, Tensor], facts: Mapping[str, Any] | None = None) -> None:
        """Write a part. Two processes that write the same one write the same bytes, except for the facts."""
        with replacing(self.path(number)) as temporary:
            save_file({name: value.contiguous() for name, value in features.items()}, temporary, {'facts': json.dumps(facts or {})})

    def load(self, name: str) -> Tensor:
        """(N, D) of all parts; no other feature is read. DataError if a part is damaged."""
        shapes = []
        for number in self.numbers:
            try:
                with safe_open(self.path(number), 'pt') as file:
                    shapes.append(file.get_slice(name).get_shape())
            except Exception as error:  # of safetensors
                raise DataError(f'{self.path(number)}: cannot be read: {error}; remove it and run the same command again') from error
        whole, start = torch.empty(0), 0
        for number, (count, *rest) in zip(self.numbers, shapes, strict=True):
            with safe_open(self.path(number), 'pt') as file:
                part = file.get_tensor(name)
            if not start:
                whole = torch.empty(sum(shape[0] for shape in shapes), *rest, dtype=part.dtype)
            whole[start : start + count] = part
            start += count
        return whole

    def facts(self) -> list[dict[str, Any]]:
        """Return the facts that were noted with each part."""
        found = list[dict[str, Any]]()
        for number in self.numbers:
            with safe_open(self.path(number), 'pt') as file:
                found.append(json.loads(file.metadata()['facts']))
        return found


class RealFeatures:
    """Features of chosen real images, in a cache that evaluations of the same images share: a folder for each network.

    Args:
        images: the dataset.
        ids: the chosen ones; rows are in the order of the dataset.
        resolution: side in pixels, to which images are resized and cropped as training does.
        batch: images that a network gets at once.
        cache: folder of the cache.
    """

    def __init__(self, images: RealImages, ids: Sequence[int], resolution: int, batch: int, cache: Path):
        self.images, self.wanted, self.resolution, self.batch, self.cache = images, frozenset(ids), resolution, batch, cache
        self.parts = images.parts_with(self.wanted)

    def parts_of(self, network: FeatureNetwork) -> FeatureParts:
        """The parts of one network's features, which need not be there yet."""
        digest = hashlib.sha256(json.dumps(self._facts(network)).encode()).hexdigest()[:16]
        return FeatureParts(self.cache / digest, self.parts)

    def load(self, network: FeatureNetwork, feature: str | None = None) -> Tensor:
        """(N, D) of a feature, by default the network's first."""
        return self.parts_of(network).load(feature or next(iter(network.features)))

    def missing(self, networks: Iterable[FeatureNetwork]) -> list[int]:
        """Parts of the dataset of which some network's features are not there."""
        return sorted({part for network in networks for part in self.parts_of(network).missing()})

    def compute(self, networks: Sequence[FeatureNetwork], part: int) -> None:
        """Compute those features of one part of the dataset that are not in the cache."""
        lacking = [network for network in networks if part in self.parts_of(network).missing()]
        if not lacking:
            return
        found: dict[str, list[dict[str, Tensor]]] = {network.name: [] for network in lacking}
        ids: list[int] = []
        for together in self.images.batches([part], self.wanted, self.batch):
            images = torch.stack([self.images.pixels(image, self.resolution) for image in together])
            ids += [image.id for image in together]
            for network in lacking:
                found[network.name].append(in_batches(network, images, self.batch))
        for network in lacking:
            features = {name: torch.cat([one[name] for one in found[network.name]]) for name in network.features}
            parts = self.parts_of(network)
            description = parts.folder / 'features.json'  # says to people what a folder of the cache is
            if not description.exists():
                write_text(description, json.dumps({'where': self.images.where, **self._facts(network)}, indent=1) + '\n')
            parts.put(part, {**features, SAMPLE_ID: torch.tensor(ids)})

    def _facts(self, network: FeatureNetwork) -> dict[str, Any]:
        return {
            'images': self.images.identity,
            'chosen': hashlib.sha256(json.dumps(sorted(self.wanted)).encode()).hexdigest(),
            'count': len(self.wanted),
            'extractor': network.name,
            'sha256': network.sha256,
            'resolution': self.resolution,
            'resize': SQUARE,
            'batch': self.batch,
        }


@dataclass(frozen=True)
class Statistics:
    """Statistics of real images, from a file."""

    where: Path
    gaussians: Mapping[str, Gaussian]  # by feature
    facts: Mapping[str, Any]  # of the evaluation that saved it; empty for a published file, which does not say

    @property
    def identity(self) -> dict[str, Any]:
        """Its description in a protocol; the count of images is 0 if the file does not say."""
        return {'kind': 'statistics', 'identity': sha256_of(self.where), 'count': max(one.count for one in self.gaussians.values())}

    def refuse_other(self, resolution: int, networks: Sequence[FeatureNetwork]) -> None:
        """Raises InputError: they are of images of another resolution, or of networks with other weights or features."""
        if self.facts.get('resolution', resolution) != resolution:
            raise InputError(f'{self.where}: is of images of {self.facts["resolution"]} px; set --resolution {self.facts["resolution"]}')
        for network in networks:
            saved = self.facts.get('extractors', {}).get(network.name, network.sha256)
            if saved != network.sha256:
                differing = f'{brief(saved)}, here {brief(network.sha256)}'
                raise InputError(f'{self.where}: was made with other weights of {network.name} ({differing}); take the same, or the images')
            for feature, dimension in network.features.items():
                if feature in self.gaussians and len(self.gaussians[feature].mean) != dimension:
                    held = f'{counted(len(self.gaussians[feature].mean), "number")} a mean, and {feature} has {dimension:,}'
                    raise InputError(f'{self.where}: holds {held}; name the statistics of that network, or the images')


def save_statistics(path: Path, features: Mapping[str, Callable[[], Tensor]], facts: Mapping[str, Any]) -> None:
    """Write a safetensors file with float64 statistics of features by name, each of which is loaded (N, D) when its turn comes."""
    tensors, counts = {}, {}
    for name, load in features.items():
        found = gaussian(load())
        tensors[f'{name}/mean'], tensors[f'{name}/covariance'], counts[name] = found.mean, found.covariance, found.count
    with replacing(path) as temporary:
        save_file(tensors, temporary, {'facts': json.dumps({**facts, 'counts': counts})})


def read_statistics(path: Path) -> Statistics:
    """Read a file that --save-statistics wrote, or an npz with `mu` and `sigma` (and `n`, if it says how many images).

    Raises:
        DataError: it is something else, or holds pickled objects.
    """
    if not path.is_file():
        raise DataError(f'{path}: no such file')
    published = path.suffix == '.npz'
    try:
        if published:
            return Statistics(path, _read_published(path), {})
        with safe_open(path, 'pt') as file:
            facts = json.loads(file.metadata()['facts'])
            gaussians = {
                name: Gaussian(file.get_tensor(f'{name}/mean'), file.get_tensor(f'{name}/covariance'), count)
                for name, count in facts['counts'].items()
            }
        return Statistics(path, gaussians, facts)
    except Exception as error:  # numpy's, zip's, safetensors'
        wanted = 'it has to hold mu (D) and sigma (D, D) as plain arrays' if published else '--save-statistics writes it'
        reason = str(error) if isinstance(error, DataError) else 'is damaged, or holds something else' if published else first_line(error)
        raise DataError(f'{path}: cannot be read as statistics: {reason}; {wanted}') from error


def _read_published(path: Path) -> dict[str, Gaussian]:
    with zipfile.ZipFile(path) as archive:  # np.load takes other files for pickles
        lacking = [name for name in ('mu', 'sigma') if f'{name}.npy' not in archive.namelist()]
    if lacking:
        raise DataError(f'it has no {" and no ".join(lacking)}')
    with np.load(path, allow_pickle=False) as file:
        mean, covariance = (torch.from_numpy(np.asarray(file[name], np.float64)) for name in ('mu', 'sigma'))
        count = int(file['n']) if 'n' in file.files else 0
    if mean.ndim != 1 or covariance.shape != (len(mean), len(mean)):
        raise DataError(f'mu has the shape {tuple(mean.shape)}, sigma {tuple(covariance.shape)}')
    if not (mean.isfinite().all() and covariance.isfinite().all()):
        raise DataError('mu or sigma holds numbers that are not finite')
    return {PUBLISHED: Gaussian(mean, covariance, count)}


def keep_chunk(folder: Path, number: int, chunk: Sequence[Prompt], images: Tensor) -> dict[str, Any]:
    """Write the images (B, 3, H, W) uint8 of a chunk as one shard; returns its entry in index.json."""
    from streaming import MDSWriter  # takes a second, and most evaluations keep no images

    place = folder / f'{number:05d}'
    place.parent.mkdir(parents=True, exist_ok=True)
    height, width = images.shape[2:]
    with replacing_folder(place) as temporary, tempfile.TemporaryDirectory(dir=folder, prefix='.write-') as scratch:
        out = Path(scratch, 'shard')
        encodings = {name: encoding for name, (encoding, _) in COLUMNS.items()}
        with MDSWriter(out=str(out), columns=encodings, hashes=[HASH], size_limit=None, progress_bar=False) as writer:
            for prompt, image in zip(chunk, images, strict=True):
                png = io.BytesIO()
                to_pil(image).save(png, 'png')
                writer.write({'key': str(prompt.id), 'url': '', 'caption': prompt.text, 'image': png.getvalue(), 'width': width, 'height': height})
        (entry,) = parse_json((out / INDEX_NAME).read_text())['shards']
        (out / entry['raw_data']['basename']).rename(temporary / entry['raw_data']['basename'])
    entry['raw_data']['basename'] = f'{place.name}/{entry["raw_data"]["basename"]}'
    return entry


def finish_kept(folder: Path, entries: Sequence[dict[str, Any]], source: dict[str, Any], side_px: int) -> None:
    """Write index and manifest, the manifest last: what data_prep takes for complete."""
    count = sum(entry['samples'] for entry in entries)
    manifest = Manifest(
        kind='images',
        columns={name: {'encoding': encoding, 'meaning': meaning} for name, (encoding, meaning) in COLUMNS.items()},
        num_samples=count,
        attempted=count,
        dropped={},
        source=source,
        hashes=[HASH],
        code_version=__version__,
        min_side_px=side_px,
    )
    write_text(folder / INDEX_NAME, json.dumps({'version': 2, 'shards': list(entries)}))
    write_text(folder / MANIFEST_NAME, manifest.to_json())
