"""Features on the disk become figures: one guidance scale and one feature after the other, so that memory holds two arrays of features at a time."""

import json
from collections.abc import Mapping
from functools import partial
from typing import Any, cast

from torch import Tensor

from diffusion.common.environment import environment
from diffusion.common.files import replacing, write_text
from diffusion.common.images import save_png, to_pil
from diffusion.evaluation.distances import Gaussian
from diffusion.evaluation.features import RealFeatures, pixels
from diffusion.evaluation.images import text_of_left_out
from diffusion.evaluation.job import FLOOR, NUM_SHOWN, sample_name
from diffusion.evaluation.kept import finish_kept
from diffusion.evaluation.metrics import Metric, name_of
from diffusion.evaluation.neighbours import find_neighbours
from diffusion.evaluation.page import write_page
from diffusion.evaluation.preparing import PreparedEvaluation
from diffusion.evaluation.protocol import PRESETS
from diffusion.evaluation.results import (
    MOST_PHOTOS,
    PAGE_NAME,
    RESULT_NAME,
    VERSION,
    Evaluation,
    ModelRecord,
    Neighbours,
    RealRecord,
    SampleRecord,
    Score,
    Value,
)
from diffusion.evaluation.statistics import Statistics, save_statistics
from diffusion.evaluation.subject import SubjectEvaluation

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
    """Write evaluation.json and its page; of kept images also what makes them a dataset, of a subject some of its photos."""
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
    result = json.dumps(found, indent=1, ensure_ascii=False) + '\n'
    write_text(job.out / RESULT_NAME, result)
    write_page([job.out], job.out / PAGE_NAME)
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
