"""The page of an evaluation, or of several: scores with intervals, curves over guidance, samples by prompt, nearest neighbours, the protocol."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diffusion.common.images import InlineImage, to_inline
from diffusion.common.pages import write_page as render
from diffusion.common.text import differences, leaves
from diffusion.contracts.errors import InputError
from diffusion.datasets.decode import ImageError, open_image
from diffusion.evaluation.comparing import (
    NOT_COMPARED,
    Group,
    Measure,
    Scored,
    at_guidance,
    best_of,
    format_point,
    groups,
    one_line,
    read_models,
    warnings,
)
from diffusion.evaluation.figures import against_clip, over_guidance
from diffusion.evaluation.results import CEILING_TITLE, FLOOR_TITLE, MOST_PHOTOS, SampleRecord

THUMBNAIL_PX = 160
MOST_IMAGES = 192  # samples of all models in a page: 3 MB if they are as hard to compress as noise
MOST_PROMPTS = 12
MOST_PAIRS = 10  # of drawn images and their neighbours, for one model; several share twice as many
TEXT_LIMIT = 300  # letters of a caption


@dataclass(frozen=True)
class ScoreCell:
    """A number of the table: `mark` is `best`, `tied` (its interval overlaps with the best one's) or nothing."""

    text: str
    mark: str = ''


@dataclass(frozen=True)
class ScoreRows:
    """The rows of a measure: a model's name, and a cell for each guidance scale of the group.

    Attributes:
        null: the same between two halves of the real images; empty if it was not measured.
        references: what all numbers may be held against: `target 90`, and a subject's floor and ceiling; may be empty.
        reference_rows: those that differ between scales or models, as rows.
    """

    measure: Measure
    rows: list[tuple[str, list[ScoreCell]]]
    null: str
    references: str
    reference_rows: list[tuple[str, list[ScoreCell]]]


@dataclass(frozen=True)
class Sheet:
    """Images of one prompt: a row a model, an image a guidance scale."""

    prompt: str
    rows: list[tuple[str, list[InlineImage]]]


@dataclass(frozen=True)
class NeighbourPair:
    """A drawn image and its nearest neighbour; an image that is not there is None."""

    drawn: InlineImage | None
    known: InlineImage | None
    cosine: float
    is_above: bool
    caption: str
    known_caption: str
    key: str


def write_page(folders: Sequence[Path], out: Path) -> None:
    """Write one page about the evaluations in these folders.

    Raises:
        InputError: no folder is given, one holds no evaluation, or a damaged one.
    """
    if not folders:
        raise InputError('no evaluation was given')
    models = read_models(folders)
    grouped = groups(models)
    prompts, shown = sheets(models)
    render(
        out,
        'evaluation.html',
        title=f'{models[0].name}: evaluation' if len(models) == 1 else f'Evaluation of {len(models)} models',
        models=models,
        groups=grouped,
        numbers=headline(models[0]) if len(models) == 1 else [],
        warnings={group.letter: warnings(group) for group in grouped},
        tables={group.letter: table(group) for group in grouped},
        figures={group.letter: [*against_clip(group), *over_guidance(group)] for group in grouped},
        differences=differences({group.letter: group.protocol for group in grouped}, NOT_COMPARED),
        measures=list(dict.fromkeys(measure for group in grouped for measure in group.measures)),
        photos=photos(models),
        sheets=shown,
        classes=list(dict.fromkeys(model.result['protocol']['prompts'].get('class', '') for model in models if 'floor' in model.result)),
        num_prompts=prompts,
        neighbours=[(model, pairs(model, len(models))) for model in models if model.result['neighbours']],
        protocols={group.letter: protocol_rows(group) for group in grouped},
        lines={model.name: one_line(model.result['protocol'], model.result['digest']) for model in models},
        about=about(models),
    )


def headline(model: Scored) -> list[tuple[str, str]]:
    """(label, value) of the best of each measure over guidance."""
    numbers = []
    for measure, curve in model.curves.items():
        if measure.has_curve and curve:
            guidance = (min if measure.lower_is_better else max)(curve, key=lambda scale: curve[scale].value)
            numbers.append((f'{measure.title}, guidance\N{NO-BREAK SPACE}{guidance:g}', _without_error(format_point(curve[guidance]))))
    return numbers


def _without_error(text: str) -> str:
    """`12.31` of `12.31 ± 0.12`; `(12 ± 4)e-6` stays whole."""
    return text if text.startswith('(') else text.partition(' ')[0]


def table(group: Group) -> list[ScoreRows]:
    """The numbers of a group, by measure."""
    return [_part(group, measure) for measure in group.measures]


def _part(group: Group, measure: Measure) -> ScoreRows:
    marks = dict[tuple[str, float], str]()
    if len(group.models) == 1:
        (model,) = group.models
        best, tied = best_of(model.curves[measure], measure)
        marks = {(model.name, best): 'best', **{(model.name, guidance): 'tied' for guidance in tied}}
    else:
        for guidance in group.guidance:
            first, close = best_of(at_guidance(group, measure, guidance), measure)
            marks |= {(first, guidance): 'best', **{(name, guidance): 'tied' for name in close}}
    rows = [
        (
            model.name,
            [
                ScoreCell(format_point(curve[guidance]), marks.get((model.name, guidance), '')) if guidance in curve else ScoreCell('not measured')
                for guidance in group.guidance
            ],
        )
        for model in group.models
        if (curve := model.curves.get(measure)) is not None
    ]
    points = [point for model in group.models for point in model.curves.get(measure, {}).values()]
    null = next((f'{point.null:.4g}' for point in points if point.null is not None), '')
    return ScoreRows(measure, rows, null, *_references(group, measure))


def _references(group: Group, measure: Measure) -> tuple[str, list[tuple[str, list[ScoreCell]]]]:
    """`references` and `reference_rows` of a measure."""
    common, rows = list[str](), list[tuple[str, list[ScoreCell]]]()
    for title, field in (('target', 'target'), (FLOOR_TITLE, 'floor'), (CEILING_TITLE, 'ceiling')):
        names: dict[tuple[str | None, ...], list[str]] = {}  # of the models, by what they have at each scale
        for model in (model for model in group.models if measure in model.curves):
            curve = model.curves[measure]
            values = (getattr(curve.get(guidance), field, None) for guidance in group.guidance)
            names.setdefault(tuple(None if value is None else f'{value:.4g}' for value in values), []).append(model.name)
        found = {text for texts in names for text in texts if text is not None}
        if len(found) == 1 and all(map(any, names)):
            common.append(f'{title} {found.pop()}')
        elif found:
            rows += [
                (title if len(names) == 1 else f'{title}: {", ".join(models)}', [ScoreCell(text or 'not measured') for text in texts])
                for texts, models in names.items()
                if any(texts)
            ]
    return ', '.join(common), rows


def photos(models: Sequence[Scored]) -> list[tuple[str, int, list[InlineImage]]]:
    """(where, number of all, images) of each subject."""
    found: dict[str, tuple[str, int, list[InlineImage]]] = {}
    for model in models:
        images = (_image(model.folder, file, '') for file in model.result.get('photos', [])[:MOST_PHOTOS])
        shown, real = [image for image in images if image is not None], model.result['real']
        if shown:
            found.setdefault(real['identity'], (real['where'], real['count'], shown))
    return list(found.values())


def sheets(models: Sequence[Scored]) -> tuple[int, list[Sheet]]:
    """Return how many prompts have samples, and sheets of the first that most models share: as many as the page has room for."""
    drawn = [_by_prompt(model) for model in models]
    prompts = list(dict.fromkeys(prompt for by_prompt in drawn for prompt in by_prompt))
    prompts.sort(key=lambda prompt: -sum(prompt in by_prompt for by_prompt in drawn))  # in their order among equals
    found, room = list[Sheet](), MOST_IMAGES
    for prompt in prompts[:MOST_PROMPTS]:
        files = [(model, by_prompt[prompt]) for model, by_prompt in zip(models, drawn, strict=True) if prompt in by_prompt]
        named = [(model.name, model, [(scale, sample['file']) for scale, sample in samples]) for model, samples in files]
        named += _before(files)
        room -= sum(len(scales) for *_, scales in named)
        if room < 0 and found:
            break
        rows = [(name, [_image(model.folder, file, f'guidance {float(scale):g}') for scale, file in scales]) for name, model, scales in named]
        found.append(Sheet(_shortened(prompt[1]), [(name, [image for image in images if image is not None]) for name, images in rows]))
    return len(prompts), found


def _before(files: Sequence[tuple[Scored, list[tuple[str, SampleRecord]]]]) -> list[tuple[str, Scored, list[tuple[str, str]]]]:
    """(title, model, (guidance, file) ...) of what the models before fine-tuning drew; one row for all that come from the same."""
    found: dict[tuple[str, str], list[tuple[Scored, list[tuple[str, str]]]]] = {}
    for model, samples in files:
        drawn = [(scale, sample['floor']) for scale, sample in samples if 'floor' in sample and 'floor' in model.result]
        if drawn:
            found.setdefault((model.result['digest'], model.result['floor']['sha256']), []).append((model, drawn))
    return [
        (FLOOR_TITLE if len(found) == 1 else f'{FLOOR_TITLE}: {", ".join(model.name for model, _ in members)}', *members[0])
        for members in found.values()
    ]


def _by_prompt(model: Scored) -> dict[tuple[int, str], list[tuple[str, SampleRecord]]]:
    """(guidance, sample) by id and text of the prompt, in the order of guidance."""
    found: dict[tuple[int, str], list[tuple[str, SampleRecord]]] = {}
    for scale in sorted(model.result['samples'], key=float):
        for sample in model.result['samples'][scale]:
            found.setdefault((sample['id'], sample['prompt']), []).append((scale, sample))
    return found


def pairs(model: Scored, num_models: int) -> list[NeighbourPair]:
    """The most similar pairs of a model; fewer where many models share the page."""
    neighbours = model.result['neighbours']
    if neighbours is None:
        return []
    most = MOST_PAIRS if num_models == 1 else max(2, 2 * MOST_PAIRS // num_models)
    threshold = neighbours['threshold']
    return [
        NeighbourPair(
            _image(model.folder, pair['drawn'], 'drawn'),
            _image(model.folder, pair['known'], 'known'),
            pair['cosine'],
            threshold is not None and pair['cosine'] > threshold,
            _shortened(pair['caption']),
            _shortened(pair['known_caption']),
            pair['key'],
        )
        for pair in neighbours['pairs'][:most]
    ]


def protocol_rows(group: Group) -> list[tuple[str, str]]:
    """(field, value) of the whole protocol; what the models of the group have differently stands in it once each."""
    trees = [
        dict(leaves({field: ', '.join(map(str, value)) if isinstance(value, list) else value for field, value in model.result['protocol'].items()}))
        for model in group.models
    ]
    fields = dict.fromkeys(field for tree in trees for field in tree)
    rows = [(field, ' or '.join(dict.fromkeys(tree[field] or "''" for tree in trees if field in tree))) for field in fields]
    return [*rows, ('digest', ' or '.join(dict.fromkeys(model.result['digest'] for model in group.models)))]


def about(models: Sequence[Scored]) -> list[tuple[str, list[tuple[str, str]]]]:
    """For each model (fact, value): where it lies, what it is, what the evaluation took and where it ran."""
    return [
        (
            model.name,
            [
                ('model', model.result['model']['where']),
                ('SHA-256', model.result['model']['sha256']),
                *([(f'model {FLOOR_TITLE}', model.result['floor']['where'])] if 'floor' in model.result else []),
                ('trained for', 'not known' if (batches := model.result['model']['batches']) is None else f'{batches:,} batches'),
                ('real images', f'{model.result["real"]["count"]:,} in {model.result["real"]["where"]}'),
                ('evaluation', str(model.folder)),
                ('drawing', f'{model.result["seconds"] / 3600:.2f} h of all processes, {model.result["images_per_sec"]:.3g} images/s by each'),
                *((name.replace('_', ' '), value) for name, value in leaves(model.result['environment'])),
            ],
        )
        for model in models
    ]


def _image(folder: Path, name: Any, caption: str) -> InlineImage | None:
    """A thumbnail of a file below the folder; None if it is not there, no image, or elsewhere (a result may come from anybody)."""
    path = (folder / str(name)).resolve()
    if not path.is_relative_to(folder.resolve()) or not path.is_file():
        return None
    try:
        return to_inline(open_image(path.read_bytes()), caption, THUMBNAIL_PX, compressed=True)
    except ImageError:
        return None


def _shortened(text: str) -> str:
    return text if len(text) <= TEXT_LIMIT else f'{text[:TEXT_LIMIT]} …'
