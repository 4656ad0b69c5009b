"""An evaluation, shared by its processes: real and drawn images become features on the disk, and features become figures.

Figures are computed one guidance scale and one feature after the other, so that memory holds two arrays of features at a time.
"""

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from tqdm import tqdm

from diffusion.common.environment import environment
from diffusion.common.files import replacing, try_lock, write_text
from diffusion.common.images import save_png, to_pil
from diffusion.common.processes import failpoint
from diffusion.common.text import counted
from diffusion.contracts.errors import IncompleteError
from diffusion.cost.hardware import own_device
from diffusion.evaluation.features.networks import in_batches
from diffusion.evaluation.job.models import DrawingModel
from diffusion.evaluation.job.parts import SAMPLE_ID, RealFeatures, Statistics, finish_kept, keep_chunk, save_statistics
from diffusion.evaluation.job.planning import announcement
from diffusion.evaluation.job.preparing import FLOOR, MEANINGS, EvaluationJob, prepare
from diffusion.evaluation.job.request import PRESETS, EvaluationRequest
from diffusion.evaluation.job.results import MOST_PHOTOS, RESULT_NAME, VERSION, Evaluation, ModelRecord, Neighbour, Neighbours, SampleRecord, Value
from diffusion.evaluation.metrics.distances import Estimate, nearest, photo_fidelity, prompt_fidelity, subject_fidelity
from diffusion.evaluation.metrics.figures import Metric, name_of

NUM_SHOWN = 64  # images of each guidance scale that are kept for the page
PHOTO_PX = 256  # side of the photos of a subject that are kept for it
NUM_PAIRS = 10  # of a drawn image and its neighbour
PERCENTILE = 0.999  # of held-out real images: as many of them are more similar to a known one
MIN_HELD_OUT = 1000  # one image lies above the percentile; of fewer images it would be no more than the largest cosine
Part = TypeVar('Part')


@dataclass(frozen=True)
class Ranks:
    """Number of this process among those of an evaluation; each has every `world_size`-th part."""

    rank: int = 0
    world_size: int = 1

    def own(self, parts: Sequence[Part]) -> Sequence[Part]:
        """Return the parts of this process."""
        return parts[self.rank :: self.world_size]


def launched() -> tuple[Ranks, torch.device]:
    """This process among others and its device, from the environment that composer and torchrun set."""
    rank, world_size = (int(os.environ.get(name) or default) for name, default in (('RANK', 0), ('WORLD_SIZE', 1)))
    return Ranks(rank, world_size), own_device()


def evaluate(request: EvaluationRequest, ranks: Ranks, device: torch.device) -> Evaluation | None:
    """Draw, compute features and score; the page is written by whoever calls this.

    Nothing is sent between processes: each looks at what is on the disk, and the one that finds all parts scores.

    Returns:
        None if parts of other processes are not there yet, or another one is scoring.

    Raises:
        InputError, DataError, EncoderError, CheckpointError: wrong input, with the remedy.
        IncompleteError: this process did all of its parts, and there are no others, but some are missing.
    """
    job = prepare(request, device)
    for one in job.both:
        one.begin()
    if ranks.rank == 0 and (text := announcement(job.both, device, ranks.world_size)):
        print(text, file=sys.stderr, flush=True)
    for one in job.both:
        for real, networks in one.real_parts:
            missing, parts = set(real.missing(networks)), ranks.own(real.parts)
            for part in tqdm(parts, desc='real images', unit='part', disable=not missing.intersection(parts)):
                if part in missing:
                    real.compute(networks, part)
                    failpoint('evaluation.real')
        work, undrawn, size = ranks.own(one.work()), set(one.missing()), one.protocol.chunk
        todo = [part for part in work if part in undrawn]
        with tqdm(total=len(work) * size, initial=(len(work) - len(todo)) * size, desc='draw', unit='image', disable=not todo) as bar:
            for guidance, number in todo:
                _draw_part(one, guidance, number)
                failpoint('evaluation.drawn')
                bar.update(size)
    left = sum(len(one.missing()) + sum(len(real.missing(networks)) for real, networks in one.real_parts) for one in job.both)
    if left and ranks.world_size == 1:
        raise IncompleteError(f'{request.out}: {counted(left, "part")} vanished while others were written; run the same command again')
    with (request.out / '.scoring.lock').open('w') as file:
        return _score(job) if not left and try_lock(file) else None


def _draw_part(job: EvaluationJob, guidance: float, number: int) -> None:
    """Draw a chunk and write what is kept of it; its features last, because they are the mark that it is done."""
    start, chunk = time.monotonic(), job.chunks[number]
    images = job.draw(guidance, number)
    seconds = time.monotonic() - start
    features: dict[str, Tensor] = {}
    for network in job.networks:
        features |= in_batches(network, images, job.protocol.chunk)
        if any(metric.needs_captions and metric.extractor == network.name for metric in job.metrics.values()):
            features[_texts_of(network.name)] = network.texts([prompt.text for prompt in chunk]).float().cpu()
    count = job.chunk_size(number)
    facts: dict[str, Any] = {'seconds': seconds, 'images': count}
    if job.request.keep_images:
        facts['shard'] = keep_chunk(job.images(guidance), number, chunk[:count], images[:count])
    for place, (prompt, image) in enumerate(zip(chunk[:count], images, strict=False), start=number * job.protocol.chunk):
        if place < NUM_SHOWN:
            with replacing(job.sample(guidance, prompt)) as temporary:
                save_png(to_pil(image), temporary, {'prompt': prompt.text, 'seed': str(job.protocol.seed), 'id': str(prompt.id)})
    job.drawn(guidance).put(number, {name: value[:count] for name, value in features.items()}, facts)


def _texts_of(network: str) -> str:
    """Name in a part of the embeddings of the captions."""
    return f'{network}/captions'


def _score(job: EvaluationJob) -> Evaluation:
    """Compute all figures and write evaluation.json; of kept images also what makes them a dataset, of a subject some of its photos.

    Raises:
        DataError: a part is damaged.
        InputError: too few images for a metric.
    """
    request, protocol, real = job.request, job.protocol, job.real
    if request.save_statistics is not None and isinstance(real, RealFeatures):
        facts = {'where': real.images.where, 'resolution': protocol.resolution, 'resize': protocol.resize, 'extractors': protocol.extractors}
        wanted = [metric for metric in job.metrics.values() if metric.needs_real]
        save_statistics(request.save_statistics, {metric.feature: partial(_load_real, job, metric) for metric in wanted}, facts)
    metrics = _subject_metrics(job) if job.kinds else _metrics(job)
    neighbours = find_neighbours(job)
    for one in job.both:
        for guidance in protocol.guidance if request.keep_images else ():
            source = {'made_by': 'python -m diffusion.evaluate', 'model': one.model.sha256, 'guidance': guidance, 'protocol': one.protocol.digest}
            finish_kept(one.images(guidance), [note['shard'] for note in one.drawn(guidance).facts()], source, protocol.resolution)
    notes = [note for guidance in protocol.guidance for note in job.drawn(guidance).facts()]
    seconds = sum(note['seconds'] for note in notes)
    found: Evaluation = {
        'version': VERSION,
        'protocol': protocol.to_json(),
        'digest': protocol.digest,
        'model': _model_record(job.model),
        'real': {
            'where': request.data or str(request.subject or ''),
            'identity': protocol.real['identity'],
            'count': protocol.real['count'],
            'left_out': real.images.text_of_left_out if isinstance(real, RealFeatures) else '',
        },
        'scores': [{'guidance': guidance, 'count': len(job.prompts), 'metrics': metrics[guidance]} for guidance in protocol.guidance],
        'neighbours': neighbours,
        'samples': {str(guidance): _samples(job, guidance) for guidance in protocol.guidance},
        'seconds': seconds,
        'images_per_sec': sum(note['images'] for note in notes) / max(seconds, 1e-9),
        'environment': environment(),
    }
    if job.kinds:
        assert isinstance(real, RealFeatures)
        found['photos'] = [f'photos/{number}.png' for number in sorted(real.wanted)[:MOST_PHOTOS]]
        for number, name in enumerate(found['photos']):
            # Decoded and encoded again: without the place and the camera that a file from a telephone names.
            photo = real.images.pixels(real.images.image(number), min(real.resolution, PHOTO_PX))
            with replacing(job.out / name) as temporary:
                save_png(to_pil(photo), temporary, {})
    if job.floor is not None:
        found['floor'] = _model_record(job.floor.model)
        for scale, samples in found['samples'].items():
            for sample, before in zip(samples, _samples(job.floor, float(scale)), strict=True):
                sample['floor'] = f'{FLOOR}/{before["file"]}'
    write_text(job.out / RESULT_NAME, json.dumps(found, indent=1, ensure_ascii=False) + '\n')
    return found


def _metrics(job: EvaluationJob) -> dict[float, dict[str, Value]]:
    """Figures by guidance scale; a metric at all scales before the next one, so that its real features are read once."""
    protocol = job.protocol
    targets = PRESETS[protocol.preset].targets if protocol.preset else {}
    found: dict[float, dict[str, Value]] = {guidance: {} for guidance in protocol.guidance}
    for name, metric in job.metrics.items():
        real = _load_real(job, metric) if metric.needs_real else None
        for guidance in protocol.guidance:
            drawn = job.drawn(guidance)
            texts = drawn.load(_texts_of(metric.extractor)) if metric.needs_captions else None
            for figure, values in metric(real, drawn.load(metric.feature), texts, protocol.seed).items():
                value: dict[str, Any] = {**values, **asdict(metric.figures[figure]), 'extractor': metric.extractor}
                value |= {'target': targets[name]} if name in targets else {}
                found[guidance][name_of(name, metric, figure)] = cast(Value, value)
    return found


def _load_real(job: EvaluationJob, metric: Metric) -> Any:
    """Features (N, D) of the real images, or their saved Gaussian."""
    if isinstance(job.real, Statistics):
        return job.real.gaussians[metric.feature]
    assert job.real is not None
    return job.real.load(next(one for one in job.networks if one.name == metric.extractor), metric.feature)


def _subject_metrics(job: EvaluationJob) -> dict[float, dict[str, Value]]:
    """CLIP-I, DINO and CLIP-T by guidance scale; `floor` is of the model before fine-tuning, `ceiling` of the photos among themselves."""
    clip, dino = job.networks
    assert isinstance(job.real, RealFeatures)
    of_clip, of_dino = (job.real.load(network) for network in (clip, dino))
    ceiling = {'clip_i': photo_fidelity(of_clip).value, 'dino': photo_fidelity(of_dino).value} if len(of_clip) > 1 else {}
    texts = clip.texts(job.kinds).float().cpu()

    def estimates(one: EvaluationJob, guidance: float) -> dict[str, Estimate]:
        by_clip, by_dino = (one.drawn(guidance).load(next(iter(network.features))) for network in (clip, dino))
        prompts = texts[torch.arange(len(by_clip)) % len(texts)]
        return {
            'clip_i': subject_fidelity(by_clip, of_clip),
            'dino': subject_fidelity(by_dino, of_dino),
            'clip_t': prompt_fidelity(by_clip, prompts),
        }

    found: dict[float, dict[str, Value]] = {}
    for guidance in job.protocol.guidance:
        found[guidance] = {}
        floor = estimates(job.floor, guidance) if job.floor is not None else {}
        for name, estimate in estimates(job, guidance).items():
            value = {**asdict(estimate), 'meaning': MEANINGS[name], 'lower_is_better': False}
            value |= {'floor': floor[name].value} if name in floor else {}
            value |= {'ceiling': ceiling[name]} if name in ceiling else {}
            found[guidance][name] = cast(Value, {**value, 'extractor': (dino if name == 'dino' else clip).name})
    return found


def _model_record(model: DrawingModel) -> ModelRecord:
    return {'where': model.asked, 'sha256': model.sha256, 'label': model.label, 'batches': model.facts.get('batches')}


def _samples(job: EvaluationJob, guidance: float) -> list[SampleRecord]:
    return [
        {'file': job.sample(guidance, prompt).relative_to(job.out).as_posix(), 'id': prompt.id, 'prompt': prompt.text}
        for prompt in job.prompts[:NUM_SHOWN]
    ]


def find_neighbours(job: EvaluationJob) -> Neighbours | None:
    """The drawn images that look most like known ones, at the highest guidance scale, where copies are most frequent; their images become PNG.

    With `--training` the real images that are scored against are held out, and how similar they come to training images is the
    threshold above which a drawn image is suspicious.
    """
    known = job.known or (job.real if isinstance(job.real, RealFeatures) else None)
    network = job.neighbour
    if known is None or network is None:
        return None
    protocol, guidance, feature = job.protocol, job.protocol.guidance[-1], next(iter(network.features))
    features = known.load(network)
    cosine, index = (found[:, 0] for found in nearest(job.drawn(guidance).load(feature), features))

    threshold, reason, held_out = None, '', job.real
    if not isinstance(held_out, RealFeatures):
        reason = 'saved statistics hold no images to set it by'
    elif held_out.images.identity == known.images.identity:
        reason = 'no images are held out: --training names none, or those of --data'
    else:
        between = nearest(held_out.load(network), features)[0][:, 0]
        if len(between) < MIN_HELD_OUT:
            needed = f'at least {MIN_HELD_OUT:,} are needed to tell what one in a thousand exceeds'
            reason = f'{counted(len(between), "held-out image")}, and {needed}'
        else:
            threshold = float(torch.quantile(between.double(), PERCENTILE))

    ids = known.load(network, SAMPLE_ID)
    draw = cache(job.draw)  # again: most images are not kept
    pairs = list[Neighbour]()
    for place in cosine.argsort(descending=True, stable=True)[:NUM_PAIRS].tolist():
        prompt, image = job.prompts[place], known.images.image(int(ids[index[place]]))
        paths = [f'neighbours/{prompt.id:06d}-{name}.png' for name in ('drawn', 'known')]
        drawn = draw(guidance, place // protocol.chunk)[place % protocol.chunk]
        of_known = known.images.pixels(image, protocol.resolution)
        for path, tensor, text in zip(paths, (drawn, of_known), (prompt.text, image.key), strict=True):
            with replacing(job.out / path) as temporary:
                save_png(to_pil(tensor), temporary, {'text': text})
        pairs.append(
            {
                'drawn': paths[0],
                'known': paths[1],
                'key': image.key,
                'cosine': float(cosine[place]),
                'caption': prompt.text,
                'known_caption': image.caption(protocol.seed) or '',
            }
        )
    return {
        'extractor': network.name,
        'guidance': guidance,
        'count_known': len(features),
        'threshold': threshold,
        'no_threshold': reason,
        'share_above': None if threshold is None else float((cosine > threshold).double().mean()),
        'pairs': pairs,
    }
