"""Encode images, decode them, and score what came back: autoencoders on the same images, next to each other.

OUT/reconstruction.json   figures, latents and everything that they depend on
OUT/reconstruction.html   the page
OUT/reconstruction.png    originals, reconstructions and differences
"""

import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict

import torch
from torch import Tensor
from tqdm import tqdm

from diffusion.common.environment import environment
from diffusion.common.files import read_json, write_text
from diffusion.common.text import counted
from diffusion.contracts.errors import EncoderError, InputError
from diffusion.datasets.decode import size_of
from diffusion.datasets.transforms import SQUARE
from diffusion.encoders.vae import Vae
from diffusion.evaluation.comparing import INTERVAL_ERRORS
from diffusion.evaluation.distances import mean_of
from diffusion.evaluation.features import pixels
from diffusion.evaluation.images import CHOSEN_BY, RealImage, RealImages, chosen_ids, open_images, parts_with, text_of_left_out
from diffusion.evaluation.latent_statistics import LatentRecord, LatentStatistics, scale_warnings
from diffusion.evaluation.network import precise
from diffusion.evaluation.pairs import PAIRS, PairMetrics, refuse_small
from diffusion.evaluation.protocol import digest_of
from diffusion.evaluation.results import RealRecord, Value
from diffusion.recipe.catalog import MIN_IMAGES

RESULT_NAME, PAGE_NAME, SHEET_NAME = 'reconstruction.json', 'reconstruction.html', 'reconstruction.png'
VERSION = 1
LARGEST_DEFAULT_PX = 256  # side at which published figures of autoencoders are measured
MOST_DEFAULT_SAMPLES = 30_000  # features of 30,000 images take 0.25 GB for each autoencoder
NUM_FIRST, NUM_WORST = 8, 4  # images that are shown


@dataclass(frozen=True)
class ReconstructionRequest:
    """What the command line asks for.

    Attributes:
        vaes: folders: an AutoencoderKL, or what holds one in `vae/`.
        data: image MDS or folder of images.
        resolution: side in pixels; None: the short side of the first image, at most 256.
        samples: images; None: all of them, at most 30,000.
        weights, download: of feature networks, as for diffusion.evaluate.
        seed: chooses the images, and the resamples of errors.
        batch: images that are encoded together.
    """

    vaes: tuple[str, ...]
    data: str
    out: Path
    metrics: tuple[str, ...]
    resolution: int | None = None
    samples: int | None = None
    weights: Path | None = None
    download: bool = False
    seed: int = 0
    batch: int = 16


class AutoencoderRecord(TypedDict):
    """An autoencoder and its figures."""

    name: str
    where: str
    sha256: str
    latent_channels: int
    downsampling: int
    """Pixels per latent along a side."""
    num_parameters: int
    scaling_factor: float
    shift_factor: float
    metrics: dict[str, Value]
    """By name as asked for."""
    latents: LatentRecord
    warnings: list[str]
    images_per_sec: float
    """Encoded and decoded, in float32."""


class Standing(TypedDict):
    """Who is best by a metric, and whom chance may have put behind it."""

    best: str
    tied: list[str]
    """By two standard errors: of the mean difference on the same images; of rFID of both values."""


class ReconstructionResult(TypedDict):
    """What reconstruction.json holds."""

    version: int
    protocol: dict[str, Any]
    digest: str
    """Of the protocol: figures with the same one may be compared."""
    real: RealRecord
    enlarged: int
    """Images that were smaller than the resolution: their figures are too good."""
    autoencoders: list[AutoencoderRecord]
    standings: dict[str, Standing]
    """By metric, of several autoencoders; empty of one."""
    environment: dict[str, Any]


@dataclass(frozen=True)
class Shown:
    """An image of the sheet: (3, R, R) uint8 of the original and of what each autoencoder made of it.

    Attributes:
        score: of the first figure of pairs, mean over the autoencoders; None without one.
    """

    key: str
    caption: str
    original: Tensor
    reconstructions: Sequence[Tensor]
    score: float | None = None


@dataclass
class ScoredAutoencoder:
    """One of those that are compared, and what is known of its reconstructions so far."""

    name: str
    where: str
    vae: Vae
    latents: LatentStatistics = field(init=False)
    pairs: dict[str, list[Tensor]] = field(default_factory=dict)
    features: dict[str, list[Tensor]] = field(default_factory=dict)
    seconds: float = 0.0

    def __post_init__(self) -> None:
        self.latents = LatentStatistics(self.vae.latent_channels)

    def reconstruct(self, originals: Tensor) -> Tensor:
        """Return (B, 3, R, R) uint8 from the means of the posteriors of (B, 3, R, R) uint8 images, which are counted in `latents`.

        Raises:
            EncoderError: its latents are not finite.
        """
        vae, start = self.vae, time.monotonic()
        _ = vae.module  # read before inference mode
        with precise():
            moments = vae.encode(originals)
            mean = moments.chunk(2, dim=1)[0]
            decoded = vae.decode((mean - vae.shift_factor) * vae.scaling_factor)
        self.latents.add(moments)  # waits for the device
        if not mean.isfinite().all():
            raise EncoderError(f'{self.where}: its latents are NaN or infinite: damaged weights')
        self.seconds += time.monotonic() - start
        return decoded


def reconstruct(request: ReconstructionRequest, device: torch.device) -> tuple[ReconstructionResult, list[Shown]]:
    """Score the autoencoders and write OUT/reconstruction.json; the page and the sheet are `write_pages`'.

    Returns:
        The result, and images to be shown: the first ones chosen, then the worst.

    Raises:
        InputError, DataError, EncoderError: wrong input, with the remedy.
    """
    refuse_other_content(request.out)
    autoencoders = find_autoencoders(request.vaes)
    images = open_images(request.data)
    samples = request.samples or min(MOST_DEFAULT_SAMPLES, images.parts[-1])
    if samples < MIN_IMAGES:
        raise InputError(f'{counted(samples, "image")} to score: too few, at least {MIN_IMAGES} are needed; raise --samples, or name more images')
    ids = chosen_ids(images, samples, request.seed)
    resolution = _resolution(request, autoencoders, images, ids)
    refuse_small(request.metrics, resolution)
    metrics = PairMetrics.load(request.metrics, request.weights, device, request.download, request.batch)
    for one in autoencoders:
        one.vae.to(device)
        _ = one.vae.module
    scorer = _Scorer(autoencoders, metrics, set(ids[:NUM_FIRST]))
    enlarged = 0
    with tqdm(total=samples, desc='reconstruct', unit='image') as bar:
        for batch in _batches(images, ids, request.batch):
            enlarged += sum(min(size_of(image.content)) < resolution for image in batch)
            scorer.add(batch, torch.stack([pixels(image, resolution, images.where) for image in batch]).to(device))
            bar.update(len(batch))
    protocol = {
        'metrics': list(request.metrics),
        'samples': samples,
        'resolution': resolution,
        'resize': SQUARE,
        'latents': "the posterior's mean",
        'precision': 'fp32',
        'batch': request.batch,
        'seed': request.seed,
        'extractors': metrics.digests,
        'real': {'kind': 'images', 'identity': images.identity, 'count': samples, 'chosen': CHOSEN_BY},
    }
    result: ReconstructionResult = {
        'version': VERSION,
        'protocol': protocol,
        'digest': digest_of(protocol),
        'real': {'where': request.data, 'identity': images.identity, 'count': samples, 'left_out': text_of_left_out(images)},
        'enlarged': enlarged,
        'autoencoders': (records := scorer.records(request.seed, samples)),
        'standings': scorer.standings(records) if len(records) > 1 else {},
        'environment': environment(),
    }
    write_text(request.out / RESULT_NAME, json.dumps(result, indent=1, ensure_ascii=False) + '\n')
    return result, scorer.shown


class _Scorer:
    """Figures of one batch after the other.

    Args:
        wanted: ids of images to show in any case.
    """

    def __init__(self, autoencoders: Sequence[ScoredAutoencoder], metrics: PairMetrics, wanted: set[int]):
        self._autoencoders, self._metrics, self._wanted = autoencoders, metrics, wanted
        self._originals: dict[str, list[Tensor]] = {}
        self._first: list[Shown] = []
        self._worst: list[Shown] = []
        self._ranked_by = next((name for name in metrics.names if name in PAIRS), None)

    def add(self, batch: Sequence[RealImage], originals: Tensor) -> None:
        """Reconstruct and score (B, 3, R, R) uint8 images."""
        _append(self._originals, self._metrics.features(originals))
        reconstructed, scores = [], []
        for one in self._autoencoders:
            images = one.reconstruct(originals)
            pairs = self._metrics.of_pairs(images, originals)
            _append(one.pairs, pairs)
            _append(one.features, self._metrics.features(images))
            reconstructed.append(images)
            scores += [pairs[self._ranked_by]] if self._ranked_by else []
        means = torch.stack(scores).mean(dim=0).tolist() if scores else [None] * len(batch)
        for i, (image, score) in enumerate(zip(batch, means, strict=True)):
            caption = image.captions[0][0] if image.captions else ''
            shown = Shown(image.key, caption, originals[i].cpu(), [images[i].cpu() for images in reconstructed], score)
            if image.id in self._wanted:
                self._first.append(shown)
            elif score is not None:
                self._worst.append(shown)
        lower_is_better = self._ranked_by is not None and PAIRS[self._ranked_by].lower_is_better
        self._worst = sorted(self._worst, key=lambda one: one.score or 0.0, reverse=lower_is_better)[:NUM_WORST]

    @property
    def shown(self) -> list[Shown]:
        return [*self._first, *self._worst]

    def records(self, seed: int, samples: int) -> list[AutoencoderRecord]:
        """Compute the figures."""
        originals = _joined(self._originals)
        found: list[AutoencoderRecord] = []
        for one in tqdm(self._autoencoders, desc='figures', unit='autoencoder'):  # a minute each for FID's 2,048 dimensions
            latents = one.latents.record()
            vae = one.vae
            found.append(
                {
                    'name': one.name,
                    'where': one.where,
                    'sha256': vae.sha256,
                    'latent_channels': vae.latent_channels,
                    'downsampling': vae.downsampling,
                    'num_parameters': sum(parameter.numel() for parameter in vae.module.parameters()),
                    'scaling_factor': vae.scaling_factor,
                    'shift_factor': vae.shift_factor,
                    'metrics': self._metrics.figures(_joined(one.pairs), _joined(one.features), originals, seed),
                    'latents': latents,
                    'warnings': scale_warnings(latents, vae.scaling_factor, vae.shift_factor),
                    'images_per_sec': samples / max(one.seconds, 1e-9),
                }
            )
        return found

    def standings(self, records: Sequence[AutoencoderRecord]) -> dict[str, Standing]:
        """Find the best autoencoder by each metric."""
        found: dict[str, Standing] = {}
        for name in self._metrics.names:
            values = [record['metrics'][name] for record in records]
            figures = [value['value'] for value in values]
            best = figures.index((min if values[0]['lower_is_better'] else max)(figures))
            tied = [record['name'] for number, record in enumerate(records) if number != best and self._may_be_chance(name, number, best, values)]
            found[name] = {'best': records[best]['name'], 'tied': tied}
        return found

    def _may_be_chance(self, name: str, number: int, best: int, values: Sequence[Value]) -> bool:
        if name not in PAIRS:
            return abs(values[number]['value'] - values[best]['value']) <= INTERVAL_ERRORS * math.hypot(
                values[number]['error'], values[best]['error']
            )
        one, other = (torch.cat(self._autoencoders[place].pairs[name]).double() for place in (number, best))
        difference = mean_of(one - other)
        return abs(difference.value) <= INTERVAL_ERRORS * difference.error


def find_autoencoders(folders: Sequence[str]) -> list[ScoredAutoencoder]:
    """Find autoencoders in local folders: AutoencoderKL itself, or in `vae/` of encoders or of a whole model. Weights are read later.

    Raises:
        InputError: no such folder.
        EncoderError: it holds none, or one of another class.
    """
    found = [Vae.find(folder, None, _subfolder(Path(folder))) for folder in folders]
    names = [Path(folder).resolve().name for folder in folders]
    named = [Path(folder).resolve().parent.name if name == 'vae' else name for folder, name in zip(folders, names, strict=True)]
    if len(set(named)) < len(named):
        named = [f'{number}: {folder}' for number, folder in enumerate(folders, 1)]
    return [ScoredAutoencoder(name, folder, vae) for name, folder, vae in zip(named, folders, found, strict=True)]


def refuse_other_content(out: Path) -> None:
    """Raises InputError: OUT holds something else than an earlier result, which is replaced."""
    if out.exists() and not (out.is_dir() and ((out / RESULT_NAME).exists() or not any(out.iterdir()))):
        raise InputError(f'{out}: holds something else already; name a new or empty folder')


def _subfolder(folder: Path) -> str:
    if not folder.is_dir():
        raise InputError(f'{folder}: no such folder; name a local folder in the diffusers layout: an AutoencoderKL, or what holds one in vae/')
    config = next((path for path in (folder / 'vae/config.json', folder / 'config.json') if path.is_file()), None)
    if config is None:
        remedy = f'; did you mean {folder / "export"}?' if (folder / 'export/vae').is_dir() else ''
        raise EncoderError(f'{folder}: holds no autoencoder: no vae/config.json and no config.json of an AutoencoderKL{remedy}')
    kind = read_json(config, dict[str, Any], EncoderError, 'download or export the folder again').get('_class_name')
    if kind != 'AutoencoderKL':
        raise EncoderError(f'{config}: is of {kind or "no known class"}; only AutoencoderKL is scored')
    return config.parent.name if config.parent != folder else ''


def _resolution(request: ReconstructionRequest, autoencoders: Sequence[ScoredAutoencoder], images: RealImages, ids: Sequence[int]) -> int:
    """The side that was asked for, or that of the first image.

    Raises:
        InputError: an autoencoder cannot halve it as often as it has to.
    """
    factor = math.lcm(*(one.vae.downsampling for one in autoencoders))
    if request.resolution is None:
        (part,) = parts_with(images, ids[:1])
        first = next(iter(images.read(part, ids[:1])))
        return max(factor, min(LARGEST_DEFAULT_PX, *size_of(first.content)) // factor * factor)
    if request.resolution % factor:
        raise InputError(f'--resolution {request.resolution}: has to be a multiple of {factor}, the downsampling of the autoencoders')
    return request.resolution


def _batches(images: RealImages, ids: Sequence[int], size: int) -> Iterator[list[RealImage]]:
    """The chosen images in the order of the dataset."""
    wanted, batch = frozenset(ids), list[RealImage]()
    for part in parts_with(images, wanted):
        for image in images.read(part, wanted):
            batch.append(image)
            if len(batch) == size:
                yield batch
                batch = []
    if batch:
        yield batch


def _append(lists: dict[str, list[Tensor]], values: Mapping[str, Tensor]) -> None:
    for name, value in values.items():
        lists.setdefault(name, []).append(value)


def _joined(lists: Mapping[str, list[Tensor]]) -> dict[str, Tensor]:
    return {name: torch.cat(values) for name, values in lists.items()}
