"""What an evaluation was asked for becomes what it will do: model, images, prompts, feature networks and the protocol."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from diffusion.common.text import counted
from diffusion.contracts.errors import InputError
from diffusion.datasets.transforms import SQUARE
from diffusion.evaluation.drawing import draw_chunk
from diffusion.evaluation.extractors import EMBEDDING, Extractor, TextExtractor, load_extractors
from diffusion.evaluation.features import RealFeatures
from diffusion.evaluation.images import CAPTION_CHOICE, CHOSEN_BY, RealImages, chosen_ids, open_images
from diffusion.evaluation.job import DrawingJob, refuse_foreign
from diffusion.evaluation.metrics import METRICS, Metric, find_metric
from diffusion.evaluation.models import find_model, refuse_absent
from diffusion.evaluation.prompts import Prompt, captions_as_prompts, prompts_sha256, read_prompts_file
from diffusion.evaluation.protocol import DEFAULT_CHUNK, PRESETS, Protocol
from diffusion.evaluation.statistics import SUFFIXES_OF_STATISTICS, Statistics, read_statistics
from diffusion.families.pipeline import precision_on
from diffusion.recipe.catalog import MIN_IMAGES

DEFAULT_SAMPLES = 30_000
DEFAULT_METRICS = ('fid', 'kid', 'cmmd', 'clip')
DEFAULT_GUIDANCE = (1.5, 3.0, 5.0, 7.5)
DEFAULT_STEPS = 50
FALLBACK = 'random-conv'  # finds neighbours where no metric's network can; needs no weights
MAX_KNOWN = 1_000_000  # training images that are compared with: their features take 3 GB on the disk
CACHE = '.real_features'  # folder next to OUT: evaluations of other models find it there, and `evaluations/*` does not name it


@dataclass(frozen=True)
class Request:
    """What the command line asks for; None leaves it to the preset, the model or the defaults above.

    Attributes:
        model: exported folder or adapter, run folder, checkpoint, or a Hub id (with `revision`).
        data: image MDS, folder of images, or file of statistics.
        base: where the model that an adapter belongs to is now, if it has moved.
        prompts: a file, in place of the dataset's captions.
        training: dataset among whose images neighbours of the drawn ones are looked for; None: `data`.
        subject: folder of photos: judge how well the model draws their subject, in place of `data`.
        word: what names the subject in prompts, such as `sks dog`.
        kind: its class, such as `dog`.
        weights: folder with the weights of feature networks.
        download: get weights of feature networks that are not on this machine.
        cache: folder for features of real images.
        save_statistics: file for mean and covariance of the real features.
    """

    model: str
    data: str
    out: Path
    preset: str | None = None
    metrics: tuple[str, ...] | None = None
    samples: int | None = None
    guidance: tuple[float, ...] | None = None
    steps: int | None = None
    resolution: int | None = None
    sampler: str | None = None
    seed: int = 0
    chunk: int = DEFAULT_CHUNK
    precision: str | None = None
    revision: str | None = None
    base: str | None = None
    prompts: Path | None = None
    training: str | None = None
    subject: Path | None = None
    word: str = ''
    kind: str = ''
    weights: Path | None = None
    download: bool = False
    cache: Path | None = None
    keep_images: bool = False
    save_statistics: Path | None = None

    def option(self, name: str, default: Any) -> Any:
        """What was asked for, what the preset says, or the default."""
        asked = getattr(self, name)
        if asked is None and self.preset is not None:
            asked = getattr(PRESETS[self.preset], name)
        return default if asked is None else asked

    @property
    def changes(self) -> list[str]:
        """Fields of the preset that options change."""
        if self.preset is None:
            return []
        return [name for name in CHANGEABLE if getattr(self, name) not in (None, getattr(PRESETS[self.preset], name))]


CHANGEABLE = ('metrics', 'samples', 'guidance', 'steps', 'resolution', 'sampler')


@dataclass(frozen=True)
class PreparedEvaluation:
    """An evaluation that can begin.

    Attributes:
        metrics: by the name that was asked for.
        real: what drawn images are compared with: their features, statistics, or None if no metric needs any.
        known: features of other images among which neighbours are looked for, by `neighbour` alone; None: those of `real`.
        neighbour: the network whose features say what is similar; None without images to look among.
    """

    request: Request
    job: DrawingJob
    metrics: Mapping[str, Metric]
    extractors: Sequence[Extractor]
    real: RealFeatures | Statistics | None
    known: RealFeatures | None
    neighbour: Extractor | None

    @property
    def real_parts(self) -> list[tuple[RealFeatures, list[Extractor]]]:
        """Real images, and the networks whose features of them are needed."""
        found = [(self.real, list(self.extractors))] if isinstance(self.real, RealFeatures) else []
        if self.known is not None and self.neighbour is not None:
            found.append((self.known, [self.neighbour]))
        return found

    @cached_property
    def pipeline(self) -> Any:
        """Of the model, opened when something has to be drawn."""
        return self.job.model.open(self.job.protocol.sampler)

    def draw(self, guidance: float, number: int) -> Tensor:
        """(B, 3, H, W) uint8 of a chunk with its padding; the same bits each time."""
        protocol, chunk = self.job.protocol, self.job.chunks[number]
        family = self.job.model.family
        return draw_chunk(self.pipeline, family, chunk, protocol.seed, guidance, protocol.steps, protocol.resolution, protocol.precision)


def prepare(request: Request, device: torch.device) -> PreparedEvaluation:
    """Find and check everything before the first image is drawn.

    Raises:
        InputError, DataError, EncoderError, CheckpointError: wrong input, with the remedy.
    """
    refuse_foreign(request.out)
    refuse_absent(request.model, request.revision)
    metrics = {name: find_metric(name) for name in request.option('metrics', DEFAULT_METRICS)}
    images = statistics = None
    if request.data.endswith(SUFFIXES_OF_STATISTICS):
        statistics = read_statistics(Path(request.data))
        _refuse_statistics(statistics, metrics, request)
    else:
        images = open_images(request.data)
    cache = request.cache or request.out.absolute().parent / CACHE
    samples, prompts, described = _prompts(request, images, cache)
    if samples < MIN_IMAGES:
        what = 'the least that can be scored; figures that compare need thousands'
        raise InputError(f'{counted(samples, "image")} to draw: too few, {MIN_IMAGES} are {what}. Raise --samples, or name more images or prompts')
    for metric in metrics.values():
        if metric.check_captions is not None:
            metric.check_captions([prompt.text for prompt in prompts])
    names = list(dict.fromkeys(metric.extractor for metric in metrics.values()))
    has_known = images is not None or request.training is not None
    if has_known and not any(name in EMBEDDING for name in names):
        names.append(FALLBACK)
    extractors = load_extractors(names, request.weights, device, request.download)
    digests = {extractor.name: extractor.sha256 for extractor in extractors}
    model = find_model(request.model, request.out, request.revision, request.base)  # last: it may export a checkpoint into OUT
    resolution = request.option('resolution', None) or model.resolution
    if resolution % model.downsampling:
        raise InputError(f'--resolution {resolution}: has to be a multiple of {model.downsampling}, the downsampling of the VAE')
    sampler = request.option('sampler', None) or model.sampler
    model.scheduler(sampler)
    real = None
    if statistics is not None:
        statistics.refuse_other(resolution, extractors)
        identity = {'kind': 'statistics', 'identity': statistics.identity, 'count': statistics.count}
    else:
        assert images is not None
        ids = chosen_ids(images, min(samples, images.parts[-1]), request.seed)
        if len(ids) < MIN_IMAGES:
            raise InputError(f'{images.where}: holds {counted(len(ids), "image")}, too few to compare with; at least {MIN_IMAGES} are needed')
        real = RealFeatures(images, ids, resolution, request.chunk, cache)
        identity = {'kind': 'images', 'identity': images.identity, 'count': len(ids), 'chosen': CHOSEN_BY}
    protocol = Protocol(
        preset='' if request.changes else request.preset or '',
        metrics=tuple(metrics),
        samples=samples,
        guidance=tuple(sorted(request.option('guidance', DEFAULT_GUIDANCE))),
        steps=request.option('steps', DEFAULT_STEPS),
        sampler=sampler,
        seed=request.seed,
        resolution=resolution,
        chunk=request.chunk,
        precision=request.precision or precision_on(device),
        resize=SQUARE,
        extractors=digests,
        prompts=described,
        real=identity,
    )
    job = DrawingJob(request.out, protocol, model, prompts, request.keep_images)
    embedding = [one for one in extractors if one.name in EMBEDDING]
    neighbour = next((one for one in embedding if isinstance(one, TextExtractor)), embedding[0]) if has_known else None
    known = _known(request, neighbour, resolution, cache)
    return PreparedEvaluation(request, job, metrics, extractors, statistics or real, known, neighbour)


def _prompts(request: Request, images: RealImages | None, cache: Path) -> tuple[int, list[Prompt], dict[str, str]]:
    """How many images to draw, of what, and what the protocol says of the prompts."""
    if request.prompts is not None:
        lines = read_prompts_file(request.prompts)
        samples = num_samples(request, len(lines), str(request.prompts), 'prompt')
        chosen = lines[:samples]
        return samples, chosen, {'from': 'file', 'choice': 'its first lines', 'sha256': prompts_sha256(chosen)}
    if images is None:
        raise InputError(f'{request.data}: statistics have no captions to draw; name --prompts FILE')
    samples = num_samples(request, images.parts[-1], images.where, 'image')
    ids = chosen_ids(images, samples, request.seed)
    prompts = captions_as_prompts(images, ids, request.seed, cache)
    return samples, prompts, {'from': 'captions', 'choice': CAPTION_CHOICE, 'sha256': prompts_sha256(prompts)}


def num_samples(request: Request, available: int, where: str, noun: str) -> int:
    """How many images to draw, of as many prompts or captions.

    Raises:
        InputError: more are asked for.
    """
    asked = request.option('samples', None)
    if asked is None:
        return min(DEFAULT_SAMPLES, available) if noun == 'image' else available
    if asked > available:
        remedy = f'set --samples {available} or less' if available >= MIN_IMAGES else f'at least {MIN_IMAGES} are needed'
        raise InputError(f'{where}: holds {counted(available, noun)}, {asked:,} are asked for; {remedy}')
    return asked


def _refuse_statistics(statistics: Statistics, metrics: Mapping[str, Metric], request: Request) -> None:
    """Raises InputError: a metric needs the images, or the feature is not in the file."""
    for name, metric in metrics.items():
        if metric.needs_real and metric.score is not METRICS['fid'].score:
            raise InputError(f'{request.data}: holds statistics, and {name} needs the images themselves; leave it out, or name them as --data')
        if metric.needs_real and metric.feature not in statistics.gaussians:
            raise InputError(f'{request.data}: has no statistics of {metric.feature}, which {name} needs; it has {", ".join(statistics.gaussians)}')


def _known(request: Request, neighbour: Extractor | None, resolution: int, cache: Path) -> RealFeatures | None:
    if request.training is None or neighbour is None:
        return None
    images = open_images(request.training)
    return RealFeatures(images, chosen_ids(images, min(images.parts[-1], MAX_KNOWN), request.seed), resolution, request.chunk, cache)
