"""Work of an evaluation that its processes share: parts of real images and chunks of drawn ones become features on the disk.

Features on the disk become figures: one guidance scale and one feature after the other, so that memory holds two arrays of features at a time.

The drawn images that look most like known ones: copies of training images would be among them."""

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
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
from diffusion.evaluation.features.extractors import Extractor, TextExtractor, in_batches
from diffusion.evaluation.job.images import text_of_left_out
from diffusion.evaluation.job.parts import SAMPLE_ID, RealFeatures, Statistics, finish_kept, keep_chunk, pixels, save_statistics
from diffusion.evaluation.job.planning import announcement
from diffusion.evaluation.job.preparing import FLOOR, NUM_SHOWN, PreparedEvaluation, Request, prepare, sample_name
from diffusion.evaluation.job.results import (
    MOST_PHOTOS,
    PRESETS,
    RESULT_NAME,
    VERSION,
    Evaluation,
    ModelRecord,
    Neighbour,
    Neighbours,
    RealRecord,
    SampleRecord,
    Score,
    Value,
)
from diffusion.evaluation.job.subject import SubjectEvaluation
from diffusion.evaluation.metrics.distances import Gaussian, nearest
from diffusion.evaluation.metrics.figures import Metric, name_of

Part = TypeVar('Part')


@dataclass(frozen=True)
class Ranks:
    """Which of the processes this is; each has every `world_size`-th part."""

    rank: int = 0
    world_size: int = 1

    def own(self, parts: Sequence[Part]) -> Sequence[Part]:
        """The parts of this process."""
        return parts[self.rank :: self.world_size]


def launched() -> tuple[Ranks, torch.device]:
    """This process among others and its device, from the environment that composer and torchrun set."""
    rank, world_size = (int(os.environ.get(name) or default) for name, default in (('RANK', 0), ('WORLD_SIZE', 1)))
    return Ranks(rank, world_size), own_device()


def evaluate(request: Request, ranks: Ranks, device: torch.device) -> Evaluation | None:
    """Draw, compute features and score.

    Nothing is sent between processes: each looks at what is on the disk, and the one that finds all parts scores.

    Returns:
        None if parts of other processes are not there yet, or another one is scoring.

    Raises:
        InputError, DataError, EncoderError, CheckpointError: wrong input, with the remedy.
        IncompleteError: this process did all of its parts, and there are no others, but some are missing.
    """
    whole: list[PreparedEvaluation]
    finish: Callable[[], Evaluation]
    if request.subject is not None:
        subject = SubjectEvaluation(request, device)
        whole, finish = subject.all, partial(score_subject, subject)
    else:
        prepared = prepare(request, device)
        whole, finish = [prepared], partial(score, prepared)
    for one in whole:
        one.job.begin()
    if ranks.rank == 0 and (text := announcement([one.job for one in whole], device, ranks.world_size)):
        print(text, file=sys.stderr, flush=True)
    for one in whole:
        _compute_real(one, ranks)
        _draw(one, ranks)
    missing = sum(len(one.job.missing()) + sum(len(real.missing(extractors)) for real, extractors in one.real_parts) for one in whole)
    if missing and ranks.world_size == 1:
        raise IncompleteError(f'{request.out}: {counted(missing, "part")} vanished while others were written; run the same command again')
    with (request.out / '.scoring.lock').open('w') as file:
        return finish() if not missing and try_lock(file) else None


def _compute_real(prepared: PreparedEvaluation, ranks: Ranks) -> None:
    for real, extractors in prepared.real_parts:
        missing = set(real.missing(extractors))
        own = ranks.own(real.parts)
        with tqdm(own, desc='real images', unit='part', disable=not missing.intersection(own)) as parts:
            for part in parts:
                if part in missing:
                    real.compute(extractors, part)
                    failpoint('evaluation.real')


def _draw(prepared: PreparedEvaluation, ranks: Ranks) -> None:
    job = prepared.job
    own, missing = ranks.own(job.work()), set(job.missing())
    todo = [part for part in own if part in missing]
    size = job.protocol.chunk
    with tqdm(total=len(own) * size, initial=(len(own) - len(todo)) * size, desc='draw', unit='image', disable=not todo) as bar:
        for guidance, number in todo:
            _draw_part(prepared, guidance, number)
            failpoint('evaluation.drawn')
            bar.update(size)


def _draw_part(prepared: PreparedEvaluation, guidance: float, number: int) -> None:
    """Draw a chunk and write what is kept of it; its features last, because they are the mark that it is done."""
    job, start = prepared.job, time.monotonic()
    chunk = job.chunks[number]
    images = prepared.draw(guidance, number)
    seconds = time.monotonic() - start
    features: dict[str, Tensor] = {}
    for extractor in prepared.extractors:
        features |= in_batches(extractor, images, job.protocol.chunk)
        if isinstance(extractor, TextExtractor) and any(m.needs_captions and m.extractor == extractor.name for m in prepared.metrics.values()):
            features[texts_of(extractor.name)] = extractor.texts([prompt.text for prompt in chunk]).float().cpu()
    count = job.chunk_size(number)
    facts: dict[str, Any] = {'seconds': seconds, 'images': count}
    if job.keep_images:
        facts['shard'] = keep_chunk(job.images(guidance), number, chunk[:count], images[:count])
    for place, (prompt, image) in enumerate(zip(chunk[:count], images, strict=False), start=number * job.protocol.chunk):
        if place < NUM_SHOWN:
            with replacing(job.samples(guidance) / sample_name(prompt)) as temporary:
                save_png(to_pil(image), temporary, {'prompt': prompt.text, 'seed': str(job.protocol.seed), 'id': str(prompt.id)})
    job.drawn(guidance).put(number, {name: value[:count] for name, value in features.items()}, facts)


PHOTOS_FOLDER = 'photos'  # in OUT
PHOTO_PX = 256  # side of these


def texts_of(extractor: str) -> str:
    """Name in a part of the embeddings of the captions."""
    return f'{extractor}/captions'


def score(prepared: PreparedEvaluation) -> Evaluation:
    """Compute all figures and write evaluation.json. All parts are there.

    Raises:
        DataError: a part is damaged.
        InputError: too few images for a metric.
    """
    job, request = prepared.job, prepared.request
    protocol = job.protocol
    if request.save_statistics is not None and isinstance(prepared.real, RealFeatures):
        facts = {'where': prepared.real.images.where, 'resolution': protocol.resolution, 'resize': protocol.resize, 'extractors': protocol.extractors}
        wanted = [metric for metric in prepared.metrics.values() if metric.needs_real]
        save_statistics(request.save_statistics, {metric.feature: partial(_load_real, prepared, prepared.real, metric) for metric in wanted}, facts)
    return write_result(prepared, _scores(prepared), find_neighbours(prepared))


def score_subject(subject: SubjectEvaluation) -> Evaluation:
    """The same for a subject."""
    job = subject.tuned.job
    scores: list[Score] = [
        {'guidance': guidance, 'count': len(job.prompts), 'metrics': subject.metrics(guidance)} for guidance in job.protocol.guidance
    ]
    if subject.floor is not None:
        _finish_kept(subject.floor)
    return write_result(subject.tuned, scores, None, subject)


def write_result(
    prepared: PreparedEvaluation, scores: list[Score], neighbours: Neighbours | None, subject: SubjectEvaluation | None = None
) -> Evaluation:
    """Write evaluation.json; of kept images also what makes them a dataset, of a subject some of its photos."""
    job = prepared.job
    protocol = job.protocol
    _finish_kept(prepared)
    notes = [note for guidance in protocol.guidance for note in job.drawn(guidance).facts()]
    seconds = sum(note['seconds'] for note in notes)
    found: Evaluation = {
        'version': VERSION,
        'protocol': protocol.to_json(),
        'digest': protocol.digest,
        'model': _model(prepared),
        'real': _real(prepared),
        'scores': scores,
        'neighbours': neighbours,
        'samples': {str(guidance): _samples(prepared, guidance) for guidance in protocol.guidance},
        'seconds': seconds,
        'images_per_sec': sum(note['images'] for note in notes) / max(seconds, 1e-9),
        'environment': environment(),
    }
    if subject is not None:
        found['photos'] = _save_photos(subject)
        if subject.floor is not None:
            found['floor'] = _model(subject.floor)
            for guidance, samples in found['samples'].items():
                for sample, before in zip(samples, _samples(subject.floor, float(guidance)), strict=True):
                    sample['floor'] = f'{FLOOR}/{before["file"]}'
    write_text(job.out / RESULT_NAME, json.dumps(found, indent=1, ensure_ascii=False) + '\n')
    return found


def _finish_kept(prepared: PreparedEvaluation) -> None:
    job, protocol = prepared.job, prepared.job.protocol
    for guidance in protocol.guidance if job.keep_images else ():
        source = {'made_by': 'python -m diffusion.evaluate', 'model': job.model.sha256, 'guidance': guidance, 'protocol': protocol.digest}
        finish_kept(job.images(guidance), [note['shard'] for note in job.drawn(guidance).facts()], source, protocol.resolution)


def _save_photos(subject: SubjectEvaluation) -> list[str]:
    """Write the first photos below OUT, decoded and encoded again: without the place and the camera that a file from a telephone names."""
    photos, out = subject.photos, subject.tuned.job.out
    names = [f'{PHOTOS_FOLDER}/{number}.png' for number in sorted(photos.wanted)[:MOST_PHOTOS]]
    for number, name in enumerate(names):
        with replacing(out / name) as temporary:
            save_png(to_pil(pixels(photos.image(number), min(photos.resolution, PHOTO_PX), photos.images.where)), temporary, {})
    return names


def _scores(prepared: PreparedEvaluation) -> list[Score]:
    """A metric at all guidance scales before the next one: its real features are read once."""
    job, protocol = prepared.job, prepared.job.protocol
    found: dict[float, dict[str, Value]] = {guidance: {} for guidance in protocol.guidance}
    for name, metric in prepared.metrics.items():
        real = _real_features(prepared, metric) if metric.needs_real else None
        for guidance in protocol.guidance:
            drawn = job.drawn(guidance)
            texts = drawn.load(texts_of(metric.extractor)) if metric.needs_captions else None
            values = metric(real, drawn.load(metric.feature), texts, protocol.seed)
            for figure, value in values.items():
                found[guidance][name_of(name, metric, figure)] = _value(prepared, name, metric, figure, value)
    return [{'guidance': guidance, 'count': len(job.prompts), 'metrics': found[guidance]} for guidance in protocol.guidance]


def _value(prepared: PreparedEvaluation, name: str, metric: Metric, figure: str, value: Mapping[str, float]) -> Value:
    described = metric.figures[figure]
    found: dict[str, Any] = {**value, 'meaning': described.meaning, 'lower_is_better': described.lower_is_better, 'extractor': metric.extractor}
    preset = prepared.job.protocol.preset
    if preset and name in PRESETS[preset].targets:
        found['target'] = PRESETS[preset].targets[name]
    return cast(Value, found)


def _real_features(prepared: PreparedEvaluation, metric: Metric) -> Tensor | Gaussian:
    if isinstance(prepared.real, Statistics):
        return prepared.real.gaussians[metric.feature]
    assert prepared.real is not None
    return _load_real(prepared, prepared.real, metric)


def _load_real(prepared: PreparedEvaluation, real: RealFeatures, metric: Metric) -> Tensor:
    extractor = next(one for one in prepared.extractors if one.name == metric.extractor)
    return real.parts_of(extractor).load(metric.feature)


def _model(prepared: PreparedEvaluation) -> ModelRecord:
    model = prepared.job.model
    return {'where': model.asked, 'sha256': model.sha256, 'label': model.label, 'batches': model.facts.get('batches')}


def _real(prepared: PreparedEvaluation) -> RealRecord:
    where = prepared.request.data or str(prepared.request.subject)
    protocol = prepared.job.protocol.real
    left_out = text_of_left_out(prepared.real.images) if isinstance(prepared.real, RealFeatures) else ''
    return {'where': where, 'identity': protocol['identity'], 'count': protocol['count'], 'left_out': left_out}


def _samples(prepared: PreparedEvaluation, guidance: float) -> list[SampleRecord]:
    folder = prepared.job.samples(guidance).relative_to(prepared.job.out)
    shown = prepared.job.prompts[:NUM_SHOWN]
    return [{'file': (folder / sample_name(prompt)).as_posix(), 'id': prompt.id, 'prompt': prompt.text} for prompt in shown]


NUM_PAIRS = 10
PERCENTILE = 0.999  # of held-out real images: as many of them are more similar to a known one
MIN_HELD_OUT = 1000  # one image lies above the percentile; of fewer images it would be no more than the largest cosine
FOLDER = 'neighbours'


def find_neighbours(prepared: PreparedEvaluation) -> Neighbours | None:
    """The most similar pairs at the highest guidance scale, where copies are most frequent; their images are written as PNG.

    With `--training` the real images that are scored against are held out, and how similar they come to training images is the
    threshold above which a drawn image is suspicious.
    """
    known = prepared.known or (prepared.real if isinstance(prepared.real, RealFeatures) else None)
    extractor = prepared.neighbour
    if known is None or extractor is None:
        return None
    guidance, feature = prepared.job.protocol.guidance[-1], next(iter(extractor.features))
    features = known.parts_of(extractor).load(feature)
    cosine, index = (found[:, 0] for found in nearest(prepared.job.drawn(guidance).load(feature), features))
    threshold, reason = _threshold(prepared, known, extractor, feature, features)
    chunk = prepared.job.protocol.chunk
    draw = cache(prepared.draw)  # again: most images are not kept

    def drawn(place: int) -> Tensor:
        return draw(guidance, place // chunk)[place % chunk]

    ids = known.parts_of(extractor).load(SAMPLE_ID)
    most = cosine.argsort(descending=True, stable=True)[:NUM_PAIRS].tolist()
    return {
        'extractor': extractor.name,
        'guidance': guidance,
        'count_known': len(features),
        'threshold': threshold,
        'no_threshold': reason,
        'share_above': None if threshold is None else float((cosine > threshold).double().mean()),
        'pairs': [_pair(prepared, known, drawn(place), place, int(ids[index[place]]), float(cosine[place])) for place in most],
    }


def _threshold(prepared: PreparedEvaluation, known: RealFeatures, extractor: Extractor, feature: str, features: Tensor) -> tuple[float | None, str]:
    """The threshold, or None and the reason."""
    held_out = prepared.real
    if not isinstance(held_out, RealFeatures):
        return None, 'saved statistics hold no images to set it by'
    if held_out.images.identity == known.images.identity:
        return None, 'no images are held out: --training names none, or those of --data'
    cosine = nearest(held_out.parts_of(extractor).load(feature), features)[0][:, 0]
    if len(cosine) < MIN_HELD_OUT:
        return None, f'{counted(len(cosine), "held-out image")}, and at least {MIN_HELD_OUT:,} are needed to tell what one in a thousand exceeds'
    return float(torch.quantile(cosine.double(), PERCENTILE)), ''


def _pair(prepared: PreparedEvaluation, known: RealFeatures, drawn: Tensor, place: int, known_id: int, cosine: float) -> Neighbour:
    protocol, prompt, image = prepared.job.protocol, prepared.job.prompts[place], known.image(known_id)
    return {
        'drawn': _save(prepared, drawn, f'{prompt.id:06d}-drawn.png', prompt.text),
        'known': _save(prepared, pixels(image, protocol.resolution, known.images.where), f'{prompt.id:06d}-known.png', image.key),
        'key': image.key,
        'cosine': cosine,
        'caption': prompt.text,
        'known_caption': image.caption(protocol.seed) or '',
    }


def _save(prepared: PreparedEvaluation, image: Tensor, name: str, text: str) -> str:
    path = Path(FOLDER, name)
    with replacing(prepared.job.out / path) as temporary:
        save_png(to_pil(image), temporary, {'text': text})
    return path.as_posix()
