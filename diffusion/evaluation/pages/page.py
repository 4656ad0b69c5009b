"""The page of an evaluation, or of several: scores with intervals, curves over guidance, samples by prompt, nearest neighbours, the protocol.

And its scores as a table for the terminal.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diffusion.common.images import InlineImage, to_inline
from diffusion.common.pages import write_page as render
from diffusion.common.text import counted, differences, leaves, markdown_table
from diffusion.contracts.errors import InputError
from diffusion.datasets.decode import ImageError, open_image
from diffusion.evaluation.job.results import CEILING_TITLE, FLOOR_TITLE, MOST_PHOTOS, OF_STATISTICS, Evaluation, SampleRecord, with_error
from diffusion.evaluation.pages.comparing import (
    NOT_COMPARED,
    Group,
    Measure,
    Scored,
    at_guidance,
    best_of,
    flat,
    format_point,
    groups,
    one_line,
    read_models,
    warnings,
)
from diffusion.evaluation.pages.figures import against_clip, over_guidance

THUMBNAIL_PX = 160
MOST_IMAGES = 192  # samples of all models in a page: 3 MB if they are as hard to compress as noise
MOST_PROMPTS = 12
MOST_PAIRS = 10  # of drawn images and their neighbours, for one model; several share twice as many
TEXT_LIMIT = 300  # letters of a caption
NOT_MEASURED = 'not measured'


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


def write_page(folders: Sequence[Path], out: Path) -> None:
    """Write one page about the evaluations in these folders.

    Raises:
        InputError: no folder is given, one holds no evaluation, or a damaged one.
    """
    if not folders:
        raise InputError('no evaluation was given')
    models = read_models(folders)
    grouped = groups(models)
    num_prompts, sheets = _sheets(models)
    render(
        out,
        'evaluation.html',
        title=f'{models[0].name}: evaluation' if len(models) == 1 else f'Evaluation of {len(models)} models',
        models=models,
        groups=grouped,
        numbers=_headline(models[0]) if len(models) == 1 else [],
        warnings={group.letter: warnings(group) for group in grouped},
        tables={group.letter: [_rows(group, measure) for measure in group.measures] for group in grouped},
        figures={group.letter: [*against_clip(group), *over_guidance(group)] for group in grouped},
        differences=differences({group.letter: group.protocol for group in grouped}, NOT_COMPARED),
        measures=list(dict.fromkeys(measure for group in grouped for measure in group.measures)),
        photos=_photos(models),
        sheets=sheets,
        classes=list(dict.fromkeys(model.result['protocol']['prompts'].get('class', '') for model in models if 'floor' in model.result)),
        num_prompts=num_prompts,
        neighbours=[(model, _pairs(model, len(models))) for model in models if model.result['neighbours']],
        protocols={group.letter: _protocol_rows(group) for group in grouped},
        lines={model.name: one_line(model.result['protocol'], model.result['digest']) for model in models},
        about=[(model.name, _about(model)) for model in models],
    )


def table_of(found: Evaluation) -> str:
    """Return text: a line for each guidance scale, the protocol, and the share of suspicious images."""

    def cells(values: Sequence[Any], name: str) -> list[str]:
        return [with_error(value[name], value.get('error') if name == 'value' else None) if name in value else '' for value in values]

    protocol, first = found['protocol'], found['scores'][0]['metrics']
    header = ['guidance', *(f'{name} {"↓" if value["lower_is_better"] else "↑"}' for name, value in first.items())]
    rows = list[list[str]]()
    for score in found['scores']:
        values = [score['metrics'][name] for name in first]
        rows.append([f'{score["guidance"]:g}', *cells(values, 'value')])
        if any('floor' in value for value in values):
            rows.append([f'{score["guidance"]:g}, {FLOOR_TITLE}', *cells(values, 'floor')])
    if any('ceiling' in value for value in first.values()):
        rows.append([CEILING_TITLE, *cells(list(first.values()), 'ceiling')])
    lines = [
        f'{found["model"]["label"]}: {counted(found["scores"][0]["count"], "image")} at each scale, {counted(protocol["steps"], "step")} of '
        f'{protocol["sampler"]}, {protocol["resolution"]} px, seed {protocol["seed"]}',
        f'against {counted(found["real"]["count"], "real image")} of {found["real"]["where"]}',
        *([f'not among them: {found["real"]["left_out"]}'] if found['real'].get('left_out') else []),
        '',
        markdown_table(header, rows),
        '',
        f'± is one standard deviation; features: {", ".join(protocol["extractors"])}; protocol {found["digest"]}',
        *([OF_STATISTICS] if protocol['real'].get('kind') == 'statistics' else []),
    ]
    near = found['neighbours']
    if near is not None and near['pairs']:
        line = f'most similar known image: cosine {near["pairs"][0]["cosine"]:.3f} ({near["extractor"]}) of {near["count_known"]:,}; '
        if near['threshold'] is not None and near['share_above'] is not None:
            line += f'{100 * near["share_above"]:.2f} % above {near["threshold"]:.3f}, which 0.1 % of held-out images exceed'
        else:
            line += f'no threshold: {near["no_threshold"]}'
        lines.append(line)
    return '\n'.join([*lines, f'{found["seconds"]:,.0f} s of drawing, {found["images_per_sec"]:.2f} images/s a process'])


def _headline(model: Scored) -> list[tuple[str, str]]:
    """(label, value without its error) of the best of each measure over guidance."""
    numbers = []
    for measure, curve in model.curves.items():
        if measure.has_curve and curve:
            guidance = (min if measure.lower_is_better else max)(curve, key=lambda scale: curve[scale].value)
            text = format_point(curve[guidance])  # `12.31 ± 0.12`; `(12 ± 4)e-6` stays whole
            numbers.append((f'{measure.title}, guidance\N{NO-BREAK SPACE}{guidance:g}', text if text.startswith('(') else text.partition(' ')[0]))
    return numbers


def _rows(group: Group, measure: Measure) -> ScoreRows:
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
                ScoreCell(format_point(curve[guidance]), marks.get((model.name, guidance), '')) if guidance in curve else ScoreCell(NOT_MEASURED)
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
                (title if len(names) == 1 else f'{title}: {", ".join(models)}', [ScoreCell(text or NOT_MEASURED) for text in texts])
                for texts, models in names.items()
                if any(texts)
            ]
    return ', '.join(common), rows


def _photos(models: Sequence[Scored]) -> list[tuple[str, int, list[InlineImage]]]:
    """(where, number of all, images) of each subject."""
    found: dict[str, tuple[str, int, list[InlineImage]]] = {}
    for model in models:
        images = (_image(model.folder, file, '') for file in model.result.get('photos', [])[:MOST_PHOTOS])
        shown, real = [image for image in images if image is not None], model.result['real']
        if shown:
            found.setdefault(real['identity'], (real['where'], real['count'], shown))
    return list(found.values())


def _sheets(models: Sequence[Scored]) -> tuple[int, list[dict[str, Any]]]:
    """Return how many prompts have samples, and sheets of the first that most models share, as many as the page has room for.

    A sheet has the `prompt`, and `rows` of a name and an image for each guidance scale: of the models, then of those before fine-tuning.
    """
    drawn = [_by_prompt(model) for model in models]
    prompts = list(dict.fromkeys(prompt for by_prompt in drawn for prompt in by_prompt))
    prompts.sort(key=lambda prompt: -sum(prompt in by_prompt for by_prompt in drawn))  # in their order among equals
    found, room = list[dict[str, Any]](), MOST_IMAGES
    for prompt in prompts[:MOST_PROMPTS]:
        files = [(model, by_prompt[prompt]) for model, by_prompt in zip(models, drawn, strict=True) if prompt in by_prompt]
        named = [(model.name, model, [(scale, sample['file']) for scale, sample in samples]) for model, samples in files]
        named += _before_tuning(files)
        room -= sum(len(scales) for *_, scales in named)
        if room < 0 and found:
            break
        rows = [(name, [_image(model.folder, file, f'guidance {float(scale):g}') for scale, file in scales]) for name, model, scales in named]
        found.append({'prompt': _shortened(prompt[1]), 'rows': [(name, [image for image in images if image is not None]) for name, images in rows]})
    return len(prompts), found


def _before_tuning(files: Sequence[tuple[Scored, list[tuple[str, SampleRecord]]]]) -> list[tuple[str, Scored, list[tuple[str, str]]]]:
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


def _pairs(model: Scored, num_models: int) -> list[dict[str, Any]]:
    """The most similar pairs of a model, with their images (None for one that is not there); fewer where many models share the page."""
    neighbours = model.result['neighbours']
    assert neighbours is not None
    most, threshold = MOST_PAIRS if num_models == 1 else max(2, 2 * MOST_PAIRS // num_models), neighbours['threshold']
    return [
        {
            **pair,
            **{name: _image(model.folder, pair[name], name) for name in ('drawn', 'known')},  # type: ignore[literal-required]
            **{name: _shortened(pair[name]) for name in ('caption', 'known_caption')},  # type: ignore[literal-required]
            'is_above': threshold is not None and pair['cosine'] > threshold,
        }
        for pair in neighbours['pairs'][:most]
    ]


def _protocol_rows(group: Group) -> list[tuple[str, str]]:
    """(field, value) of the whole protocol; what the models of the group have differently stands in it once each."""
    trees = [dict(leaves(flat(model.result['protocol']))) for model in group.models]
    fields = dict.fromkeys(field for tree in trees for field in tree)
    rows = [(field, ' or '.join(dict.fromkeys(tree[field] or "''" for tree in trees if field in tree))) for field in fields]
    return [*rows, ('digest', ' or '.join(dict.fromkeys(model.result['digest'] for model in group.models)))]


def _about(model: Scored) -> list[tuple[str, str]]:
    """(fact, value): where it lies, what it is, what the evaluation took and where it ran."""
    result, batches = model.result, model.result['model']['batches']
    return [
        ('model', result['model']['where']),
        ('SHA-256', result['model']['sha256']),
        *([(f'model {FLOOR_TITLE}', result['floor']['where'])] if 'floor' in result else []),
        ('trained for', 'not known' if batches is None else f'{batches:,} batches'),
        ('real images', f'{result["real"]["count"]:,} in {result["real"]["where"]}'),
        ('evaluation', str(model.folder)),
        ('drawing', f'{result["seconds"] / 3600:.2f} h of all processes, {result["images_per_sec"]:.3g} images/s by each'),
        *((name.replace('_', ' '), value) for name, value in leaves(result['environment'])),
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
