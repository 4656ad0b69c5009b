"""A request becomes a job: model, images, prompts, feature networks and the protocol, and its parts on the disk, which its processes share.

OUT/evaluating.json              protocol and model, written first; another start with others is refused
OUT/drawn/3.0/00000.safetensors  features of the images of a chunk at guidance 3
OUT/images/3.0/00000/            the images themselves with --keep-images, an MDS shard
OUT/samples/3.0/000017.png       the first images, for the page
OUT/evaluation.json              the result, when all parts are there
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from diffusion.common.files import read_json
from diffusion.common.storage import LocalFolder
from diffusion.common.text import brief, counted, differences
from diffusion.contracts.errors import InputError
from diffusion.datasets.transforms import SQUARE
from diffusion.evaluation.features.extractors import EMBEDDING, Extractor, TextExtractor, load_extractors
from diffusion.evaluation.job.images import (
    CAPTION_CHOICE,
    CHOSEN_BY,
    FolderImages,
    Prompt,
    RealImages,
    captions_as_prompts,
    chosen_ids,
    open_images,
    prompts_sha256,
    read_prompts_file,
)
from diffusion.evaluation.job.models import ASKED, EXPORTED, DrawingModel, chunks_of, draw_chunk, find_model, refuse_absent
from diffusion.evaluation.job.parts import SUFFIXES_OF_STATISTICS, FeatureParts, RealFeatures, Statistics, read_statistics
from diffusion.evaluation.job.request import DEFAULT_GUIDANCE, DEFAULT_METRICS, DEFAULT_SAMPLES, DEFAULT_STEPS, EvaluationRequest
from diffusion.evaluation.job.results import PHOTOS, Protocol, Value
from diffusion.evaluation.metrics.distances import Estimate, photo_fidelity, prompt_fidelity, subject_fidelity
from diffusion.evaluation.metrics.figures import METRICS, Metric, find_metric
from diffusion.families.pipeline import precision_on
from diffusion.recipe.catalog import MIN_IMAGES

BEGUN = 'evaluating.json'
NUM_SHOWN = 64  # images of each guidance scale that are kept for the page
FLOOR = 'base'  # folder in OUT: of a subject, the same of the model before fine-tuning
BEFORE_BEGUN = (ASKED, EXPORTED, FLOOR)  # may be in OUT before the protocol is known
FALLBACK = 'random-conv'  # finds neighbours where no metric's network can; needs no weights
MAX_KNOWN = 1_000_000  # training images that are compared with: their features take 3 GB on the disk
CACHE = '.real_features'  # folder next to OUT: evaluations of other models find it there, and `evaluations/*` does not name it
NETWORKS_OF_SUBJECTS = ('clip-vit-l14', 'dino-vits16')
IMAGES_PER_PROMPT = 4  # as DreamBooth draws
DEFAULT_GUIDANCE_OF_SUBJECTS = (7.5,)
PLACE = '{}'
MEANINGS = {
    'clip_i': 'mean cosine of drawn images and photos by CLIP: the kind of subject',
    'dino': 'mean cosine of drawn images and photos by DINO: which one of its kind it is',
    'clip_t': 'mean cosine of drawn images and their prompts, with the class in place of the word, by CLIP',
}


@dataclass(frozen=True)
class EvaluationJob:
    """An evaluation that can begin: what all of its processes have to agree on, and what they need.

    Attributes:
        out: folder on a disk that all processes share.
        model: what draws.
        prompts: what is drawn, at each guidance scale.
        metrics: by the name that was asked for.
        real: what drawn images are compared with: their features, statistics, or None if no metric needs any.
        known: features of other images among which neighbours are looked for, by `neighbour` alone; None: those of `real`.
        neighbour: the network whose features say what is similar; None without images to look among.
    """

    request: EvaluationRequest
    out: Path
    protocol: Protocol
    model: DrawingModel
    prompts: Sequence[Prompt]
    metrics: Mapping[str, Metric]
    extractors: Sequence[Extractor]
    real: RealFeatures | Statistics | None = None
    known: RealFeatures | None = None
    neighbour: Extractor | None = None

    @cached_property
    def chunks(self) -> list[list[Prompt]]:
        return chunks_of(self.prompts, self.protocol.chunk)

    @cached_property
    def pipeline(self) -> Any:
        """The model's, opened when something has to be drawn."""
        return self.model.open(self.protocol.sampler)

    @property
    def real_parts(self) -> list[tuple[RealFeatures, list[Extractor]]]:
        """Real images, and the networks whose features of them are needed."""
        found = [(self.real, list(self.extractors))] if isinstance(self.real, RealFeatures) else []
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
        differing = '; '.join(f'{field.removeprefix("protocol.")} {brief(old)}, now {brief(new)}' for field, old, new in rows)
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


def refuse_foreign(out: Path) -> None:
    """Raises InputError: OUT holds something else than an evaluation."""
    if (out / BEGUN).exists() or not out.exists():
        return
    foreign = [name for name in LocalFolder(str(out)).files() if name.split('/')[0] not in BEFORE_BEGUN] if out.is_dir() else [out.name]
    if foreign and not (out / BEGUN).exists():  # asked again: another process may have begun just now
        raise InputError(f'{out}: holds something else already ({", ".join(foreign[:3])}); name a new or empty folder')


def prepare(request: EvaluationRequest, device: torch.device) -> EvaluationJob:
    """Find and check everything before the first image is drawn.

    Raises:
        InputError, DataError, EncoderError, CheckpointError: wrong input, with the remedy.
    """
    refuse_foreign(request.out)
    refuse_absent(request.model, request.revision)
    metrics = {name: find_metric(name) for name in request.choice('metrics', DEFAULT_METRICS)}
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
    resolution = request.choice('resolution', None) or model.resolution
    if resolution % model.downsampling:
        raise InputError(f'--resolution {resolution}: has to be a multiple of {model.downsampling}, the downsampling of the VAE')
    sampler = request.choice('sampler', None) or model.sampler
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
        preset='' if request.changes else request.protocol or '',
        metrics=tuple(metrics),
        samples=samples,
        guidance=tuple(sorted(request.choice('guidance', DEFAULT_GUIDANCE))),
        steps=request.choice('steps', DEFAULT_STEPS),
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
    embedding = [one for one in extractors if one.name in EMBEDDING]
    neighbour = next((one for one in embedding if isinstance(one, TextExtractor)), embedding[0]) if has_known else None
    known = None
    if request.training is not None:
        others = open_images(request.training)
        known = RealFeatures(others, chosen_ids(others, min(others.parts[-1], MAX_KNOWN), request.seed), resolution, request.chunk, cache)
    return EvaluationJob(request, request.out, protocol, model, prompts, metrics, extractors, statistics or real, known, neighbour)


def _prompts(request: EvaluationRequest, images: RealImages | None, cache: Path) -> tuple[int, list[Prompt], dict[str, str]]:
    """Return the number of images, their prompts, and the protocol's description of them."""
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


def _refuse_statistics(statistics: Statistics, metrics: Mapping[str, Metric], request: EvaluationRequest) -> None:
    """Raises InputError: a metric needs the images, or the feature is not in the file."""
    for name, metric in metrics.items():
        if metric.needs_real and metric.score is not METRICS['fid'].score:
            raise InputError(f'{request.data}: holds statistics, and {name} needs the images themselves; leave it out, or name them as --data')
        if metric.needs_real and metric.feature not in statistics.gaussians:
            raise InputError(f'{request.data}: has no statistics of {metric.feature}, which {name} needs; it has {", ".join(statistics.gaussians)}')


class SubjectEvaluation:
    """DreamBooth: is it the subject (CLIP-I, DINO), does it do what the prompt says (CLIP-T)? The model before fine-tuning is the floor.

    Prompts hold `{}` where the subject is named: by its made-up word for the fine-tuned model, by its class for the model before and for CLIP, to
    which the word means nothing.

    Args:
        request: with `subject`, `word`, `class_word` and `prompts`.

    Raises:
        InputError: a prompt without a place for the subject, no photos, no such model.
        EncoderError: weights of a feature network are missing.
    """

    def __init__(self, request: EvaluationRequest, device: torch.device):
        assert request.subject is not None
        if request.prompts is None or not request.word or not request.class_word:
            raise InputError('--subject needs --prompts FILE with {} where the subject is named, --word "sks dog" and --class-word dog')
        refuse_foreign(request.out)
        refuse_absent(request.model, request.revision)
        lines = [prompt.text for prompt in read_prompts_file(request.prompts)]
        without = [line for line in lines if PLACE not in line]
        if without:
            raise InputError(f'{request.prompts}: {without[0]!r} does not say where the subject is; write {PLACE} in its place')
        photos = open_images(str(request.subject))
        if not isinstance(photos, FolderImages):
            raise InputError(f'{request.subject}: is an MDS dataset; name the folder of the photos')
        self.clip, self.dino = load_extractors(NETWORKS_OF_SUBJECTS, request.weights, device, request.download)
        model = find_model(request.model, request.out, request.revision, request.base)  # last: it may export a checkpoint into OUT
        base = _base_of(model, request)
        resolution = request.resolution or model.resolution
        count = request.samples or IMAGES_PER_PROMPT * len(lines)
        cache = request.cache or request.out.absolute().parent / CACHE
        self.photos = RealFeatures(photos, range(photos.parts[-1]), resolution, request.chunk, cache)
        self.kinds = [line.replace(PLACE, request.class_word) for line in lines]
        prompts = [Prompt(i, lines[i % len(lines)].replace(PLACE, request.word)) for i in range(count)]
        protocol = Protocol(
            preset='',
            metrics=tuple(MEANINGS),
            samples=count,
            guidance=tuple(sorted(request.guidance or DEFAULT_GUIDANCE_OF_SUBJECTS)),
            steps=request.steps or DEFAULT_STEPS,
            sampler=request.sampler or model.sampler,
            seed=request.seed,
            resolution=resolution,
            chunk=request.chunk,
            precision=request.precision or precision_on(device),
            resize=SQUARE,
            extractors={one.name: one.sha256 for one in (self.clip, self.dino)},
            prompts={'from': 'file', 'choice': 'its lines in turn', 'sha256': prompts_sha256(prompts), 'class': request.class_word},
            real={'kind': PHOTOS, 'identity': photos.identity, 'count': photos.parts[-1]},
        )
        networks = (self.clip, self.dino)
        self.tuned, self.floor = EvaluationJob(request, request.out, protocol, model, prompts, {}, networks, self.photos), None
        if base is not None:
            of_class = [Prompt(i, self.kinds[i % len(lines)]) for i in range(count)]
            self.floor = EvaluationJob(request, request.out / FLOOR, replace(protocol, sampler=base.sampler), base, of_class, {}, networks)

    @property
    def jobs(self) -> list[EvaluationJob]:
        """Jobs that draw: the model's, and the one's before fine-tuning if it is known."""
        return [self.tuned, *([self.floor] if self.floor is not None else [])]

    def metrics(self, guidance: float) -> dict[str, Value]:
        """Compute all three at a guidance scale; `floor` is of the model before fine-tuning, `ceiling` of the photos among themselves."""
        found = self._of(self.tuned, guidance)
        floor = self._of(self.floor, guidance) if self.floor is not None else {}
        ceiling = {name: photo_fidelity(self._photos(one)).value for name, one in (('clip_i', self.clip), ('dino', self.dino))}
        values: dict[str, Value] = {}
        for name, estimate in found.items():
            value = {'value': estimate.value, 'error': estimate.error, 'meaning': MEANINGS[name], 'lower_is_better': False}
            value |= {'floor': floor[name].value} if name in floor else {}
            value |= {'ceiling': ceiling[name]} if name in ceiling and self.photos.images.parts[-1] > 1 else {}
            values[name] = cast(Value, {**value, 'extractor': (self.dino if name == 'dino' else self.clip).name})
        return values

    def _of(self, job: EvaluationJob, guidance: float) -> dict[str, Estimate]:
        clip, dino = (job.drawn(guidance).load(next(iter(one.features))) for one in (self.clip, self.dino))
        assert isinstance(self.clip, TextExtractor)
        texts = self.clip.texts(self.kinds).float().cpu()
        prompts = texts[torch.arange(len(clip)) % len(texts)]
        return {
            'clip_i': subject_fidelity(clip, self._photos(self.clip)),
            'dino': subject_fidelity(dino, self._photos(self.dino)),
            'clip_t': prompt_fidelity(clip, prompts),
        }

    def _photos(self, extractor: Extractor) -> Tensor:
        return self.photos.parts_of(extractor).load(next(iter(extractor.features)))


def _base_of(model: DrawingModel, request: EvaluationRequest) -> DrawingModel | None:
    """The model before fine-tuning: what --base names, or what an exported adapter, merged or not, belongs to; None if nothing says.

    Raises:
        InputError: it is not there.
    """
    base = model.facts.get('base')
    if request.base is not None:
        return find_model(request.base, request.out / FLOOR)
    if base is not None and base['revision'] is None and not Path(base['source'], 'model_index.json').is_file():
        raise InputError(
            f'{request.model}: the model that it was fine-tuned from, {base["source"]}, is no model in the diffusers layout on this machine; '
            'name its folder with --base'
        )
    return None if base is None else find_model(base['source'], request.out / FLOOR, base['revision'])
