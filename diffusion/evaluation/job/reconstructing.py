"""Encode images, decode them, and score what came back: autoencoders on the same images, next to each other.

OUT/reconstruction.json   figures, latents and everything that they depend on
OUT/reconstruction.png    originals, reconstructions and differences
OUT/samples/              the same images one by one, for the page
"""

import json
import math
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from PIL import Image, ImageChops, ImageDraw, ImageFont
from torch import Tensor
from tqdm import tqdm

from diffusion.common.environment import environment
from diffusion.common.files import read_json, replacing, write_text
from diffusion.common.images import save_png, to_pil
from diffusion.common.text import counted
from diffusion.contracts.errors import EncoderError, InputError
from diffusion.datasets.decode import size_of
from diffusion.datasets.transforms import SQUARE
from diffusion.encoders.frozen import Vae
from diffusion.evaluation.features.lpips import MIN_SIDE_PX
from diffusion.evaluation.features.networks import precise
from diffusion.evaluation.job.images import CHOSEN_BY, RealImage, RealImages, open_images
from diffusion.evaluation.job.request import ReconstructionRequest
from diffusion.evaluation.job.results import (
    INTERVAL_ERRORS,
    RECONSTRUCTION_NAME,
    SHEET_NAME,
    VERSION,
    AutoencoderRecord,
    LatentRecord,
    Ranking,
    ReconstructionProtocol,
    Reconstructions,
    SampleRecord,
    digest_of,
)
from diffusion.evaluation.metrics.distances import mean_of
from diffusion.evaluation.metrics.reconstructions import PAIRS, LatentStatistics, PairMetrics, scale_warnings
from diffusion.recipe.catalog import MIN_IMAGES

LARGEST_DEFAULT_PX = 256  # side at which published figures of autoencoders are measured
MOST_DEFAULT_SAMPLES = 30_000  # features of 30,000 images take 0.25 GB for each autoencoder
NUM_FIRST, NUM_WORST = 8, 4  # images that are shown
GAIN = 4  # of differences, as they are shown: a level of 64 is white
CELL_PX = 128  # to which smaller images are enlarged on the sheet, by a whole factor
LABEL_PX, GAP_PX = 18, 2


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

    def record(self, figures: dict[str, Any], num_images: int, samples: list[SampleRecord]) -> AutoencoderRecord:
        vae, latents = self.vae, cast(LatentRecord, self.latents.record())
        return {
            'name': self.name,
            'where': self.where,
            'sha256': vae.sha256,
            'latent_channels': vae.latent_channels,
            'downsampling': vae.downsampling,
            'num_parameters': sum(parameter.numel() for parameter in vae.module.parameters()),
            'scaling_factor': vae.scaling_factor,
            'shift_factor': vae.shift_factor,
            'metrics': figures,
            'latents': latents,
            'warnings': scale_warnings(latents, vae.scaling_factor, vae.shift_factor),
            'images_per_sec': num_images / max(self.seconds, 1e-9),
            'samples': samples,
        }


@dataclass(frozen=True)
class Triplet:
    """An image that is shown, (3, R, R) uint8, and what each autoencoder made of it; `score`: see SampleRecord."""

    image: RealImage
    original: Tensor
    made: Sequence[Tensor]
    score: float | None


def reconstruct(request: ReconstructionRequest, device: torch.device) -> Reconstructions:
    """Score the autoencoders and write everything but the page.

    Raises:
        InputError, DataError, EncoderError: wrong input, with the remedy.
    """
    out, metrics, seed = request.out, request.metrics, request.seed
    if out.exists() and not (out.is_dir() and ((out / RECONSTRUCTION_NAME).exists() or not any(out.iterdir()))):  # an earlier result is replaced
        raise InputError(f'{out}: holds something else already; name a new or empty folder')
    autoencoders = find_autoencoders(request.vaes)
    images = open_images(request.data)
    samples = request.samples or min(MOST_DEFAULT_SAMPLES, len(images))
    if samples < MIN_IMAGES:
        raise InputError(f'{counted(samples, "image")} to score: too few, at least {MIN_IMAGES} are needed; raise --samples, or name more images')
    ids = images.chosen(samples, seed)
    factor = math.lcm(*(one.vae.downsampling for one in autoencoders))
    resolution = request.resolution
    if resolution is None:
        resolution = max(factor, min(LARGEST_DEFAULT_PX, *size_of(images.image(ids[0]).content)) // factor * factor)
    if resolution % factor:
        raise InputError(f'--resolution {resolution}: has to be a multiple of {factor}, the downsampling of the autoencoders')
    if resolution < MIN_SIDE_PX:
        raise InputError(f'{resolution} px: too small for {", ".join(metrics)}; the least is {MIN_SIDE_PX} px')
    networks = PairMetrics.load(metrics, request.weights, device, request.download, request.batch_size)
    for one in autoencoders:
        one.vae.to(device)
        _ = one.vae.module
    real, shown, enlarged = _reconstruct_all(autoencoders, networks, images, ids, resolution, device)
    protocol: ReconstructionProtocol = {
        'metrics': list(metrics),
        'samples': samples,
        'resolution': resolution,
        'resize': SQUARE,
        'latents': "the posterior's mean",
        'precision': 'fp32',
        'batch': request.batch_size,
        'seed': seed,
        'extractors': networks.digests,
        'real': {'kind': 'images', 'identity': images.identity, 'count': samples, 'chosen': CHOSEN_BY},
    }
    shutil.rmtree(out / 'samples', ignore_errors=True)  # an earlier result's
    shown_records, originals = _save_samples(out, shown, len(autoencoders)), _joined(real)
    records = [
        one.record(networks.figures(_joined(one.pairs), _joined(one.features), originals, seed), samples, shown_records[number])
        for number, one in enumerate(tqdm(autoencoders, desc='figures', unit='autoencoder'))  # a minute each for FID's 2,048 dimensions
    ]
    result: Reconstructions = {
        'version': VERSION,
        'protocol': cast(dict[str, Any], protocol),
        'digest': digest_of(protocol),
        'real': {'where': request.data, 'identity': images.identity, 'count': samples, 'left_out': images.text_of_left_out},
        'enlarged': enlarged,
        'autoencoders': records,
        'standings': {name: _ranking(name, autoencoders, records) for name in metrics} if len(records) > 1 else {},
        'environment': environment(),
    }
    with replacing(out / SHEET_NAME) as temporary:
        texts = {'protocol': result['digest'], 'images': ', '.join(one.image.key for one in shown)}
        save_png(sheet(shown, [one.name for one in autoencoders]), temporary, texts)
    write_text(out / RECONSTRUCTION_NAME, json.dumps(result, indent=1, ensure_ascii=False) + '\n')
    return result


def _reconstruct_all(
    autoencoders: Sequence[ScoredAutoencoder], networks: PairMetrics, images: RealImages, ids: Sequence[int], resolution: int, device: torch.device
) -> tuple[dict[str, list[Tensor]], list[Triplet], int]:
    """Return features of the originals, images to be shown (the first ones chosen, then the worst), and how many were enlarged."""
    ranked_by = next((name for name in networks.names if name in PAIRS), None)
    real, first, worst, enlarged = dict[str, list[Tensor]](), list[Triplet](), list[Triplet](), 0
    with tqdm(total=len(ids), desc='reconstruct', unit='image') as bar:
        for together in images.batches(images.parts_with(ids), ids, networks.batch):
            enlarged += sum(min(size_of(image.content)) < resolution for image in together)
            originals = torch.stack([images.pixels(image, resolution) for image in together]).to(device)
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
                triplet = Triplet(image, originals[i].cpu(), [part[i].cpu() for part in decoded], score)
                if image.id in ids[:NUM_FIRST]:
                    first.append(triplet)
                elif score is not None:
                    worst.append(triplet)
            lower_is_better = ranked_by is not None and PAIRS[ranked_by].lower_is_better
            worst = sorted(worst, key=lambda one: one.score or 0.0, reverse=lower_is_better)[:NUM_WORST]
            bar.update(len(together))
    return real, [*first, *worst], enlarged


def _append(lists: dict[str, list[Tensor]], values: Mapping[str, Tensor]) -> None:
    for name, value in values.items():
        lists.setdefault(name, []).append(value)


def _joined(lists: Mapping[str, list[Tensor]]) -> dict[str, Tensor]:
    return {name: torch.cat(values) for name, values in lists.items()}


def _save_samples(out: Path, shown: Sequence[Triplet], count: int) -> list[list[SampleRecord]]:
    """Write what is shown of `count` autoencoders as PNG below OUT; return the records of each of them."""
    records: list[list[SampleRecord]] = [[] for _ in range(count)]
    for one in shown:
        captions = one.image.captions
        names = [f'samples/{one.image.id:06d}-{name}.png' for name in ('original', *range(1, count + 1))]
        for name, image in zip(names, (one.original, *one.made), strict=True):
            with replacing(out / name) as temporary:
                save_png(to_pil(image), temporary, {'key': one.image.key})
        for number, name in enumerate(names[1:]):
            record: SampleRecord = {'file': name, 'id': one.image.id, 'prompt': captions[0][0] if captions else one.image.key, 'original': names[0]}
            records[number].append(record if one.score is None else {**record, 'score': one.score})
    return records


def sheet(shown: Sequence[Triplet], names: Sequence[str]) -> Image.Image:
    """Return rows with a label above each: the originals, and of each autoencoder its reconstructions and absolute differences times GAIN."""
    originals = [to_pil(one.original) for one in shown]
    rows = [('originals', originals)]
    for number, name in enumerate(names):
        made = [to_pil(one.made[number]) for one in shown]
        rows += [(name, made), (f'{name}: {GAIN} x absolute difference', [difference(*pair) for pair in zip(made, originals, strict=True)])]
    side = originals[0].width * max(1, CELL_PX // originals[0].width)
    canvas = Image.new('RGB', (len(shown) * (side + GAP_PX) - GAP_PX, len(rows) * (LABEL_PX + side + GAP_PX)), 'white')
    pen, font = ImageDraw.Draw(canvas), ImageFont.load_default(size=12)
    for place, (label, images) in enumerate(rows):
        top = place * (LABEL_PX + side + GAP_PX)
        pen.text((2, top + 2), label, fill='black', font=font)
        for column, image in enumerate(images):
            canvas.paste(image.resize((side, side), Image.Resampling.NEAREST), (column * (side + GAP_PX), top + LABEL_PX))
    return canvas


def difference(made: Image.Image, original: Image.Image) -> Image.Image:
    """Return GAIN x |reconstruction - original|, cut off at white."""
    return ImageChops.difference(made, original).point(lambda level: min(255, GAIN * level))


def _ranking(name: str, autoencoders: Sequence[ScoredAutoencoder], records: Sequence[AutoencoderRecord]) -> Ranking:
    """The best autoencoder by a metric, and those that chance may have put behind it."""
    values = [record['metrics'][name] for record in records]
    figures = [value['value'] for value in values]
    best = figures.index((min if values[0]['lower_is_better'] else max)(figures))
    tied = []
    for number in range(len(records)):
        if name in PAIRS:  # of the same images, so that their differences tell
            one, other = (torch.cat(autoencoders[place].pairs[name]).double() for place in (number, best))
            mean = mean_of(one - other)
            gap, error = mean.value, mean.error
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
    paths = [Path(folder).resolve() for folder in folders]
    names = [path.parent.name if path.name == 'vae' else path.name for path in paths]
    if len(set(names)) < len(names):
        names = [f'{number}: {folder}' for number, folder in enumerate(folders, 1)]
    return [ScoredAutoencoder(name, folder, vae) for name, folder, vae in zip(names, folders, found, strict=True)]


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
