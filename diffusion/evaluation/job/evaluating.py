"""An evaluation, shared by its processes: real and drawn images become features on the disk, and features become figures.

Figures are computed one guidance scale and one feature after the other, so that memory holds two arrays of features at a time.
"""

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
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
from diffusion.evaluation.features.extractors import TextExtractor, in_batches
from diffusion.evaluation.job.images import text_of_left_out
from diffusion.evaluation.job.models import DrawingModel
from diffusion.evaluation.job.parts import SAMPLE_ID, RealFeatures, Statistics, finish_kept, keep_chunk, pixels, save_statistics
from diffusion.evaluation.job.planning import announcement
from diffusion.evaluation.job.preparing import FLOOR, NUM_SHOWN, EvaluationJob, SubjectEvaluation, prepare
from diffusion.evaluation.job.request import PRESETS, EvaluationRequest
from diffusion.evaluation.job.results import (
    MOST_PHOTOS,
    RESULT_NAME,
    VERSION,
    Evaluation,
    ModelRecord,
    Neighbour,
    Neighbours,
    SampleRecord,
    Score,
    Value,
)
from diffusion.evaluation.metrics.distances import nearest
from diffusion.evaluation.metrics.figures import Metric, name_of

NEIGHBOURS_FOLDER, PHOTOS_FOLDER = 'neighbours', 'photos'  # in OUT
PHOTO_PX = 256  # side of photos there
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
    subject = SubjectEvaluation(request, device) if request.subject is not None else None
    jobs = [prepare(request, device)] if subject is None else subject.jobs
    for job in jobs:
        job.begin()
    if ranks.rank == 0 and (text := announcement(jobs, device, ranks.world_size)):
        print(text, file=sys.stderr, flush=True)
    for job in jobs:
        _compute_real(job, ranks)
        _draw(job, ranks)
    missing = sum(len(job.missing()) + sum(len(real.missing(extractors)) for real, extractors in job.real_parts) for job in jobs)
    if missing and ranks.world_size == 1:
        raise IncompleteError(f'{request.out}: {counted(missing, "part")} vanished while others were written; run the same command again')
    with (request.out / '.scoring.lock').open('w') as file:
        return _score(jobs[0], subject) if not missing and try_lock(file) else None


def _compute_real(job: EvaluationJob, ranks: Ranks) -> None:
    for real, extractors in job.real_parts:
        missing = set(real.missing(extractors))
        own = ranks.own(real.parts)
        with tqdm(own, desc='real images', unit='part', disable=not missing.intersection(own)) as parts:
            for part in parts:
                if part in missing:
                    real.compute(extractors, part)
                    failpoint('evaluation.real')


def _draw(job: EvaluationJob, ranks: Ranks) -> None:
    own, missing = ranks.own(job.work()), set(job.missing())
    todo = [part for part in own if part in missing]
    size = job.protocol.chunk
    with tqdm(total=len(own) * size, initial=(len(own) - len(todo)) * size, desc='draw', unit='image', disable=not todo) as bar:
        for guidance, number in todo:
            _draw_part(job, guidance, number)
            failpoint('evaluation.drawn')
            bar.update(size)


def _draw_part(job: EvaluationJob, guidance: float, number: int) -> None:
    """Draw a chunk and write what is kept of it; its features last, because they are the mark that it is done."""
    start, chunk = time.monotonic(), job.chunks[number]
    images = job.draw(guidance, number)
    seconds = time.monotonic() - start
    features: dict[str, Tensor] = {}
    for extractor in job.extractors:
        features |= in_batches(extractor, images, job.protocol.chunk)
        if isinstance(extractor, TextExtractor) and any(m.needs_captions and m.extractor == extractor.name for m in job.metrics.values()):
            features[_texts_of(extractor.name)] = extractor.texts([prompt.text for prompt in chunk]).float().cpu()
    count = job.chunk_size(number)
    facts: dict[str, Any] = {'seconds': seconds, 'images': count}
    if job.request.keep_images:
        facts['shard'] = keep_chunk(job.images(guidance), number, chunk[:count], images[:count])
    for place, (prompt, image) in enumerate(zip(chunk[:count], images, strict=False), start=number * job.protocol.chunk):
        if place < NUM_SHOWN:
            with replacing(job.sample(guidance, prompt)) as temporary:
                save_png(to_pil(image), temporary, {'prompt': prompt.text, 'seed': str(job.protocol.seed), 'id': str(prompt.id)})
    job.drawn(guidance).put(number, {name: value[:count] for name, value in features.items()}, facts)


def _score(job: EvaluationJob, subject: SubjectEvaluation | None) -> Evaluation:
    """Compute all figures and write evaluation.json; of kept images also what makes them a dataset, of a subject some of its photos.

    Raises:
        DataError: a part is damaged.
        InputError: too few images for a metric.
    """
    request, protocol = job.request, job.protocol
    if request.save_statistics is not None and isinstance(job.real, RealFeatures):
        facts = {'where': job.real.images.where, 'resolution': protocol.resolution, 'resize': protocol.resize, 'extractors': protocol.extractors}
        wanted = [metric for metric in job.metrics.values() if metric.needs_real]
        save_statistics(request.save_statistics, {metric.feature: partial(_load_real, job, metric) for metric in wanted}, facts)
    if subject is None:
        scores, neighbours = _scores(job), find_neighbours(job)
    else:
        scores, neighbours = [_score_at(job, guidance, subject.metrics(guidance)) for guidance in protocol.guidance], None
    for one in [job] if subject is None else subject.jobs:
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
            'where': request.data or str(request.subject),
            'identity': protocol.real['identity'],
            'count': protocol.real['count'],
            'left_out': text_of_left_out(job.real.images) if isinstance(job.real, RealFeatures) else '',
        },
        'scores': scores,
        'neighbours': neighbours,
        'samples': {str(guidance): _samples(job, guidance) for guidance in protocol.guidance},
        'seconds': seconds,
        'images_per_sec': sum(note['images'] for note in notes) / max(seconds, 1e-9),
        'environment': environment(),
    }
    if subject is not None:
        found['photos'] = _save_photos(subject.photos, job.out)
        if subject.floor is not None:
            found['floor'] = _model_record(subject.floor.model)
            for scale, samples in found['samples'].items():
                for sample, before in zip(samples, _samples(subject.floor, float(scale)), strict=True):
                    sample['floor'] = f'{FLOOR}/{before["file"]}'
    write_text(job.out / RESULT_NAME, json.dumps(found, indent=1, ensure_ascii=False) + '\n')
    return found


def _scores(job: EvaluationJob) -> list[Score]:
    """A metric at all guidance scales before the next one: its real features are read once."""
    protocol = job.protocol
    targets = PRESETS[protocol.preset].targets if protocol.preset else {}
    found: dict[float, dict[str, Value]] = {guidance: {} for guidance in protocol.guidance}
    for name, metric in job.metrics.items():
        real = _load_real(job, metric) if metric.needs_real else None
        for guidance in protocol.guidance:
            drawn = job.drawn(guidance)
            texts = drawn.load(_texts_of(metric.extractor)) if metric.needs_captions else None
            for figure, values in metric(real, drawn.load(metric.feature), texts, protocol.seed).items():
                about = metric.figures[figure]
                value: dict[str, Any] = {**values, 'meaning': about.meaning, 'lower_is_better': about.lower_is_better, 'extractor': metric.extractor}
                value |= {'target': targets[name]} if name in targets else {}
                found[guidance][name_of(name, metric, figure)] = cast(Value, value)
    return [_score_at(job, guidance, found[guidance]) for guidance in protocol.guidance]


def _score_at(job: EvaluationJob, guidance: float, metrics: dict[str, Value]) -> Score:
    return {'guidance': guidance, 'count': len(job.prompts), 'metrics': metrics}


def _load_real(job: EvaluationJob, metric: Metric) -> Any:
    """Features (N, D) of the real images, or their saved Gaussian."""
    if isinstance(job.real, Statistics):
        return job.real.gaussians[metric.feature]
    assert job.real is not None
    return job.real.parts_of(next(one for one in job.extractors if one.name == metric.extractor)).load(metric.feature)


def _texts_of(extractor: str) -> str:
    """Name in a part of the embeddings of the captions."""
    return f'{extractor}/captions'


def _save_photos(photos: RealFeatures, out: Path) -> list[str]:
    """Write the first photos below OUT, decoded and encoded again: without the place and the camera that a file from a telephone names."""
    names = [f'{PHOTOS_FOLDER}/{number}.png' for number in sorted(photos.wanted)[:MOST_PHOTOS]]
    for number, name in enumerate(names):
        with replacing(out / name) as temporary:
            save_png(to_pil(pixels(photos.image(number), min(photos.resolution, PHOTO_PX), photos.images.where)), temporary, {})
    return names


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
    extractor = job.neighbour
    if known is None or extractor is None:
        return None
    protocol, guidance, feature = job.protocol, job.protocol.guidance[-1], next(iter(extractor.features))
    features = known.parts_of(extractor).load(feature)
    cosine, index = (found[:, 0] for found in nearest(job.drawn(guidance).load(feature), features))

    threshold, reason, held_out = None, '', job.real
    if not isinstance(held_out, RealFeatures):
        reason = 'saved statistics hold no images to set it by'
    elif held_out.images.identity == known.images.identity:
        reason = 'no images are held out: --training names none, or those of --data'
    else:
        between = nearest(held_out.parts_of(extractor).load(feature), features)[0][:, 0]
        if len(between) < MIN_HELD_OUT:
            needed = f'at least {MIN_HELD_OUT:,} are needed to tell what one in a thousand exceeds'
            reason = f'{counted(len(between), "held-out image")}, and {needed}'
        else:
            threshold = float(torch.quantile(between.double(), PERCENTILE))

    ids = known.parts_of(extractor).load(SAMPLE_ID)
    draw = cache(job.draw)  # again: most images are not kept
    pairs = list[Neighbour]()
    for place in cosine.argsort(descending=True, stable=True)[:NUM_PAIRS].tolist():
        prompt, image = job.prompts[place], known.image(int(ids[index[place]]))
        paths = [f'{NEIGHBOURS_FOLDER}/{prompt.id:06d}-{name}.png' for name in ('drawn', 'known')]
        drawn = draw(guidance, place // protocol.chunk)[place % protocol.chunk]
        of_known = pixels(image, protocol.resolution, known.images.where)
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
        'extractor': extractor.name,
        'guidance': guidance,
        'count_known': len(features),
        'threshold': threshold,
        'no_threshold': reason,
        'share_above': None if threshold is None else float((cosine > threshold).double().mean()),
        'pairs': pairs,
    }
