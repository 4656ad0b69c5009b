"""The page of an evaluation, or of several: scores with intervals, curves over guidance, samples by prompt, nearest neighbours, the protocol.

Autoencoders have the same page, with their latents in place of neighbours. And scores as a table for the terminal.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from PIL import Image

from diffusion.common.images import LARGEST_PX, InlineImage, to_inline
from diffusion.common.pages import write_page as render
from diffusion.common.text import counted, differences, leaves, markdown_table
from diffusion.contracts.errors import InputError
from diffusion.datasets.decode import ImageError, open_image
from diffusion.evaluation.job.reconstructing import GAIN, difference
from diffusion.evaluation.job.results import CEILING_TITLE, FLOOR_TITLE, MOST_PHOTOS, AutoencoderRecord, SampleRecord
from diffusion.evaluation.pages.comparing import (
    NOT_COMPARED,
    Group,
    Measure,
    Scored,
    format_point,
    groups,
    one_line,
    read_models,
    warnings,
)
from diffusion.evaluation.pages.figures import against_clip, over_guidance

THUMBNAIL_PX = 160
MOST_IMAGES = 192  # samples of all models in a page: 3 MB if they are as hard to compress as noise
MOST_RECONSTRUCTIONS = 72  # in full size and without loss: 10 MB
MOST_PROMPTS = 12
MOST_PAIRS = 10  # of drawn images and their neighbours, for one model; several share twice as many
TEXT_LIMIT = 300  # letters of a caption
NOT_MEASURED = 'not measured'
ERRORS = '± is one standard deviation, by resampling or as the standard error of a mean; ≈: chance may explain the difference to the best'
PAIR_KINDS = ('psnr', 'ssim', 'lpips')  # of which the first ranks the reconstructions that are shown
Cell = tuple[str, str]  # text, and `best`, `tied` (its interval overlaps with the best one's), `faint` or nothing


@dataclass(frozen=True)
class ScoreRow:
    """A row of a table of scores; `note` is faint behind the title, `kind` is `part` above the rows of a measure, `faint` or nothing."""

    title: str
    note: str = ''
    cells: Sequence[Cell] = ()
    kind: str = ''


@dataclass(frozen=True)
class ScoreTable:
    """Scores of a group: a corner, columns as (title, label in a list for narrow screens), and rows."""

    corner: str
    columns: Sequence[tuple[str, str]]
    rows: list[ScoreRow] = field(default_factory=list)
    has_nulls: bool = False


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
    autoencoders = [model for model in models if model.autoencoder is not None]
    kind, plural = 'evaluation', f'Evaluation of {len(models)} models'
    if len(autoencoders) == len(models):
        kind, plural = 'reconstruction', f'Reconstructions of {len(models)} autoencoders'
    render(
        out,
        'evaluation.html',
        title=f'{models[0].name}: {kind}' if len(models) == 1 else plural,
        heading=models[0].name if len(models) == 1 else plural,
        models=models,
        groups=grouped,
        numbers=_headline(models[0]) if len(models) == 1 else [],
        warnings={group.letter: warnings(group) for group in grouped},
        tables={group.letter: score_table(group) for group in grouped},
        figures={group.letter: [*against_clip(group), *over_guidance(group)] for group in grouped},
        differences=differences({group.letter: group.protocol for group in grouped}, NOT_COMPARED),
        measures=list(dict.fromkeys(measure for group in grouped for measure in group.measures)),
        photos=_photos(models),
        sheets=sheets,
        classes=list(dict.fromkeys(model.result['protocol']['prompts'].get('class', '') for model in models if 'floor' in model.result)),
        num_prompts=num_prompts,
        gain=GAIN,
        latents=[(model.name, _latent_rows(model.autoencoder)) for model in autoencoders if model.autoencoder is not None],
        neighbours=[(model, _pairs(model, len(models))) for model in models if model.result['neighbours']],
        protocols={group.letter: _protocol_rows(group) for group in grouped},
        lines={model.name: one_line(model) for model in models},
        about=[(model.name, _about(model)) for model in models],
    )


def table_of(out: Path) -> str:
    """Return text about the result in OUT: its table, what weakens its numbers, the protocol, and the share of suspicious images."""
    (group,) = groups(read_models([out]))
    table, model, result = score_table(group, by_key=True), group.models[0], group.models[0].result
    images, px, where = counted(result['scores'][0]['count'], 'image'), f'{result["protocol"]["resolution"]} px', result['real']['where']
    if group.of_autoencoders:
        lines = [f'{images} of {px} of {where}']
    else:
        steps = f'{counted(result["protocol"]["steps"], "step")} of {result["protocol"]["sampler"]}'
        lines = [f'{model.name}: {images} at each scale, {steps}, {px}']
        lines += [f'against {counted(result["real"]["count"], "real image")} of {where}'] if where else []
    rows = [[row.title, row.note, *(f'{"≈ " if mark == "tied" else ""}{text}' for text, mark in row.cells)] for row in table.rows]
    grid = markdown_table([table.corner, ':', *(title for title, _ in table.columns)], rows)
    lines += [*warnings(group), '', grid, '', f'{ERRORS}.', one_line(model)]
    near = result['neighbours']
    if near is not None and near['pairs']:
        line = f'most similar known image: cosine {near["pairs"][0]["cosine"]:.3f} ({near["extractor"]}) of {near["count_known"]:,}; '
        if near['threshold'] is not None and near['share_above'] is not None:
            line += f'{100 * near["share_above"]:.2f} % above {near["threshold"]:.3f}, which 0.1 % of held-out images exceed'
        else:
            line += f'no threshold: {near["no_threshold"]}'
        lines.append(line)
    if not group.of_autoencoders:
        lines.append(f'{result["seconds"]:,.0f} s of drawing, {result["images_per_sec"]:.2f} images/s a process')
    return '\n'.join(lines)


def score_table(group: Group, by_key: bool = False) -> ScoreTable:
    """Return the table of a group: guidance across; of autoencoders, which have none, the measures across and a row for each.

    Args:
        by_key: name metrics as results and command lines do.
    """
    titles = {measure: measure.key if by_key else measure.title for measure in group.measures}
    if group.of_autoencoders:
        columns = [*(f'{titles[measure]} {measure.arrow}' for measure in group.measures), 'scaled mean', 'scaled std', 'images/s']
        table = ScoreTable('autoencoder', [(title, title) for title in columns])
        for model in group.models:
            one = model.autoencoder
            assert one is not None
            others = [*(f'{value:.3f}' for value in _scaled(one, one['latents'])), f'{one["images_per_sec"]:.3g}']
            cells = [*(_cells(group, measure, model)[0] for measure in group.measures), *((text, '') for text in others)]
            table.rows.append(ScoreRow(model.name, f'f{one["downsampling"]} c{one["latent_channels"]}', cells))
        return table
    several, nulls = len(group.models) > 1, {}
    for measure in group.measures:
        points = (point for model in group.models for point in model.curves.get(measure, {}).values())
        nulls[measure] = next((f'{point["null"]:.4g}' for point in points if 'null' in point), '')
    has_nulls, scales = any(nulls.values()), [(f'{guidance:g}', f'guidance {guidance:g}') for guidance in group.guidance]
    table = ScoreTable('guidance', [*scales, *([('real halves', 'real halves')] if has_nulls else [])], has_nulls=has_nulls)
    for measure in group.measures:
        common, reference_rows = _references(group, measure)
        note, null = ', '.join([measure.arrow, *common]), [(nulls[measure], 'faint')] if has_nulls else []
        table.rows.extend([ScoreRow(titles[measure], note, kind='part')] if several else [])
        for model in group.models:
            if measure in model.curves:
                name = (model.name, '') if several else (titles[measure], note)
                table.rows.append(ScoreRow(*name, [*_cells(group, measure, model), *null]))
        for title, texts in reference_rows:
            cells = [*((text or NOT_MEASURED, '') for text in texts), *([('', '')] if has_nulls else [])]
            table.rows.append(ScoreRow(title if several else f'{titles[measure]}, {title}', '', cells, 'faint'))
    return table


def _cells(group: Group, measure: Measure, model: Scored) -> list[Cell]:
    """The numbers of a model by guidance."""
    marks, curve = group.marks(measure), model.curves.get(measure, {})
    return [
        (format_point(curve[guidance]), marks.get((model.name, guidance), '')) if guidance in curve else (NOT_MEASURED, '')
        for guidance in group.guidance
    ]


def _references(group: Group, measure: Measure) -> tuple[list[str], list[tuple[str, tuple[str | None, ...]]]]:
    """References of a measure, `target 90` and a subject's floor and ceiling: the same for all, and rows that differ by scale or model."""
    common, rows = list[str](), list[tuple[str, tuple[str | None, ...]]]()
    for title, name in (('target', 'target'), (FLOOR_TITLE, 'floor'), (CEILING_TITLE, 'ceiling')):
        names: dict[tuple[str | None, ...], list[str]] = {}  # of the models, by what they have at each scale
        for model in (model for model in group.models if measure in model.curves):
            curve = model.curves[measure]
            values = (curve.get(guidance, {}).get(name) for guidance in group.guidance)
            names.setdefault(tuple(None if value is None else f'{value:.4g}' for value in values), []).append(model.name)
        found = {text for texts in names for text in texts if text is not None}
        if len(found) == 1 and all(map(any, names)):
            common.append(f'{title} {found.pop()}')
        else:
            rows += [(title if len(names) == 1 else f'{title}: {", ".join(of)}', texts) for texts, of in names.items() if any(texts)]
    return common, rows


def _headline(model: Scored) -> list[tuple[str, str]]:
    """(label, value without its error) of the best of each measure over guidance; first shares of right images, the worst at the beginning."""
    numbers = list[tuple[float, str, str]]()
    for measure, curve in model.curves.items():
        if measure.has_curve and curve:
            guidance = (min if measure.lower_is_better else max)(curve, key=lambda scale: curve[scale]['value'])
            text = format_point(curve[guidance])  # `12.31 ± 0.12`; `(12 ± 4)e-6` stays whole
            label = measure.title if model.autoencoder is not None else f'{measure.title}, guidance\N{NO-BREAK SPACE}{guidance:g}'
            share = curve[guidance]['value'] if measure.kind.startswith(('right_', 'composition')) else math.inf
            numbers.append((share, label, text if text.startswith('(') else text.partition(' ')[0]))
    return [(label, text) for _, label, text in sorted(numbers, key=lambda number: number[0])]


def _photos(models: Sequence[Scored]) -> list[tuple[str, int, list[InlineImage]]]:
    """(where, number of all, images) of each subject."""
    found: dict[str, tuple[str, int, list[InlineImage]]] = {}
    for model in models:
        shown, real = _images(model, [(file, '') for file in model.result.get('photos', [])[:MOST_PHOTOS]]), model.result['real']
        if shown:
            found.setdefault(real['identity'], (real['where'], real['count'], shown))
    return list(found.values())


def _sheets(models: Sequence[Scored]) -> tuple[int, list[dict[str, Any]]]:
    """Return how many prompts have samples, and sheets of the first that most models share, as many as the page has room for.

    A sheet has the `prompt`, a `note`, and `rows` of a name and an image for each guidance scale: of the models, then of those before fine-tuning.
    """
    drawn = [_by_prompt(model) for model in models]
    prompts = list(dict.fromkeys(prompt for by_prompt in drawn for prompt in by_prompt))
    prompts.sort(key=lambda prompt: -sum(prompt in by_prompt for by_prompt in drawn))  # in their order among equals
    room = MOST_RECONSTRUCTIONS if any(model.autoencoder is not None for model in models) else MOST_IMAGES
    found = list[dict[str, Any]]()
    for prompt in prompts[:MOST_PROMPTS]:
        files = [(model, by_prompt[prompt]) for model, by_prompt in zip(models, drawn, strict=True) if prompt in by_prompt]
        rows, note = list[tuple[str, list[InlineImage]]](), ''
        named = [(model.name, model, [(sample['file'], scale) for scale, sample in samples]) for model, samples in files if not model.autoencoder]
        named += _before_tuning(files)
        triplets = [(model, samples[0][1]) for model, samples in files if model.autoencoder]
        room -= sum(len(scales) for *_, scales in named) + 2 * len(triplets) + bool(triplets)
        if room < 0 and found:
            break
        for name, model, scales in named:
            rows.append((name, _images(model, [(file, f'guidance {float(scale):g}') for file, scale in scales])))
        for model, sample in triplets:
            original, made = _open(model, sample.get('original')), _open(model, sample['file'])
            if original is not None and made is not None:
                rows += [] if rows else [('original', [to_inline(original, '', LARGEST_PX)])]
                rows += [(model.name, [to_inline(made, '', LARGEST_PX)])]
                rows += [(f'{GAIN} × difference', [to_inline(difference(made, original), '', LARGEST_PX)])]
            title = next((measure.title for measure in model.curves if measure.kind in PAIR_KINDS), '')
            note = f'{title} {sample["score"]:.4g}' if 'score' in sample else ''
        found.append({'prompt': _shortened(prompt[1]), 'note': note, 'rows': rows})
    return len(prompts), found


def _before_tuning(files: Sequence[tuple[Scored, list[tuple[str, SampleRecord]]]]) -> list[tuple[str, Scored, list[tuple[str, str]]]]:
    """(title, model, (file, guidance) ...) of what the models before fine-tuning drew; one row for all that come from the same."""
    found: dict[tuple[str, str], list[tuple[Scored, list[tuple[str, str]]]]] = {}
    for model, samples in files:
        drawn = [(sample['floor'], scale) for scale, sample in samples if 'floor' in sample and 'floor' in model.result]
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
            **{name: next(iter(_images(model, [(pair[name], name)])), None) for name in ('drawn', 'known')},  # type: ignore[literal-required]
            **{name: _shortened(pair[name]) for name in ('caption', 'known_caption')},  # type: ignore[literal-required]
            'is_above': threshold is not None and pair['cosine'] > threshold,
        }
        for pair in neighbours['pairs'][:most]
    ]


def _protocol_rows(group: Group) -> list[tuple[str, str]]:
    """(field, value) of the whole protocol; what the models of the group have differently stands in it once each."""
    trees = []
    for model in group.models:
        protocol = model.result['protocol'].items()
        trees.append(dict(leaves({name: ', '.join(map(str, value)) if isinstance(value, list) else value for name, value in protocol})))
    fields = dict.fromkeys(name for tree in trees for name in tree)
    rows = [(name, ' or '.join(dict.fromkeys(tree[name] or "''" for tree in trees if name in tree))) for name in fields]
    return [*rows, ('digest', ' or '.join(dict.fromkeys(model.result['digest'] for model in group.models)))]


def _about(model: Scored) -> list[tuple[str, str]]:
    """(fact, value): where it lies, what it is, what the evaluation took and where it ran."""
    result, batches, one = model.result, model.result['model']['batches'], model.autoencoder
    environment = ((name.replace('_', ' '), value) for name, value in leaves(result['environment']))
    if one is not None:
        ratio = 3 * one['downsampling'] ** 2 / max(1, one['latent_channels'])
        return [
            ('folder', one['where']),
            ('SHA-256 of its weights', one['sha256']),
            ('parameters', f'{one["num_parameters"]:,}'),
            ('latents', f'f{one["downsampling"]} c{one["latent_channels"]}: {ratio:.3g} values of an image for each latent'),
            ('scaling_factor, shift_factor', f'{one["scaling_factor"]:g}, {one["shift_factor"]:g}'),
            ('speed', f'{one["images_per_sec"]:.3g} images/s encoded and decoded in float32'),
            *environment,
        ]
    return [
        ('model', result['model']['where']),
        ('SHA-256', result['model']['sha256']),
        *([(f'model {FLOOR_TITLE}', result['floor']['where'])] if 'floor' in result else []),
        ('trained for', 'not known' if batches is None else f'{batches:,} batches'),
        ('real images', f'{result["real"]["count"]:,} in {result["real"]["where"]}' if result['real']['where'] else 'none: scores of prompts'),
        ('evaluation', str(model.folder)),
        ('drawing', f'{result["seconds"] / 3600:.2f} h of all processes, {result["images_per_sec"]:.3g} images/s by each'),
        *environment,
    ]


def _scaled(one: AutoencoderRecord, latents: Mapping[str, Any]) -> tuple[float, float]:
    """Mean and deviation of latents after the configured scale and shift."""
    return (latents['mean'] - one['shift_factor']) * one['scaling_factor'], latents['std'] * one['scaling_factor']


def _latent_rows(one: AutoencoderRecord) -> list[list[str]]:
    """Unscaled, then scaled: all channels, and each."""
    rows = list[list[str]]()
    named: list[tuple[str, Any]] = [('all', one['latents']), *((str(number), channel) for number, channel in enumerate(one['latents']['channels']))]
    for name, latents in named:
        noise = f'{latents["posterior_std"]:.2g}' if 'posterior_std' in latents else ''
        scaled = (f'{value:.3f}' for value in _scaled(one, latents))
        rows.append([name, f'{latents["mean"]:.4g}', f'{latents["std"]:.4g}', noise, *scaled])
    return rows


def _images(model: Scored, files: Sequence[tuple[str, str]]) -> list[InlineImage]:
    """Thumbnails with captions; those that are not there are left out."""
    opened = ((_open(model, file), caption) for file, caption in files)
    return [to_inline(image, caption, THUMBNAIL_PX, compressed=True) for image, caption in opened if image is not None]


def _open(model: Scored, file: str | None) -> Image.Image | None:
    """An image of a result; None if it is not there, no image, or outside its folder (a result may come from anybody)."""
    path = (model.folder / str(file)).resolve()
    if not path.is_relative_to(model.folder.resolve()) or not path.is_file():
        return None
    try:
        return open_image(path.read_bytes())
    except ImageError:
        return None


def _shortened(text: str) -> str:
    return text if len(text) <= TEXT_LIMIT else f'{text[:TEXT_LIMIT]} …'
