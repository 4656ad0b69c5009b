"""Evaluations next to each other: which may be compared, in what they differ, and which differences are more than chance.

An autoencoder is a model with one score, at guidance 0.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from diffusion.common.text import brief, counted
from diffusion.evaluation.job.results import (
    INTERVAL_ERRORS,
    OF_STATISTICS,
    PHOTOS,
    RECONSTRUCTION_NAME,
    AutoencoderRecord,
    Evaluation,
    Reconstructions,
    Value,
    read_evaluation,
    read_reconstructions,
    with_error,
)

DIMENSIONS = {'fid': 2048, 'fid_clean': 2048, 'fd_dinov2': 1024}  # of the features; with fewer images their covariances are singular
NOT_COMPARED = ('preset', 'guidance', 'metrics')  # fields of the protocol that no single number depends on
TITLES = {
    'fid': 'FID', 'fid_clean': 'FID, clean resize', 'kid': 'KID', 'kid_clean': 'KID, clean resize', 'cmmd': 'CMMD', 'clip': 'CLIP score',
    'fd_dinov2': 'FD-DINOv2', 'mmd_dinov2': 'DINO-MMD', 'pickscore': 'PickScore', 'hpsv2': 'HPSv2.1',
    'clip_i': 'CLIP-I', 'dino': 'DINO', 'clip_t': 'CLIP-T', 'psnr': 'PSNR (dB)', 'ssim': 'SSIM', 'lpips': 'LPIPS',
}  # fmt: skip
ESTIMATES = (  # that come with a metric: name in the result, what the title gets, meaning
    ('at_infinity', ' at infinity', 'The same, extrapolated to infinitely many images: less of it is due to the count.'),
    ('unbiased', ', unbiased', 'The same without the bias of small counts; may be negative.'),
)
Marks = dict[tuple[str, float], str]  # `best` and `tied` by model and guidance


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


def interval(point: Value) -> tuple[float, float]:
    reach = INTERVAL_ERRORS * point.get('error', 0.0)
    return point['value'] - reach, point['value'] + reach


def _overlap(one: Value, other: Value) -> bool:
    """Whether chance may explain the difference, as far as errors are known."""
    (low, high), (other_low, other_high) = interval(one), interval(other)
    return 'error' in one and 'error' in other and low <= other_high and other_low <= high


@dataclass(frozen=True)
class Scored:
    """An evaluated model or autoencoder, and its name among those of the page."""

    name: str
    folder: Path
    result: Evaluation
    autoencoder: AutoencoderRecord | None = None
    reconstructions: Reconstructions | None = None  # the result of which the autoencoder is a part

    @cached_property
    def curves(self) -> dict[Measure, dict[float, Value]]:
        """Points by guidance scale, in the order of the metrics; numbers that are not finite are left out."""
        found: dict[Measure, dict[float, Value]] = {}
        for score in sorted(self.result['scores'], key=lambda score: score['guidance']):
            for key, value in score['metrics'].items():
                for measure, point in _measures(key, value, self.autoencoder is not None):
                    curve = found.setdefault(measure, {})
                    if 'value' in point:
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

    @property
    def of_autoencoders(self) -> bool:
        return self.models[0].autoencoder is not None

    @cached_property
    def measures(self) -> list[Measure]:
        return list(dict.fromkeys(measure for model in self.models for measure in model.curves))

    @cached_property
    def guidance(self) -> list[float]:
        return sorted({score['guidance'] for model in self.models for score in model.result['scores']})

    def marks(self, measure: Measure) -> Marks:
        """Mark the best model at each guidance (of a single model: the best guidance), and those from which chance may part it."""
        if len(self.models) == 1:
            best, tied = best_of(self.models[0].curves[measure], measure)
            return {(self.models[0].name, guidance): 'best' if guidance == best else 'tied' for guidance in (best, *tied) if guidance is not None}
        marks: Marks = {}
        for guidance in self.guidance:
            first, close = best_of(self.at_guidance(measure, guidance), measure)
            of_pairs = self.models[0].reconstructions
            if of_pairs is not None and len({model.folder for model in self.models}) == 1 and measure.key in of_pairs['standings']:
                standing = of_pairs['standings'][measure.key]  # by differences on the same images, which say more than intervals
                first, close = standing['best'], standing['tied']
            marks |= {(first, guidance): 'best', **{(name, guidance): 'tied' for name in close}}
        return marks

    def at_guidance(self, measure: Measure, guidance: float) -> dict[str, Value]:
        """Points of the models that have this measure at this scale, by the model's name."""
        curves = {model.name: model.curves.get(measure, {}) for model in self.models}
        return {name: curve[guidance] for name, curve in curves.items() if guidance in curve}


def read_models(folders: Sequence[Path]) -> list[Scored]:
    """Read evaluations, and name the models by label; with their batches, or by number and folder, where labels repeat.

    Raises:
        InputError: a folder holds no evaluation, or a damaged one.
    """
    found = [scored for folder in folders for scored in _read(folder)]
    labels = [_printable(one.result['model']['label'] or one.folder.resolve().name) for one in found]
    batches = [one.result['model']['batches'] for one in found]
    with_batches = [label if batch is None else f'{label}, batch {batch:,}' for label, batch in zip(labels, batches, strict=True)]
    places = [str(one.folder) if one.autoencoder is None else one.autoencoder['where'] for one in found]
    numbered = [f'{number}: {_printable(place)}' for number, place in enumerate(places, 1)]
    names = next(names for names in (labels, with_batches, numbered) if len(set(names)) == len(names))
    return [replace(one, name=name) for one, name in zip(found, names, strict=True)]


def _read(folder: Path) -> list[Scored]:
    if not (folder / RECONSTRUCTION_NAME).exists():
        return [Scored('', folder, read_evaluation(folder))]
    found = read_reconstructions(folder)
    models = []
    for one in found['autoencoders']:
        result: Evaluation = {
            'version': found['version'],
            'protocol': found['protocol'],
            'digest': found['digest'],
            'real': found['real'],
            'environment': found['environment'],
            'model': {'where': one['where'], 'sha256': one['sha256'], 'label': one['name'], 'batches': None},
            'scores': [{'guidance': 0.0, 'count': found['real']['count'], 'metrics': one['metrics']}],
            'neighbours': None,
            'samples': {'0.0': one['samples']},
            'seconds': found['real']['count'] / max(one['images_per_sec'], 1e-9),
            'images_per_sec': one['images_per_sec'],
        }
        models.append(Scored('', folder, result, one, found))
    return models


def groups(models: Sequence[Scored]) -> list[Group]:
    """Sort models by protocol, in their order; scales of guidance, the list of metrics and the preset's name may differ."""
    by_protocol: dict[str, list[Scored]] = {}
    for model in models:
        protocol = {field: value for field, value in model.result['protocol'].items() if field not in NOT_COMPARED}
        by_protocol.setdefault(json.dumps(protocol, sort_keys=True), []).append(model)
    return [Group(chr(ord('A') + number) if number < 26 else str(number + 1), members) for number, members in enumerate(by_protocol.values())]


def best_of(points: Mapping[Any, Value], measure: Measure) -> tuple[Any, list[Any]]:
    """Return the key of the best point, and the keys of those whose intervals overlap its interval; (None, []) for fewer than two."""
    if len(points) < 2:
        return None, []
    best = (min if measure.lower_is_better else max)(points, key=lambda key: points[key]['value'])
    return best, [key for key, point in points.items() if key != best and _overlap(point, points[best])]


def warnings(group: Group) -> list[str]:
    """Sentences about what makes the numbers of a group less than they seem."""
    protocol, real = group.protocol, group.models[0].result['real']
    found = list[str]()
    for model in group.models:
        short = [f'{score["count"]:,} at guidance {score["guidance"]:g}' for score in model.result['scores'] if score['count'] != protocol['samples']]
        if short:
            found.append(f'{model.name}: the protocol asks for {counted(protocol["samples"], "image")}, drawn were {", ".join(short)}.')
    if real['where'] and real['count'] != protocol['samples'] and protocol['real'].get('kind') != PHOTOS:
        found.append(f'{counted(protocol["samples"], "drawn image")} are compared with {real["count"]:,} real ones: the counts differ.')
    for measure in (measure for measure in group.measures if protocol['samples'] < DIMENSIONS.get(measure.key, 0) and not group.of_autoencoders):
        found.append(
            f'{measure.title} from {counted(protocol["samples"], "image")}: fewer than the {DIMENSIONS[measure.key]:,} dimensions of its features, '
            'so it is mostly bias; read KID, DINO-MMD or CMMD.'
        )
    if protocol['real'].get('kind') == 'statistics':
        found.append(OF_STATISTICS)
    if real['left_out']:
        found.append(f'Not among the {"" if group.of_autoencoders else "real "}images: {real["left_out"]}.')
    for model in group.models:
        if model.autoencoder is not None:
            found += [f'{model.name}: {line}' for line in model.autoencoder['warnings']]
        if model.reconstructions is not None and (count := model.reconstructions['enlarged']):
            smaller = f'{counted(count, "image")} {"is" if count == 1 else "are"} smaller than {protocol["resolution"]} px'
            found.append(f'{smaller} and enlarged: the figures are too good; set --resolution lower.')
    made_here = [name for name in protocol['extractors'] if 'random' in name]
    if made_here:
        found.append(f'{", ".join(made_here)}: no published feature network; its distances can be compared with each other only.')
    return list(dict.fromkeys(found if group.of_autoencoders else found + _overlaps(group)))


def _overlaps(group: Group) -> list[str]:
    """A sentence about the measures whose best model (for a single model: guidance) does not stand out, if there are any."""
    found = list[str]()
    for measure in (measure for measure in group.measures if measure.has_curve):
        marks = group.marks(measure)
        scales = ', '.join(f'{guidance:g}' for guidance in sorted({guidance for (_, guidance), mark in marks.items() if mark == 'tied'}))
        if scales and len(group.models) == 1:
            best = next(guidance for (_, guidance), mark in marks.items() if mark == 'best')
            found.append(f'{measure.title}: {best:g} with {scales}')
        elif scales:
            found.append(f'{measure.title} at guidance {scales}')
    whose = 'The interval of the best guidance overlaps with others' if len(group.models) == 1 else "The best model's interval overlaps with others"
    return [f'{whose} (≈ in the table): {"; ".join(found)}.'] if found else []


def one_line(model: Scored) -> str:
    """The protocol in a sentence, to be copied with a number."""
    protocol = model.result['protocol']

    def listed(field: str) -> str:
        return ', '.join(f'{name} {brief(str(value))}' for name, value in protocol[field].items())

    images, ending = counted(protocol['samples'], 'image'), f'features: {listed("extractors")}; protocol {model.result["digest"]}'
    if model.autoencoder is not None:
        return (
            f'{images} of {protocol["resolution"]} px, seed {protocol["seed"]}, {protocol["resize"]}; {protocol["latents"]}, '
            f'{protocol["precision"]}, 8-bit images; real: {listed("real")}; {ending}'
        )
    return (
        f'{images} of {protocol["resolution"]} px, {protocol["sampler"]}, {counted(protocol["steps"], "step")}, '
        f'guidance {", ".join(f"{guidance:g}" for guidance in protocol["guidance"])}, seed {protocol["seed"]}, {protocol["precision"]} '
        f'in chunks of {protocol["chunk"]}; real: {listed("real")}, {protocol["resize"]}; prompts: {listed("prompts")}; {ending}'
    )


def format_point(point: Value) -> str:
    """Return `12.31 ± 0.12`."""
    return with_error(point['value'], point.get('error'))


def measure_of(key: str, value: Value, of_reconstructions: bool = False) -> Measure:
    """Return a metric by its name in a result; the FID of reconstructions is rFID."""
    kind, _, network = _printable(key).partition('@')
    title = TITLES.get(kind, kind.replace('_', ' ')) + (f' ({network})' if network else '')
    meaning = value.get('meaning', '')
    sentence = f'{meaning[:1].upper()}{meaning[1:]}{"" if meaning.endswith(".") else "."}' if meaning else ''
    return Measure(key, f'r{title}' if of_reconstructions and kind.startswith('fid') else title, value.get('lower_is_better', True), sentence)


def _measures(key: str, value: Value, of_reconstructions: bool) -> Iterator[tuple[Measure, Value]]:
    """A metric at a guidance scale and each estimate that comes with it, without numbers that are not finite."""
    main = measure_of(key, value, of_reconstructions)
    finite: Any = {name: number for name, number in value.items() if isinstance(number, int | float) and math.isfinite(number)}
    yield main, finite
    for name, suffix, meaning in ESTIMATES:
        if name in finite:
            yield Measure(f'{key}/{name}', f'{main.title}{suffix}', main.lower_is_better, meaning, has_curve=False), {'value': finite[name]}


def _printable(text: str) -> str:
    """Without halves of surrogate pairs, which no figure can hold."""
    return text.encode('utf-8', 'replace').decode()
