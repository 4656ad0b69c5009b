"""Evaluations next to each other: which may be compared, in what they differ, and which differences are more than chance."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from diffusion.common.text import brief, counted
from diffusion.evaluation.job.results import INTERVAL_ERRORS, OF_STATISTICS, PHOTOS, Evaluation, Value, read_evaluation, with_error

INCEPTION_FEATURES = 2048  # with fewer images than this the covariances of FID are singular
NOT_COMPARED = ('preset', 'guidance', 'metrics')  # fields of the protocol that no single number depends on
TITLES = {
    'fid': 'FID', 'fid_clean': 'FID, clean resize', 'kid': 'KID', 'kid_clean': 'KID, clean resize', 'cmmd': 'CMMD', 'clip': 'CLIP score',
    'clip_i': 'CLIP-I', 'dino': 'DINO', 'clip_t': 'CLIP-T', 'psnr': 'PSNR (dB)', 'ssim': 'SSIM', 'lpips': 'LPIPS',
}  # fmt: skip
ESTIMATES = (  # that come with a metric: name in the result, what the title gets, meaning
    ('at_infinity', ' at infinity', 'The same, extrapolated to infinitely many images: less of it is due to the count.'),
    ('unbiased', ', unbiased', 'The same without the bias of small counts; may be negative.'),
)


@dataclass(frozen=True)
class Measure:
    """A metric, or an estimate that comes with it.

    Attributes:
        key: as in the result: `kid`, `kid@random-conv`; for an estimate with its name behind a slash.
        meaning: one sentence.
        has_curve: drawn over guidance; the estimates are not.
    """

    key: str
    title: str
    lower_is_better: bool
    meaning: str
    has_curve: bool = True

    @property
    def kind(self) -> str:
        """Name in METRICS, without that of another feature network."""
        return self.key.partition('@')[0]

    @property
    def direction(self) -> str:
        return f'{"lower" if self.lower_is_better else "higher"} is better'

    @property
    def arrow(self) -> str:
        return '↓' if self.lower_is_better else '↑'


@dataclass(frozen=True)
class ScorePoint:
    """A number at one guidance scale.

    Attributes:
        error: one standard deviation; None if it was not estimated.
        null: the same between two halves of the real images, of `null_count` each.
        target: what a benchmark asks for.
        floor: of a subject, the same of the model before fine-tuning.
        ceiling: of a subject, the same of its photos among themselves.
    """

    value: float
    error: float | None = None
    null: float | None = None
    null_count: int | None = None
    target: float | None = None
    floor: float | None = None
    ceiling: float | None = None

    @property
    def interval(self) -> tuple[float, float]:
        reach = INTERVAL_ERRORS * (self.error or 0.0)
        return self.value - reach, self.value + reach

    def overlaps(self, other: Self) -> bool | None:
        """Return whether chance may explain the difference; None if an error is not known."""
        if self.error is None or other.error is None:
            return None
        return self.interval[0] <= other.interval[1] and other.interval[0] <= self.interval[1]


@dataclass(frozen=True)
class Scored:
    """An evaluated model, and its name among those of the page."""

    name: str
    folder: Path
    result: Evaluation

    @cached_property
    def curves(self) -> dict[Measure, dict[float, ScorePoint]]:
        """Points by guidance scale, in the order of the metrics; numbers that are not finite are left out."""
        found: dict[Measure, dict[float, ScorePoint]] = {}
        for score in sorted(self.result['scores'], key=lambda score: score['guidance']):
            for key, value in score['metrics'].items():
                for measure, point in _measures(key, value):
                    curve = found.setdefault(measure, {})
                    if math.isfinite(point.value):
                        curve[score['guidance']] = point
        return found


@dataclass(frozen=True)
class Group:
    """Models with one protocol: their numbers may be compared."""

    letter: str
    models: Sequence[Scored]

    @property
    def protocol(self) -> dict[str, Any]:
        return self.models[0].result['protocol']

    @cached_property
    def measures(self) -> list[Measure]:
        return list(dict.fromkeys(measure for model in self.models for measure in model.curves))

    @cached_property
    def guidance(self) -> list[float]:
        return sorted({score['guidance'] for model in self.models for score in model.result['scores']})


def read_models(folders: Sequence[Path]) -> list[Scored]:
    """Read evaluations, and name the models by label; with their batches, or by number and folder, where labels repeat.

    Raises:
        InputError: a folder holds no evaluation, or a damaged one.
    """
    results = [read_evaluation(folder) for folder in folders]
    labels = [_printable(result['model']['label'] or folder.resolve().name) for folder, result in zip(folders, results, strict=True)]
    batches = [result['model']['batches'] for result in results]
    with_batches = [label if batch is None else f'{label}, batch {batch:,}' for label, batch in zip(labels, batches, strict=True)]
    numbered = [f'{number}: {_printable(str(folder))}' for number, folder in enumerate(folders, 1)]
    names = next(names for names in (labels, with_batches, numbered) if len(set(names)) == len(names))
    return [Scored(*model) for model in zip(names, folders, results, strict=True)]


def groups(models: Sequence[Scored]) -> list[Group]:
    """Sort models by protocol, in their order; scales of guidance, the list of metrics and the preset's name may differ."""
    by_protocol: dict[str, list[Scored]] = {}
    for model in models:
        protocol = {field: value for field, value in model.result['protocol'].items() if field not in NOT_COMPARED}
        by_protocol.setdefault(json.dumps(protocol, sort_keys=True), []).append(model)
    return [Group(chr(ord('A') + number) if number < 26 else str(number + 1), members) for number, members in enumerate(by_protocol.values())]


def best_of(points: Mapping[Any, ScorePoint], measure: Measure) -> tuple[Any, list[Any]]:
    """Return the key of the best point, and the keys of those whose intervals overlap its interval; (None, []) for fewer than two."""
    if len(points) < 2:
        return None, []
    best = (min if measure.lower_is_better else max)(points, key=lambda key: points[key].value)
    return best, [key for key, point in points.items() if key != best and point.overlaps(points[best])]


def warnings(group: Group) -> list[str]:
    """Sentences about what makes the numbers of a group less than they seem."""
    protocol = group.protocol
    found = list[str]()
    for model in group.models:
        short = [f'{score["count"]:,} at guidance {score["guidance"]:g}' for score in model.result['scores'] if score['count'] != protocol['samples']]
        if short:
            found.append(f'{model.name}: the protocol asks for {counted(protocol["samples"], "image")}, drawn were {", ".join(short)}.')
    num_real = group.models[0].result['real']['count']
    if num_real != protocol['samples'] and protocol['real'].get('kind') != PHOTOS:
        found.append(f'{counted(protocol["samples"], "drawn image")} are compared with {num_real:,} real ones: the counts differ.')
    if protocol['samples'] < INCEPTION_FEATURES and any(measure.key in ('fid', 'fid_clean') for measure in group.measures):
        found.append(
            f'FID from {counted(protocol["samples"], "image")}: fewer than the {INCEPTION_FEATURES:,} dimensions of its features, '
            'so it is mostly bias; read KID or CMMD.'
        )
    if protocol['real'].get('kind') == 'statistics':
        found.append(OF_STATISTICS)
    left_out = group.models[0].result['real'].get('left_out')
    if left_out:
        found.append(f'Not among the real images: {left_out}.')
    made_here = [name for name in protocol['extractors'] if 'random' in name]
    if made_here:
        found.append(f'{", ".join(made_here)}: no published feature network; its distances can be compared with each other only.')
    return found + _overlaps(group)


def _overlaps(group: Group) -> list[str]:
    """A sentence about the measures whose best model (for a single model: guidance) does not stand out, if there are any."""
    found = list[str]()
    for measure in (measure for measure in group.measures if measure.has_curve):
        if len(group.models) == 1:
            best, tied = best_of(group.models[0].curves[measure], measure)
            found += [f'{measure.title}: {best:g} with {_listed(tied)}'] if tied else []
        else:
            tied = [guidance for guidance in group.guidance if best_of(at_guidance(group, measure, guidance), measure)[1]]
            found += [f'{measure.title} at guidance {_listed(tied)}'] if tied else []
    whose = 'The interval of the best guidance overlaps with others' if len(group.models) == 1 else "The best model's interval overlaps with others"
    return [f'{whose} (≈ in the table): {"; ".join(found)}.'] if found else []


def _listed(scales: Sequence[float]) -> str:
    return ', '.join(f'{guidance:g}' for guidance in sorted(scales))


def at_guidance(group: Group, measure: Measure, guidance: float) -> dict[str, ScorePoint]:
    """Points of the models that have this measure at this scale, by the model's name."""
    curves = {model.name: model.curves.get(measure, {}) for model in group.models}
    return {name: curve[guidance] for name, curve in curves.items() if guidance in curve}


def one_line(protocol: Mapping[str, Any], digest: str) -> str:
    """The protocol in a sentence, to be copied with a number."""
    real, prompts, features = (
        ', '.join(f'{name} {brief(str(value))}' for name, value in protocol[field].items()) for field in ('real', 'prompts', 'extractors')
    )
    return (
        f'{counted(protocol["samples"], "image")} of {protocol["resolution"]} px, {protocol["sampler"]}, {counted(protocol["steps"], "step")}, '
        f'guidance {", ".join(f"{guidance:g}" for guidance in protocol["guidance"])}, seed {protocol["seed"]}, {protocol["precision"]} '
        f'in chunks of {protocol["chunk"]}; real: {real}, {protocol["resize"]}; '
        f'prompts: {prompts}; features: {features}; protocol {digest}'
    )


def format_point(point: ScorePoint) -> str:
    """Return `12.31 ± 0.12`."""
    return with_error(point.value, point.error)


def measure_of(key: str, value: Value, of_reconstructions: bool = False) -> Measure:
    """Return a metric by its name in a result; the FID of reconstructions is rFID."""
    kind, _, network = _printable(key).partition('@')
    title = TITLES.get(kind, kind.replace('_', ' ')) + (f' ({network})' if network else '')
    meaning = value.get('meaning', '')
    sentence = f'{meaning[:1].upper()}{meaning[1:]}{"" if meaning.endswith(".") else "."}' if meaning else ''
    return Measure(key, f'r{title}' if of_reconstructions and kind.startswith('fid') else title, value.get('lower_is_better', True), sentence)


def _measures(key: str, value: Value) -> Iterator[tuple[Measure, ScorePoint]]:
    """A metric at a guidance scale as single numbers: its own, and the estimates that come with it."""
    main = measure_of(key, value)
    error, null, null_count, *references = (_optional(value.get(name)) for name in ('error', 'null', 'null_count', 'target', 'floor', 'ceiling'))
    yield main, ScorePoint(_number(value.get('value')), error, null, int(null_count) if null_count else None, *references)
    for name, suffix, meaning in ESTIMATES:
        if name in value:
            estimate = Measure(f'{key}/{name}', f'{main.title}{suffix}', main.lower_is_better, meaning, has_curve=False)
            yield estimate, ScorePoint(_number(value.get(name)))


def flat(protocol: Mapping[str, Any]) -> dict[str, Any]:
    """A protocol whose lists are text."""
    return {field: ', '.join(map(str, value)) if isinstance(value, list) else value for field, value in protocol.items()}


def _number(value: Any) -> float:
    """NaN for what was not measured."""
    return float(value) if isinstance(value, int | float) else math.nan


def _optional(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _printable(text: str) -> str:
    """Without halves of surrogate pairs, which no figure can hold."""
    return text.encode('utf-8', 'replace').decode()
