"""A request becomes a job: model, images, prompts, feature networks and the protocol, and its parts on the disk, which its processes share.

OUT/evaluating.json              protocol and model, written first; another start with others is refused
OUT/drawn/3.0/00000.safetensors  features of the images of a chunk at guidance 3
OUT/images/3.0/00000/            the images themselves with --keep-images, an MDS shard
OUT/samples/3.0/000017.png       the first images, for the page
OUT/evaluation.json              the result, when all parts are there

The subject of a fine-tuning is scored as in DreamBooth: is it the subject (CLIP-I, DINO), does it do what the prompt says (CLIP-T)? The model before
fine-tuning is the floor. Prompts hold `{}` where the subject is named: by its made-up word for the fine-tuned model, by its class for the model
before and for CLIP, to which the word means nothing.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from diffusion.common.files import read_json
from diffusion.common.storage import LocalFolder
from diffusion.common.text import brief, counted, differences
from diffusion.contracts.errors import InputError
from diffusion.datasets.transforms import SQUARE
from diffusion.evaluation.features.networks import EMBEDDING, FeatureNetwork, load_extractors
from diffusion.evaluation.job.images import (
    CAPTION_CHOICE,
    CHOSEN_BY,
    FolderImages,
    Prompt,
    RealImages,
    captions_as_prompts,
    open_images,
    read_prompts_file,
)
from diffusion.evaluation.job.models import ASKED, EXPORTED, DrawingModel, chunks_of, draw_chunk, find_model, refuse_absent
from diffusion.evaluation.job.parts import SUFFIXES_OF_STATISTICS, FeatureParts, RealFeatures, Statistics, read_statistics
from diffusion.evaluation.job.request import DEFAULT_GUIDANCE, DEFAULT_METRICS, DEFAULT_SAMPLES, DEFAULT_STEPS, EvaluationRequest
from diffusion.evaluation.job.results import PHOTOS, Protocol
from diffusion.evaluation.metrics.figures import METRICS, Metric, find_metric
from diffusion.families.pipeline import precision_on
from diffusion.recipe.catalog import MIN_IMAGES

BEGUN = 'evaluating.json'
FLOOR = 'base'  # folder in OUT: of a subject, the same of the model before fine-tuning
BEFORE_BEGUN = (ASKED, EXPORTED, FLOOR)  # may be in OUT before the protocol is known
FALLBACK = 'random-conv'  # finds neighbours where no metric's network can; needs no weights
MAX_KNOWN = 1_000_000  # training images that are compared with: their features take 3 GB on the disk
CACHE = '.real_features'  # folder next to OUT: evaluations of other models find it there, and `evaluations/*` does not name it
NETWORKS_OF_SUBJECTS = ('clip-vit-l14', 'dino-vits16')
IMAGES_PER_PROMPT = 4  # as DreamBooth draws
DEFAULT_GUIDANCE_OF_SUBJECTS = (7.5,)
PLACE = '{}'
MEANINGS = {  # of the metrics of a subject
    'clip_i': 'mean cosine of drawn images and photos by CLIP: the kind of subject',
    'dino': 'mean cosine of drawn images and photos by DINO: which one of its kind it is',
    'clip_t': 'mean cosine of drawn images and their prompts, with the class in place of the word, by CLIP',
}


@dataclass(frozen=True)
class EvaluationJob:
    """An evaluation that can begin: what all of its processes have to agree on, and what they need."""

    request: EvaluationRequest
    out: Path  # on a disk that all processes share
    protocol: Protocol
    model: DrawingModel
    prompts: Sequence[Prompt]  # what is drawn, at each guidance scale
    metrics: Mapping[str, Metric]  # by the name that was asked for; none of a subject
    networks: Sequence[FeatureNetwork]
    real: RealFeatures | Statistics | None = None  # what drawn images are compared with, if anything
    known: RealFeatures | None = None  # other images among which neighbours are looked for, by `neighbour` alone; None: those of `real`
    neighbour: FeatureNetwork | None = None  # its features say what is similar; None without images to look among
    kinds: Sequence[str] = ()  # of a subject, what its prompts say with the class in place of the word, each once
    floor: 'EvaluationJob | None' = None  # of a subject, the same of the model before fine-tuning, if that is known

    @property
    def both(self) -> list['EvaluationJob']:
        """Jobs that draw: this one, and that of the model before fine-tuning."""
        return [self, *([self.floor] if self.floor is not None else [])]

    @cached_property
    def chunks(self) -> list[list[Prompt]]:
        return chunks_of(self.prompts, self.protocol.chunk)

    @cached_property
    def pipeline(self) -> Any:
        """The model's, opened when something has to be drawn."""
        return self.model.open(self.protocol.sampler)

    @property
    def real_parts(self) -> list[tuple[RealFeatures, list[FeatureNetwork]]]:
        """Real images, and the networks whose features of them are needed."""
        found = [(self.real, list(self.networks))] if isinstance(self.real, RealFeatures) else []
        if self.known is not None and self.neighbour is not None:
            found.append((self.known, [self.neighbour]))
        return found

    def begin(self) -> None:
        """Take OUT, or find that it was begun with the same protocol and model.

        Raises:
            InputError: it was begun with others; the message names what differs.
        """
        protocol = {name: value for name, value in self.protocol.to_json().items() if name != 'preset'}
        settings = {'protocol': protocol, 'model': self.model.sha256, 'keep_images': self.request.keep_images}
        if LocalFolder(str(self.out)).swap(BEGUN, None, json.dumps(settings, indent=1).encode()):
            return
        then = read_json(self.out / BEGUN, dict[str, Any], InputError, 'name another OUT')
        rows = differences({'then': then, 'now': settings})
        differing = '; '.join(f'{name.removeprefix("protocol.")} {brief(old)}, now {brief(new)}' for name, old, new in rows)
        raise InputError(f'{self.out}: was begun with {differing}; name another OUT, or repeat the earlier options')

    def drawn(self, guidance: float) -> FeatureParts:
        """Features of the images of one guidance scale."""
        return FeatureParts(self.out / 'drawn' / str(guidance), range(len(self.chunks)))

    def images(self, guidance: float) -> Path:
        """The dataset of the images of one guidance scale."""
        return self.out / 'images' / str(guidance)

    def sample(self, guidance: float, prompt: Prompt) -> Path:
        """The file of an image for the page."""
        return self.out / 'samples' / str(guidance) / f'{prompt.id:06d}.png'

    def chunk_size(self, number: int) -> int:
        """Images in a chunk without its padding."""
        return min(self.protocol.chunk, len(self.prompts) - number * self.protocol.chunk)

    def work(self) -> list[tuple[float, int]]:
        """(guidance, chunk) of all parts, in the order in which they are drawn."""
        return [(guidance, number) for guidance in self.protocol.guidance for number in range(len(self.chunks))]

    def missing(self) -> list[tuple[float, int]]:
        """Return the parts that are not there."""
        return [(guidance, number) for guidance in self.protocol.guidance for number in self.drawn(guidance).missing()]

    def draw(self, guidance: float, number: int) -> Tensor:
        """(B, 3, H, W) uint8 of a chunk with its padding; the same bits each time."""
        protocol, chunk = self.protocol, self.chunks[number]
        return draw_chunk(self.pipeline, self.model.family, chunk, protocol.seed, guidance, protocol.steps, protocol.resolution, protocol.precision)


@dataclass(frozen=True)
class DrawingTask:
    """Images to draw and what to compare them with, before any network is opened; `described` and `identity` are the protocol's words for them."""

    prompts: Sequence[Prompt]
    described: dict[str, str]
    identity: dict[str, Any]
    networks: Sequence[str]
    images: RealImages | None = None
    ids: Sequence[int] = ()
    statistics: Statistics | None = None
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    kinds: Sequence[str] = ()


def prepare(request: EvaluationRequest, device: torch.device) -> EvaluationJob:
    """Find and check everything before the first image is drawn.

    Raises:
        InputError, DataError, EncoderError, CheckpointError: wrong input, with the remedy.
    """
    out = request.out
    if out.exists() and not (out / BEGUN).exists():
        foreign = [name for name in LocalFolder(str(out)).files() if name.split('/')[0] not in BEFORE_BEGUN] if out.is_dir() else [out.name]
        if foreign and not (out / BEGUN).exists():  # asked again: another process may have begun just now
            raise InputError(f'{out}: holds something else already ({", ".join(foreign[:3])}); name a new or empty folder')
    refuse_absent(request.model, request.revision)
    cache = request.cache or out.absolute().parent / CACHE
    is_subject = request.subject is not None
    comparison = _with_photos(request) if is_subject else _with_real(request, cache)
    networks = load_extractors(comparison.networks, request.weights, device, request.download)
    model = find_model(request.model, out, request.revision, request.base)  # last: it may export a checkpoint into OUT
    base = _base_of(model, request) if is_subject else None
    resolution = request.choice('resolution', None) or model.resolution
    if resolution % model.downsampling:
        raise InputError(f'--resolution {resolution}: has to be a multiple of {model.downsampling}, the downsampling of the VAE')
    sampler = request.choice('sampler', None) or model.sampler
    model.scheduler(sampler)
    if comparison.statistics is not None:
        comparison.statistics.refuse_other(resolution, networks)
    real = None
    if comparison.images is not None:
        real = RealFeatures(comparison.images, comparison.ids, resolution, request.chunk, cache)
    protocol = Protocol(
        preset='' if request.changes else request.protocol or '',
        metrics=tuple(MEANINGS) if is_subject else tuple(comparison.metrics),
        samples=len(comparison.prompts),
        guidance=tuple(sorted(request.choice('guidance', DEFAULT_GUIDANCE_OF_SUBJECTS if is_subject else DEFAULT_GUIDANCE))),
        steps=request.choice('steps', DEFAULT_STEPS),
        sampler=sampler,
        seed=request.seed,
        resolution=resolution,
        chunk=request.chunk,
        precision=request.precision or precision_on(device),
        resize=SQUARE,
        extractors={network.name: network.sha256 for network in networks},
        prompts=comparison.described,
        real=comparison.identity,
    )
    job = EvaluationJob(
        request, out, protocol, model, comparison.prompts, comparison.metrics, networks, comparison.statistics or real, kinds=comparison.kinds
    )
    if is_subject and base is not None:
        kinds = [Prompt(i, comparison.kinds[i % len(comparison.kinds)]) for i in range(len(job.prompts))]
        return replace(
            job, floor=replace(job, out=out / FLOOR, protocol=replace(protocol, sampler=base.sampler), model=base, prompts=kinds, real=None)
        )
    if is_subject or (real is None and request.training is None):
        return job
    known = None
    if request.training is not None:
        others = open_images(request.training)
        known = RealFeatures(others, others.chosen(min(len(others), MAX_KNOWN), request.seed), resolution, request.chunk, cache)
    embedding = [network for network in networks if network.name in EMBEDDING]
    return replace(job, known=known, neighbour=next((network for network in embedding if EMBEDDING[network.name].texts), embedding[0]))


def _with_real(request: EvaluationRequest, cache: Path) -> DrawingTask:
    """Compare with the images or statistics that --data names."""
    metrics = {name: find_metric(name) for name in request.choice('metrics', DEFAULT_METRICS)}
    images = statistics = None
    if not request.data:
        if comparing := [name for name, metric in metrics.items() if metric.needs_real]:
            raise InputError(f'{", ".join(comparing)}: compared with real images; name them as --data DATASET, or leave out these metrics')
    elif request.data.endswith(SUFFIXES_OF_STATISTICS):
        statistics = read_statistics(Path(request.data))
        for name, metric in metrics.items():
            if metric.needs_real and metric.score is not METRICS['fid'].score:
                raise InputError(f'{request.data}: holds statistics, and {name} needs the images themselves; leave it out, or name them as --data')
            if metric.needs_real and metric.feature not in statistics.gaussians:
                has = ', '.join(statistics.gaussians)
                raise InputError(f'{request.data}: has no statistics of {metric.feature}, which {name} needs; it has {has}')
    else:
        images = open_images(request.data)
    if request.prompts is not None:
        lines = read_prompts_file(request.prompts)
        prompts, source = lines[: num_samples(request, len(lines), str(request.prompts), 'prompt')], {'from': 'file', 'choice': 'its first lines'}
    elif images is None:
        raise InputError(f'{request.data}: statistics have no captions to draw; name --prompts FILE')
    else:
        ids = images.chosen(num_samples(request, len(images), images.where, 'image'), request.seed)
        prompts, source = captions_as_prompts(images, ids, request.seed, cache), {'from': 'captions', 'choice': CAPTION_CHOICE}
    if len(prompts) < MIN_IMAGES:
        what = 'the least that can be scored; figures that compare need thousands'
        drawn = counted(len(prompts), 'image')
        raise InputError(f'{drawn} to draw: too few, {MIN_IMAGES} are {what}. Raise --samples, or name more images or prompts')
    for metric in metrics.values():
        if metric.check_captions is not None:
            metric.check_captions([prompt.text for prompt in prompts])
    networks = list(dict.fromkeys(metric.extractor for metric in metrics.values()))
    if (images is not None or request.training is not None) and not any(name in EMBEDDING for name in networks):
        networks.append(FALLBACK)
    described = {**source, 'sha256': _sha256_of(prompts)}
    if images is None:
        real = {'kind': 'none', 'identity': 'none', 'count': 0} if statistics is None else statistics.identity
        return DrawingTask(prompts, described, real, networks, statistics=statistics, metrics=metrics)
    ids = images.chosen(min(len(prompts), len(images)), request.seed)
    if len(ids) < MIN_IMAGES:
        raise InputError(f'{images.where}: holds {counted(len(ids), "image")}, too few to compare with; at least {MIN_IMAGES} are needed')
    identity = {'kind': 'images', 'identity': images.identity, 'count': len(ids), 'chosen': CHOSEN_BY}
    return DrawingTask(prompts, described, identity, networks, images, ids, metrics=metrics)


def _with_photos(request: EvaluationRequest) -> DrawingTask:
    """Compare with the photos of a subject."""
    if request.prompts is None or not request.word or not request.class_word:
        raise InputError('--subject needs --prompts FILE with {} where the subject is named, --word "sks dog" and --class-word dog')
    without_effect = [name for name in ('protocol', 'metrics', 'training', 'save_statistics') if getattr(request, name) is not None]
    if without_effect:
        names = ', '.join(f'--{name.replace("_", "-")}' for name in without_effect)
        raise InputError(f'--subject has metrics of its own, CLIP-I, DINO and CLIP-T of all photos; leave out {names}')
    lines = [prompt.text for prompt in read_prompts_file(request.prompts)]
    without = [line for line in lines if PLACE not in line]
    if without:
        raise InputError(f'{request.prompts}: {without[0]!r} does not say where the subject is; write {PLACE} in its place')
    photos = open_images(str(request.subject))
    if not isinstance(photos, FolderImages):
        raise InputError(f'{request.subject}: is an MDS dataset; name the folder of the photos')
    count = request.samples or IMAGES_PER_PROMPT * len(lines)
    prompts = [Prompt(i, lines[i % len(lines)].replace(PLACE, request.word)) for i in range(count)]
    described = {'from': 'file', 'choice': 'its lines in turn', 'sha256': _sha256_of(prompts), 'class': request.class_word}
    identity = {'kind': PHOTOS, 'identity': photos.identity, 'count': len(photos)}
    kinds = [line.replace(PLACE, request.class_word) for line in lines]
    return DrawingTask(prompts, described, identity, NETWORKS_OF_SUBJECTS, photos, range(len(photos)), kinds=kinds)


def _sha256_of(prompts: Sequence[Prompt]) -> str:
    return hashlib.sha256(json.dumps(prompts).encode()).hexdigest()


def num_samples(request: EvaluationRequest, available: int, where: str, noun: str) -> int:
    """Return how many images to draw, of as many prompts or captions.

    Raises:
        InputError: more are asked for.
    """
    asked = request.choice('samples', None)
    if asked is None:
        return min(DEFAULT_SAMPLES, available) if noun == 'image' else available
    if asked > available:
        remedy = f'set --samples {available} or less' if available >= MIN_IMAGES else f'at least {MIN_IMAGES} are needed'
        raise InputError(f'{where}: holds {counted(available, noun)}, {asked:,} are asked for; {remedy}')
    return asked


def _base_of(model: DrawingModel, request: EvaluationRequest) -> DrawingModel | None:
    """The model before fine-tuning: what --base names, or what an exported adapter, merged or not, belongs to; None if nothing says."""
    base = model.facts.get('base')
    if request.base is not None:
        return find_model(request.base, request.out / FLOOR)
    if base is not None and base['revision'] is None and not Path(base['source'], 'model_index.json').is_file():
        raise InputError(
            f'{request.model}: the model that it was fine-tuned from, {base["source"]}, is no model in the diffusers layout on this machine; '
            'name its folder with --base'
        )
    return None if base is None else find_model(base['source'], request.out / FLOOR, base['revision'])
