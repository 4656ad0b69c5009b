"""Mean and covariance of real features in a file, in place of the images themselves: enough for FID, for nothing else."""

import json
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from diffusion.checkpoints.manifest import sha256_of
from diffusion.common.files import replacing
from diffusion.common.text import brief, counted, first_line
from diffusion.contracts.errors import DataError, InputError
from diffusion.evaluation.distances import Gaussian, gaussian
from diffusion.evaluation.extractors import Extractor

SUFFIXES_OF_STATISTICS = ('.npz', '.safetensors')
PUBLISHED = 'inception'  # feature of published statistics: pytorch-fid's mu and sigma


@dataclass(frozen=True)
class Statistics:
    """What a file says of real images.

    Attributes:
        where: the file.
        identity: its SHA-256.
        gaussians: by feature.
        facts: of the evaluation that saved it; empty for a published file, which does not say.
    """

    where: str
    identity: str
    gaussians: Mapping[str, Gaussian]
    facts: Mapping[str, Any]

    @property
    def count(self) -> int:
        """Images; 0 if the file does not say."""
        return max(one.count for one in self.gaussians.values())

    def refuse_other(self, resolution: int, extractors: Sequence[Extractor]) -> None:
        """Raises InputError: they are of images of another resolution, or of networks with other weights or features."""
        if self.facts.get('resolution', resolution) != resolution:
            raise InputError(f'{self.where}: is of images of {self.facts["resolution"]} px; set --resolution {self.facts["resolution"]}')
        for extractor in extractors:
            saved = self.facts.get('extractors', {}).get(extractor.name, extractor.sha256)
            if saved != extractor.sha256:
                differing = f'{brief(saved)}, here {brief(extractor.sha256)}'
                raise InputError(f'{self.where}: was made with other weights of {extractor.name} ({differing}); take the same, or the images')
            for feature, dimension in extractor.features.items():
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
    """A file that --save-statistics wrote, or an npz with `mu` and `sigma` (and `n`, if it says how many images).

    Raises:
        DataError: it is something else, or holds pickled objects.
    """
    published = path.suffix == '.npz'
    if not path.is_file():
        raise DataError(f'{path}: no such file')
    try:
        gaussians, facts = (_read_published if published else _read_own)(path)
    except Exception as error:  # numpy's, zip's, safetensors'
        wanted = 'it has to hold mu (D) and sigma (D, D) as plain arrays' if published else '--save-statistics writes it'
        reason = str(error) if isinstance(error, DataError) else 'is damaged, or holds something else' if published else first_line(error)
        raise DataError(f'{path}: cannot be read as statistics: {reason}; {wanted}') from error
    return Statistics(str(path), sha256_of(path), gaussians, facts)


def _read_published(path: Path) -> tuple[dict[str, Gaussian], dict[str, Any]]:
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
    return {PUBLISHED: Gaussian(mean, covariance, count)}, {}


def _read_own(path: Path) -> tuple[dict[str, Gaussian], dict[str, Any]]:
    with safe_open(path, 'pt') as file:
        facts = json.loads(file.metadata()['facts'])
        found = {
            name: Gaussian(file.get_tensor(f'{name}/mean'), file.get_tensor(f'{name}/covariance'), count) for name, count in facts['counts'].items()
        }
    return found, facts
