"""The page of evaluations, from results written here."""

import math
import re
import sys

import pytest
from PIL import Image

from diffusion import evaluate
from diffusion.contracts.errors import InputError
from diffusion.evaluation.job.results import RESULT_NAME, Protocol, with_error
from diffusion.evaluation.pages.comparing import format_point, groups, read_models, warnings
from diffusion.evaluation.pages.page import MOST_IMAGES, write_page
from tests.evaluation.examples import GUIDANCE, MEANINGS, PROMPTS, rewrite, write_evaluation, write_subject
from tests.monitoring.report.pages import assert_stands_alone

EVIL = '<img src=x onerror=alert(1)>"\'&$a_b$\u202e\ud800{{ 77 * 131 }}'
NAMES = ('fid', 'clip')  # of metrics, where the others would only take time


def page_of(folders, out):
    write_page(folders, out)
    return assert_stands_alone(out.read_text())


def figure(text, title):
    """The SVG with this title, as text."""
    return text[text.index(f'aria-label="{title}') :].split('</svg>')[0]


def figure_and_caption(text, title):
    return text[text.index(f'aria-label="{title}') :].split('</figure>')[0]


def markers(svg, series):
    """(x, y) of the points of a line, in the figure's coordinates; with one more in a legend."""
    filled = set(re.findall(r'<path id="(m[^"]*)" d="[^"]*z', svg))  # the others are ticks, and ends of intervals
    return [
        (float(x), float(y))
        for name, x, y, style in re.findall(r'<use xlink:href="#(m[^"]*)" x="([^"]*)" y="([^"]*)" style="([^"]*)"', svg)
        if name in filled and f'var(--series{series})' in style
    ]


def is_affine(positions, values):
    """Whether positions are a * value + b."""
    slope = (positions[-1] - positions[0]) / (values[-1] - values[0])
    return positions == pytest.approx([positions[0] + slope * (value - values[0]) for value in values], abs=1e-3)


def test_every_number_and_every_field_of_the_protocol_is_there(tmp_path):
    result = write_evaluation(tmp_path / 'one')
    page = page_of([tmp_path / 'one'], tmp_path / 'page.html')
    assert ['guidance', '1.5', '3', '5', '7.5', 'real halves'] in page.rows
    assert page.row('FID ↓') == ['14.40 ± 0.12', '12.30 ± 0.12', '14.40 ± 0.12', '20.70 ± 0.12', '1.9']
    assert page.row('FID at infinity ↓') == ['13.3', '11.2', '13.3', '19.6', '']
    assert page.row('KID ↓') == ['≈ 0.00390 ± 0.00021', '0.00310 ± 0.00021', '≈ 0.00390 ± 0.00021', '0.00630 ± 0.00021', '-0.0004']
    assert page.row('CMMD, unbiased ↓') == ['0.565', '0.505', '0.565', '0.745', '']
    assert page.row('CLIP score ↑')[-2] == '27.000 ± 0.018'
    assert page.row('recall ↑') == ['0.55', '0.49', '0.43', '0.37', '0.77']
    for meaning, _ in MEANINGS.values():
        assert f'{meaning[0].upper()}{meaning[1:]}'.rstrip('.') in page.text
    flat = {}
    for name, value in result['protocol'].items():
        flat |= {f'{name}.{key}': inner for key, inner in value.items()} if isinstance(value, dict) else {name: value}
    for field, value in {**flat, 'digest': result['digest']}.items():
        assert [field, ', '.join(map(str, value)) if isinstance(value, list) else str(value)] in page.rows
    line = page.text[page.text.index('To be copied with a number:') :]
    for part in (
        '30,000 images of 512 px, DDIMScheduler, 50 steps, guidance 1.5, 3, 5, 7.5, seed 0, fp32 in chunks of 16',
        'inception 6726825d',
        result['digest'],
    ):
        assert part in line
    for fact in ('NVIDIA H100 80GB HBM3', '12.00 h of all processes, 2.78 images/s by each', 'runs/base/export', 'e' * 64):
        assert fact in page.text


def test_points_lie_where_their_numbers_say(tmp_path):
    result = write_evaluation(tmp_path / 'one')
    write_page([tmp_path / 'one'], tmp_path / 'page.html')
    text = (tmp_path / 'page.html').read_text()
    values = {name: [score['metrics'][name]['value'] for score in result['scores']] for name in MEANINGS}
    across, down = zip(*markers(figure(text, 'FID against CLIP score'), 1), strict=True)
    assert is_affine(across, values['clip'])
    assert is_affine(down, values['fid'])
    assert across[0] < across[-1]  # a higher score further right
    assert down[1] == max(down)  # the lowest FID at the bottom: SVG counts downwards
    kid = figure(text, 'KID over guidance')
    across, down = zip(*markers(kid, 1), strict=True)
    assert is_affine(across, GUIDANCE)
    assert is_affine(down, values['kid'])
    bars = [
        tuple(map(float, ends))
        for ends in re.findall(r'd="M [\d.]+ ([\d.]+)\s+L [\d.]+ ([\d.]+)\s*" clip-path="[^"]*" style="fill: none; stroke: var\(--series1\)', kid)
    ]
    per_unit = (down[3] - down[1]) / (values['kid'][3] - values['kid'][1])
    assert [abs(start - end) for start, end in bars] == pytest.approx([abs(per_unit) * 4 * 0.00021] * 4, abs=1e-3)  # two deviations to either side
    dashed = re.search(
        r'd="M [\d.]+ ([\d.]+)\s+L [\d.]+ [\d.]+\s*" clip-path="[^"]*" style="fill: none; stroke-dasharray: 2,2; [^"]*stroke: var\(--faint\)', kid
    )
    assert float(dashed[1]) == pytest.approx(down[1] + per_unit * (-0.0004 - values['kid'][1]), abs=1e-3)
    assert {'1.5', '3', '5', '7.5'} <= set(re.findall(r'>([\d.]+)</text>', figure(text, 'FID against CLIP score')))


def test_models_of_one_protocol_share_a_figure_and_their_best_is_marked(tmp_path):
    folders = [tmp_path / 'one', tmp_path / 'two', tmp_path / 'three']
    write_evaluation(folders[0], label='one', names=NAMES)
    write_evaluation(folders[1], label='two', shift=-0.3, names=NAMES)
    write_evaluation(folders[2], label='three', shift=5.0, names=NAMES)
    write_page(folders, tmp_path / 'page.html')
    text = (tmp_path / 'page.html').read_text()
    page = assert_stands_alone(text)
    start = next(number for number, row in enumerate(page.rows) if row and row[0].strip() == 'FID ↓')
    assert [[cell.strip() for cell in row[:3]] for row in page.rows[start + 1 : start + 4]] == [
        ['one', '≈ 14.40 ± 0.12', '≈ 12.30 ± 0.12'],
        ['two', '14.10 ± 0.12', '12.00 ± 0.12'],
        ['three', '19.40 ± 0.12', '17.30 ± 0.12'],
    ]
    assert 'class="best">14.10 ± 0.12</td>' in text
    assert 'class="tied">≈ 14.40 ± 0.12</td>' in text
    assert [len(markers(figure(text, 'FID over guidance'), number)) for number in (1, 2, 3)] == [5, 5, 5]  # four points, and one in the legend
    assert "The best model's interval overlaps with others (≈ in the table): FID at guidance 1.5, 3, 5, 7.5" in page.text
    assert page.text.count('KID over') == 0  # titles of figures are attributes
    assert len([alt for alt in page.attributes('img') if alt['alt'] == PROMPTS[0]]) == 3 * len(GUIDANCE)


def test_unlike_protocols_are_never_in_one_figure_and_what_differs_is_named(tmp_path):
    folders = [tmp_path / name for name in ('one', 'two', 'three')]
    write_evaluation(folders[0], label='one', names=NAMES)
    write_evaluation(folders[1], label='two', resolution=256, real={'kind': 'images', 'identity': '9' * 64, 'count': 30_000}, names=NAMES)
    write_evaluation(folders[2], label='three', guidance=(3.0, 7.5), preset='', names=NAMES)  # other scales of the same curve
    assert [[model.name for model in group.models] for group in groups(read_models(folders))] == [['one', 'three'], ['two']]
    write_page(folders, tmp_path / 'page.html')
    text = (tmp_path / 'page.html').read_text()
    page = assert_stands_alone(text)
    assert ['field', 'A', 'B'] in page.rows
    assert ['resolution', '512', '256'] in page.rows
    assert ['real.identity', 'd' * 64, '9' * 64] in page.rows
    assert not [row for row in page.rows if row[0] in ('steps', 'guidance', 'preset') and len(row) == 3]
    figures = [part.split('</svg>')[0] for part in text.split('aria-label="FID over guidance')[1:]]
    assert [[len(markers(svg, number)) for number in (1, 2)] for svg in figures] == [[5, 3], [4, 0]]
    assert 'Protocol A: one, three' in page.text
    assert 'Protocol B: two' in page.text


def test_hostile_texts_are_text(tmp_path):
    result = write_evaluation(tmp_path / EVIL.replace('/', '').replace('\ud800', ''), label=EVIL, prompts=[EVIL, 'b'], sampler=EVIL, names=NAMES)
    folder = tmp_path / EVIL.replace('\ud800', '')
    result['model']['where'] = result['real']['where'] = result['environment'][EVIL] = EVIL
    result['protocol']['prompts'] = {EVIL: EVIL}
    result['neighbours']['extractor'] = result['neighbours']['pairs'][0]['known_caption'] = result['neighbours']['pairs'][0]['key'] = EVIL
    result['scores'][0]['metrics'][EVIL] = {'value': 1.0, 'meaning': EVIL, 'lower_is_better': True}
    rewrite(folder, result)
    write_page([folder], tmp_path / 'page.html')
    page = assert_stands_alone((tmp_path / 'page.html').read_text())
    assert page.text.count('<img src=x onerror=alert(1)>"\'&$a') >= 13
    assert '10087' not in page.text
    write_evaluation(tmp_path / 'other', label='_' + EVIL, names=NAMES)
    write_page([folder, tmp_path / 'other'], tmp_path / 'both.html')  # names in legends
    assert 'onerror' in assert_stands_alone((tmp_path / 'both.html').read_text()).text


def test_files_outside_the_folder_are_not_shown(tmp_path):
    result = write_evaluation(tmp_path / 'one', prompts=['a', 'b', 'c'], guidance=(3.0,))
    Image.new('RGB', (8, 8)).save(tmp_path / 'secret.png')
    (tmp_path / 'one/link.png').symlink_to(tmp_path / 'secret.png')
    (tmp_path / 'one/broken.png').write_bytes(b'\x89PNG nothing')
    for samples in result['samples'].values():
        for sample, name in zip(samples, ('../secret.png', 'link.png', 'broken.png'), strict=True):
            sample['file'] = name
    result['neighbours']['pairs'] = []
    rewrite(tmp_path / 'one', result)
    assert not page_of([tmp_path / 'one'], tmp_path / 'page.html').attributes('img')


def test_missing_pieces_leave_the_rest(tmp_path):
    result = write_evaluation(tmp_path / 'one', guidance=(3.0,), prompts=[])
    result |= {'neighbours': None, 'samples': {}, 'environment': {}}
    result['model'] |= {'label': '', 'batches': None}
    result['scores'][0]['metrics'] = {'kid@random-conv': {'value': math.nan, 'error': math.nan, 'lower_is_better': True}, 'cmmd': {'value': 0.5}}
    rewrite(tmp_path / 'one', result)
    page = page_of([tmp_path / 'one'], tmp_path / 'page.html')
    assert page.row('KID (random-conv) ↓') == ['not measured']
    assert page.row('CMMD ↓') == ['0.5']
    assert not page.attributes('svg')
    for heading in ('Samples', 'Nearest neighbours'):
        assert heading not in page.texts
    write_evaluation(tmp_path / 'two', guidance=(3.0,), names=NAMES)
    assert 'one' in page_of([tmp_path / 'one', tmp_path / 'two'], tmp_path / 'both.html').text


def test_neighbours_without_images_or_threshold(tmp_path):
    result = write_evaluation(tmp_path / 'one', num_pairs=2, guidance=(3.0,))
    page = page_of([tmp_path / 'one'], tmp_path / 'page.html')
    assert 'threshold 0.950, 0.03 % of the drawn images are above it' in page.text
    assert page.text.count('above the threshold') == 1 + page.text.count('A pair above the threshold')  # 0.97 of 0.97 and 0.94
    assert 'cosine 0.970' in page.text
    assert 'known: known caption 1' in page.text
    result['neighbours'] |= {'threshold': None, 'share_above': None}
    (tmp_path / 'one/neighbours/0-known.png').unlink()
    rewrite(tmp_path / 'one', result)
    page = page_of([tmp_path / 'one'], tmp_path / 'page.html')
    assert 'no threshold' in page.text
    assert page.texts.count('no image') == 1


def test_the_first_row_begins_with_the_worst_share_of_right_images(tmp_path):
    result = write_evaluation(tmp_path / 'out', guidance=(3.0,), names=('clip',), num_pairs=0)
    shares = {'right_place': 1.0, 'right_shape': 0.39, 'right_everything': 0.35}
    result['scores'][0]['metrics'] |= {name: {'value': value, 'error': 0.02, 'lower_is_better': False} for name, value in shares.items()}
    rewrite(tmp_path / 'out', result)
    write_page([tmp_path / 'out'], tmp_path / 'page.html')
    page = (tmp_path / 'page.html').read_text()
    numbers = re.findall(r'<div class="number"><b>([^<]*)</b>([^<,]*)', page)
    assert numbers == [('0.350', 'right everything'), ('0.390', 'right shape'), ('1.000', 'right place'), ('24.000', 'CLIP score')]


def test_what_weakens_the_numbers_is_said(tmp_path):
    result = write_evaluation(tmp_path / 'one', samples=1000, extractors={'random-conv': 'f' * 64})
    result['scores'][0]['count'] = 640
    rewrite(tmp_path / 'one', result)
    (group,) = groups(read_models([tmp_path / 'one']))
    found = '\n'.join(warnings(group))
    assert 'base: the protocol asks for 1,000 images, drawn were 640 at guidance 1.5.' in found
    assert '1,000 drawn images are compared with 30,000 real ones' in found
    assert 'fewer than the 2,048 dimensions' in found
    assert 'random-conv: no published feature network' in found
    assert 'KID: 3 with 1.5, 5' in found
    write_evaluation(tmp_path / 'two', batches=None)
    (group,) = groups(read_models([tmp_path / 'two']))
    assert warnings(group) == ['The interval of the best guidance overlaps with others (≈ in the table): KID: 3 with 1.5, 5.']


def test_targets_of_a_benchmark_stand_next_to_the_metric(tmp_path):
    result = write_evaluation(tmp_path / 'one', guidance=(3.0,))
    for score in result['scores']:
        score['metrics']['fid']['target'] = 90.0
        score['metrics']['clip'] |= {'floor': 20.5, 'ceiling': 31.0}
    rewrite(tmp_path / 'one', result)
    page = page_of([tmp_path / 'one'], tmp_path / 'page.html')
    assert page.row('FID ↓, target 90')
    assert page.row('CLIP score ↑, before fine-tuning 20.5, photos among themselves 31')


def test_a_floor_that_rises_with_guidance_has_a_number_at_each_scale(tmp_path):
    write_subject(tmp_path / 'one')
    page = page_of([tmp_path / 'one'], tmp_path / 'page.html')
    assert page.row('CLIP-I ↑, photos among themselves 0.83')
    assert page.row('CLIP-I, before fine-tuning') == ['0.5', '0.51', '0.52', '0.53']
    write_subject(tmp_path / 'two', label='two', floor_sha256='a' * 64)
    page = page_of([tmp_path / 'one', tmp_path / 'two'], tmp_path / 'both.html')
    assert page.row('before fine-tuning') == ['0.5', '0.51', '0.52', '0.53']  # equal for both
    result = write_subject(tmp_path / 'three', label='three')
    for score in result['scores']:
        score['metrics']['clip_i']['floor'] = 0.4
    rewrite(tmp_path / 'three', result)
    page = page_of([tmp_path / 'one', tmp_path / 'three'], tmp_path / 'both.html')
    assert page.row('before fine-tuning: three') == ['0.4'] * 4


def test_floor_and_ceiling_are_lines_of_the_figures(tmp_path):
    result = write_subject(tmp_path / 'one')
    write_page([tmp_path / 'one'], tmp_path / 'page.html')
    text = (tmp_path / 'page.html').read_text()
    svg = figure(text, 'CLIP-I over guidance')
    heights = [y for _, y in markers(svg, 1)]
    metrics = [score['metrics']['clip_i'] for score in result['scores']]

    def line(dashes):
        path = re.search(rf'<path d="([^"]*)" clip-path="[^"]*" style="fill: none; stroke-dasharray: {dashes}[^"]*stroke: var\(--faint\)', svg)[1]
        return [float(y) for y in re.findall(r'[ML] [\d.]+ ([\d.]+)', path)]

    values = [*(one['value'] for one in metrics), *(one['floor'] for one in metrics), 0.83]
    assert is_affine([*heights, *line('7.2'), line('1.2')[0]], values)
    assert 'Long dashes: before fine-tuning. Dotted: photos among themselves, 0.83.' in text
    write_subject(tmp_path / 'point', guidance=(7.5,))
    write_page([tmp_path / 'point'], tmp_path / 'page.html')
    assert 'Long dashes: before fine-tuning, 0.5. Dotted' in figure_and_caption((tmp_path / 'page.html').read_text(), 'CLIP-I over guidance')


def test_photos_and_images_of_the_floor_are_shown_once(tmp_path):
    write_subject(tmp_path / 'one', label='one', guidance=(7.5,), num_photos=9)
    write_subject(tmp_path / 'two', label='two', guidance=(7.5,), num_photos=9)
    for folders, rows in (
        ([tmp_path / 'one'], ['one', 'before fine-tuning']),
        ([tmp_path / 'one', tmp_path / 'two'], ['one', 'two', 'before fine-tuning']),
    ):
        page = page_of(folders, tmp_path / 'page.html')
        assert [image['alt'] for image in page.attributes('img')] == [f'photo {i}' for i in range(1, 9)] + [p for p in PROMPTS for _ in rows]
        assert [caption for caption in page.texts[page.texts.index(PROMPTS[0]) :] if caption in rows][: len(rows)] == rows
        assert 'The model before fine-tuning drew with its class (dog) in place of the word.' in page.text
    write_subject(tmp_path / 'three', label='three', guidance=(7.5,), floor_sha256='a' * 64)
    assert 'before fine-tuning: three' in page_of([tmp_path / 'one', tmp_path / 'three'], tmp_path / 'page.html').texts


def test_names_are_told_apart(tmp_path):
    for name, batches in (('a', 100), ('b', 2000), ('c', 100)):
        write_evaluation(tmp_path / name, label='run', batches=batches)
    assert [model.name for model in read_models([tmp_path / 'a', tmp_path / 'b'])] == ['run, batch 100', 'run, batch 2,000']
    assert [model.name for model in read_models([tmp_path / 'a', tmp_path / 'c'])] == [f'1: {tmp_path}/a', f'2: {tmp_path}/c']


def test_a_page_of_eight_models_is_small(tmp_path):
    """With noise in place of images, which compresses worst, and more prompts than the page has room for."""
    noise = Image.effect_noise((256, 256), 90).convert('RGB')
    folders = [tmp_path / str(number) for number in range(8)]
    for folder in folders:
        result = write_evaluation(
            folder, label=folder.name, prompts=[f'prompt {number}' for number in range(16)], image_px=8, num_pairs=10, names=NAMES
        )
        noise.save(folder / 'noise.png')
        for sample in (sample for samples in result['samples'].values() for sample in samples):
            sample['file'] = 'noise.png'
        rewrite(folder, result)
    page = page_of(folders, tmp_path / 'page.html')
    assert (tmp_path / 'page.html').stat().st_size < 6e6
    prompts = [image['alt'] for image in page.attributes('img') if image['alt'].startswith('prompt')]
    assert len(prompts) == MOST_IMAGES
    assert f'{MOST_IMAGES // 32} of 16 prompts' in page.text


@pytest.mark.parametrize(
    ('point', 'text'),
    [
        ({'value': 12.3456, 'error': 0.1234}, '12.35 ± 0.12'), ({'value': 0.00312345, 'error': 0.000213}, '0.00312 ± 0.00021'), ({'value': 103.4, 'error': 12.0}, '103 ± 12'),
        ({'value': 1234.5, 'error': 250.0}, '1234 ± 250'), ({'value': 0.123456}, '0.1235'), ({'value': 0.5, 'error': 0.0}, '0.5'),
    ],
)  # fmt: skip
def test_numbers_have_the_digits_of_their_error(point, text):
    assert format_point(point) == text


def test_what_is_no_evaluation_is_refused(tmp_path):
    with pytest.raises(InputError, match=RESULT_NAME):
        write_page([tmp_path], tmp_path / 'page.html')
    with pytest.raises(InputError, match='no evaluation was given'):
        write_page([], tmp_path / 'page.html')


def test_the_command_compares(tmp_path, monkeypatch, capsys):
    for name in ('one', 'two'):
        write_evaluation(tmp_path / name, label=name, guidance=(3.0,), names=NAMES)
    arguments = ['evaluate', '--compare', tmp_path / 'one', tmp_path / 'two', '--page', tmp_path / 'page.html']
    monkeypatch.setattr(sys, 'argv', list(map(str, arguments)))
    assert evaluate.main() == 0
    assert capsys.readouterr().out == f'evaluate: {tmp_path}/page.html\n'
    assert 'Evaluation of 2 models' in assert_stands_alone((tmp_path / 'page.html').read_text()).text
    (tmp_path / 'two' / RESULT_NAME).unlink()
    assert evaluate.main() == 2
    assert f'{tmp_path}/two/{RESULT_NAME}: no such file' in capsys.readouterr().err


REQUIRED = ('version', 'protocol', 'digest', 'model', 'real', 'scores', 'neighbours', 'samples', 'seconds', 'images_per_sec', 'environment')
DAMAGED = {
    **{key: (key, None, f'{key}: Field required') for key in REQUIRED},
    **{f'protocol {key}': ('protocol', key, f'protocol.{key}: Field required') for key in Protocol.__annotations__},
    'other version': ('version', 2, 'version: Input should be 1, not 2'),
    'scores of text': ('scores', [{'guidance': 3, 'count': 'many', 'metrics': {}}], 'scores.0.count: Input should be a valid integer'),
    'scale': ('samples', {'three': []}, "samples.three.[key]: Value error, could not convert string to float: 'three'"),
    'a list': ('model', [], 'model: Input should be an object, not []'),
}


@pytest.mark.parametrize(('key', 'change', 'message'), DAMAGED.values(), ids=DAMAGED)
def test_a_result_of_another_shape_is_named(key, change, message, tmp_path, monkeypatch, capsys):
    result = write_evaluation(tmp_path / 'one', guidance=(3.0,), names=NAMES)
    if change is None:
        del result[key]
    elif isinstance(change, str):
        del result[key][change]
    else:
        result[key] = change
    rewrite(tmp_path / 'one', result)
    monkeypatch.setattr(sys, 'argv', ['evaluate', '--compare', str(tmp_path / 'one'), '--page', str(tmp_path / 'page.html')])
    assert evaluate.main() == 2
    said = capsys.readouterr().err
    assert said.startswith(f'{tmp_path}/one/{RESULT_NAME}: {message}')
    assert said.count('\n') == 1


@pytest.mark.parametrize(
    ('value', 'error', 'text'),
    [
        (12.314, 0.123, '12.31 ± 0.12'),
        (0.0031, 0.00021, '0.00310 ± 0.00021'),
        (250.4, 21, '250 ± 21'),
        (0.0, 0.0077, '0.0000 ± 0.0077'),
        (12.3e-6, 4.1e-6, '(12.3 ± 4.1)e-6'),
        (-4.321e-7, 1.9e-6, '(-0.4 ± 1.9)e-6'),
        (36.1234567, 1.2e-6, '36.123 ± 1.2e-06'),
        (0.0, 0.0, '0'),
        (1.9, None, '1.9'),
        (1.9, math.nan, '1.9'),
    ],
)
def test_numbers_have_the_digits_of_their_errors(value, error, text):
    assert with_error(value, error) == text


def test_a_narrow_screen_gets_every_column(tmp_path):
    """The table becomes a list, whose labels are what the columns' heads say."""
    write_evaluation(tmp_path / 'one', names=('fid',))
    write_page([tmp_path / 'one'], tmp_path / 'page.html')
    text = (tmp_path / 'page.html').read_text()
    row = text[text.index('<td>FID <') :].split('</tr>')[0]
    assert re.findall(r'data-label="([^"]*)"[^>]*>([^<]*)<', row) == [
        ('guidance 1.5', '14.40 ± 0.12'),
        ('guidance 3', '12.30 ± 0.12'),
        ('guidance 5', '14.40 ± 0.12'),
        ('guidance 7.5', '20.70 ± 0.12'),
        ('real halves', '1.9'),
    ]
    narrow = text[text.index('@media (max-width: 600px)') :]
    assert '.listed td[data-label]::before { content: attr(data-label)' in narrow
    assert text.count('style="--scales: 4"') == len(PROMPTS)
