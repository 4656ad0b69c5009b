"""Encode images, decode them, and score what came back: autoencoders on the same images, next to each other.

OUT/reconstruction.json   figures, latents and everything that they depend on
OUT/reconstruction.html   the page
OUT/reconstruction.png    originals, reconstructions and differences
"""

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from tqdm import tqdm

from diffusion.common.environment import environment
from diffusion.common.files import read_json, write_text
from diffusion.common.text import counted
from diffusion.contracts.errors import EncoderError, InputError
from diffusion.datasets.decode import size_of
from diffusion.datasets.transforms import SQUARE
from diffusion.encoders.frozen import Vae
from diffusion.evaluation.features.lpips import MIN_SIDE_PX
from diffusion.evaluation.features.networks import precise
from diffusion.evaluation.job.images import CHOSEN_BY, RealImages, chosen_ids, open_images, parts_with, read_batches, text_of_left_out
from diffusion.evaluation.job.parts import pixels
from diffusion.evaluation.job.results import INTERVAL_ERRORS, VERSION, AutoencoderRecord, Ranking, Reconstructions, Value, digest_of
from diffusion.evaluation.metrics.distances import mean_of
from diffusion.evaluation.metrics.reconstructions import PAIRS, LatentStatistics, PairMetrics, scale_warnings
from diffusion.recipe.catalog import MIN_IMAGES

RESULT_NAME, PAGE_NAME, SHEET_NAME = 'reconstruction.json', 'reconstruction.html', 'reconstruction.png'
LARGEST_DEFAULT_PX = 256  # side at which published figures of autoencoders are measured
MOST_DEFAULT_SAMPLES = 30_000  # features of 30,000 images take 0.25 GB for each autoencoder
NUM_FIRST, NUM_WORST = 8, 4  # images that are shown


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


def reconstruct(
    vaes: Sequence[str],
    data: str,
    out: Path,
    metrics: Sequence[str],
    device: torch.device,
    resolution: int | None = None,
    samples: int | None = None,
    weights: Path | None = None,
    download: bool = False,
    seed: int = 0,
    batch_size: int = 16,
) -> tuple[Reconstructions, list[Shown]]:
    """Score the autoencoders and write OUT/reconstruction.json.

    Args:
        vaes: folders: an AutoencoderKL, or what holds one in `vae/`.
        data: image MDS or folder of images.
        resolution: side in pixels; None: the short side of the first image, at most 256.
        samples: images; None: all of them, at most 30,000.
        weights, download: of feature networks, as `load_extractors` has them.
        seed: chooses the images, and the resamples of errors.
        batch_size: images that are encoded together.

    Returns:
        The result, and images to be shown: the first ones chosen, then the worst.

    Raises:
        InputError, DataError, EncoderError: wrong input, with the remedy.
    """
    if out.exists() and not (out.is_dir() and ((out / RESULT_NAME).exists() or not any(out.iterdir()))):  # an earlier result is replaced
        raise InputError(f'{out}: holds something else already; name a new or empty folder')
    autoencoders = find_autoencoders(vaes)
    images = open_images(data)
    samples = samples or min(MOST_DEFAULT_SAMPLES, images.parts[-1])
    if samples < MIN_IMAGES:
        raise InputError(f'{counted(samples, "image")} to score: too few, at least {MIN_IMAGES} are needed; raise --samples, or name more images')
    ids = chosen_ids(images, samples, seed)
    resolution = _resolution(resolution, autoencoders, images, ids)
    if resolution < MIN_SIDE_PX:
        raise InputError(f'{resolution} px: too small for {", ".join(metrics)}; the least is {MIN_SIDE_PX} px')
    networks = PairMetrics.load(metrics, weights, device, download, batch_size)
    for one in autoencoders:
        one.vae.to(device)
        _ = one.vae.module
    ranked_by = next((name for name in metrics if name in PAIRS), None)
    real, first, worst, enlarged = dict[str, list[Tensor]](), list[Shown](), list[Shown](), 0
    with tqdm(total=samples, desc='reconstruct', unit='image') as bar:
        for together in read_batches(images, parts_with(images, ids), ids, batch_size):
            enlarged += sum(min(size_of(image.content)) < resolution for image in together)
            originals = torch.stack([pixels(image, resolution, images.where) for image in together]).to(device)
            _append(real, networks.features(originals))
            decoded, scores = [], []
            for one in autoencoders:
                decoded.append(one.reconstruct(originals))
                pairs = networks.of_pairs(decoded[-1], originals)
                _append(one.pairs, pairs)
                _append(one.features, networks.features(decoded[-1]))
                scores += [pairs[ranked_by]] if ranked_by else []
            means = torch.stack(scores).mean(dim=0).tolist() if scores else [None] * len(together)
            for i, (image, score) in enumerate(zip(together, means, strict=True)):
                caption = image.captions[0][0] if image.captions else ''
                shown = Shown(image.key, caption, originals[i].cpu(), [part[i].cpu() for part in decoded], score)
                if image.id in ids[:NUM_FIRST]:
                    first.append(shown)
                elif score is not None:
                    worst.append(shown)
            lower_is_better = ranked_by is not None and PAIRS[ranked_by].lower_is_better
            worst = sorted(worst, key=lambda one: one.score or 0.0, reverse=lower_is_better)[:NUM_WORST]
            bar.update(len(together))
    protocol = {
        'metrics': list(metrics),
        'samples': samples,
        'resolution': resolution,
        'resize': SQUARE,
        'latents': "the posterior's mean",
        'precision': 'fp32',
        'batch': batch_size,
        'seed': seed,
        'extractors': networks.digests,
        'real': {'kind': 'images', 'identity': images.identity, 'count': samples, 'chosen': CHOSEN_BY},
    }
    # A minute each for FID's 2,048 dimensions.
    records = [_record(one, networks, _joined(real), seed, samples) for one in tqdm(autoencoders, desc='figures', unit='autoencoder')]
    result: Reconstructions = {
        'version': VERSION,
        'protocol': protocol,
        'digest': digest_of(protocol),
        'real': {'where': data, 'identity': images.identity, 'count': samples, 'left_out': text_of_left_out(images)},
        'enlarged': enlarged,
        'autoencoders': records,
        'standings': {name: _ranking(name, autoencoders, records) for name in metrics} if len(records) > 1 else {},
        'environment': environment(),
    }
    write_text(out / RESULT_NAME, json.dumps(result, indent=1, ensure_ascii=False) + '\n')
    return result, [*first, *worst]


def _record(one: ScoredAutoencoder, networks: PairMetrics, originals: Mapping[str, Tensor], seed: int, samples: int) -> AutoencoderRecord:
    vae, latents = one.vae, one.latents.record()
    return {
        'name': one.name,
        'where': one.where,
        'sha256': vae.sha256,
        'latent_channels': vae.latent_channels,
        'downsampling': vae.downsampling,
        'num_parameters': sum(parameter.numel() for parameter in vae.module.parameters()),
        'scaling_factor': vae.scaling_factor,
        'shift_factor': vae.shift_factor,
        'metrics': cast(dict[str, Value], networks.figures(_joined(one.pairs), _joined(one.features), originals, seed)),
        'latents': cast(dict[str, Any], latents),
        'warnings': scale_warnings(latents, vae.scaling_factor, vae.shift_factor),
        'images_per_sec': samples / max(one.seconds, 1e-9),
    }


def _ranking(name: str, autoencoders: Sequence[ScoredAutoencoder], records: Sequence[AutoencoderRecord]) -> Ranking:
    """The best autoencoder by a metric, and those that chance may have put behind it."""
    values = [record['metrics'][name] for record in records]
    figures = [value['value'] for value in values]
    best = figures.index((min if values[0]['lower_is_better'] else max)(figures))
    tied = []
    for number in range(len(records)):
        if name in PAIRS:  # of the same images, so that their differences tell
            one, other = (torch.cat(autoencoders[place].pairs[name]).double() for place in (number, best))
            difference = mean_of(one - other)
            gap, error = difference.value, difference.error
        else:
            gap, error = figures[number] - figures[best], math.hypot(values[number]['error'], values[best]['error'])
        if number != best and abs(gap) <= INTERVAL_ERRORS * error:
            tied.append(records[number]['name'])
    return {'best': records[best]['name'], 'tied': tied}


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


def _resolution(asked: int | None, autoencoders: Sequence[ScoredAutoencoder], images: RealImages, ids: Sequence[int]) -> int:
    """The side that was asked for, or that of the first image.

    Raises:
        InputError: an autoencoder cannot halve it as often as it has to.
    """
    factor = math.lcm(*(one.vae.downsampling for one in autoencoders))
    if asked is None:
        (part,) = parts_with(images, ids[:1])
        first = next(iter(images.read(part, ids[:1])))
        return max(factor, min(LARGEST_DEFAULT_PX, *size_of(first.content)) // factor * factor)
    if asked % factor:
        raise InputError(f'--resolution {asked}: has to be a multiple of {factor}, the downsampling of the autoencoders')
    return asked


def _append(lists: dict[str, list[Tensor]], values: Mapping[str, Tensor]) -> None:
    for name, value in values.items():
        lists.setdefault(name, []).append(value)


def _joined(lists: Mapping[str, list[Tensor]]) -> dict[str, Tensor]:
    return {name: torch.cat(values) for name, values in lists.items()}
