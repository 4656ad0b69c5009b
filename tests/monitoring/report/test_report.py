"""The report of a run and the comparison of several, from folders written here: no training."""

import json
import math
import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from diffusion import report
from diffusion.common.images import cells, grid
from diffusion.recipe import load_recipe, to_yaml
from tests.conftest import REPOSITORY
from tests.monitoring.report.pages import assert_stands_alone

EVIL = '<img src=x onerror=alert(1)>"\'&$a_b$'
LOG = [
    {'batch': 10 * i, 'loss/train/total': 1 / i, 'lr-AdamW/group0': 1e-4 * i, 'grad_norm': 0.5 * i, 'throughput/images_per_sec': 100.0 + i,
     **({'metrics/eval/loss': 0.7 / i, 'metrics/eval/loss_t000-099': 0.9 / i} if i % 10 == 0 else {})}
    for i in range(1, 31)
]  # fmt: skip
FINAL = f'{np.mean([1 / 28, 1 / 29, 1 / 30]):.4f} ± {np.std([1 / 28, 1 / 29, 1 / 30], ddof=1):.4f}'  # batches 280, 290 and 300
PROMPTS = ['a red circle', 'a blue square', 'a green star']


def write_run(folder, *overrides, log=LOG, prompts=PROMPTS, weights='ema', **environment):
    own = [f'run_folder={folder}', 'model.encoders.source=.', 'train.duration=600ba', 'batch.global_size=64', 'batch.micro_size=64']
    recipe = load_recipe(REPOSITORY / 'yamls/shapes.yaml', [*own, 'data.caption_dropout=0.1', *overrides])
    (folder / 'samples').mkdir(parents=True)
    (folder / 'recipe.yaml').write_text(to_yaml(recipe))
    (folder / 'environment.json').write_text(
        json.dumps({'device': 'CPU', 'cpu': 'AMD EPYC 7B13', 'num_gpus': 1, 'commit': 'abc1234', 'price': None, **environment})
    )
    (folder / 'log.jsonl').write_text(''.join(json.dumps(record) + '\n' for record in log))
    events = [
        {'event': 'start', 'process': 'a', 'time': 1_700_000_060.0, 'gpus': 1, 'sec': {'start': 60.0}},
        {'event': 'steps', 'process': 'a', 'time': 1_700_000_160.0, 'batch': 300, 'steps': 300, 'sec': {'compute': 90.0, 'data wait': 10.0}},
    ]
    (folder / 'events.jsonl').write_text(''.join(json.dumps(event) + '\n' for event in events))
    info = PngInfo()
    info.add_text('prompts', json.dumps(prompts))
    for batch in (0, 300):
        grid([Image.new('RGB', (16, 16), (i, batch % 256, 0)) for i in range(len(prompts))]).save(
            folder / f'samples/ba{batch:08d}-{weights}.png', pnginfo=info
        )
    return folder


def main(monkeypatch, *arguments):
    monkeypatch.setattr(sys, 'argv', ['report', *map(str, arguments)])
    return report.main()


def test_numbers_are_those_of_the_log(tmp_path, monkeypatch):
    run = write_run(tmp_path / 'run')
    assert main(monkeypatch, run) == 0
    page = assert_stands_alone((run / 'report.html').read_text())
    for number, label in (
        (FINAL, 'training loss in the last tenth (3 records), ± standard deviation'),
        (f'{0.7 / 30:.4f}', 'evaluation loss, the last'),
        ('3.00e-03', 'learning rate'),
        ('15', 'gradient norm'),
        ('130', 'images/s'),
        ('300 of 600', 'batches'),
    ):
        assert f'{number} {label}' in page.text
    assert page.row('100') == ['0.0700', '0.0900']
    assert page.row('200') == ['0.0350', '0.0450']
    assert page.row('300') == [f'{0.7 / 30:.4f}', f'{0.9 / 30:.4f}']
    assert page.row('device') == ['1 x CPU (AMD EPYC 7B13)']
    assert page.row('commit') == ['abc1234']
    assert '2023-11-14' in page.row('began')[0]
    titles = {attributes['aria-label'] for attributes in page.attributes('svg')}
    assert {'learning rate over batches', 'evaluation loss over batches', 'gradient norm, before clipping over batches'} <= titles


@pytest.mark.parametrize(('num_gpus', 'shown'), [(1, False), (8, True)])
def test_images_per_gpu_are_shown_for_several_gpus(num_gpus, shown, tmp_path, monkeypatch):
    run = write_run(tmp_path / 'run', num_gpus=num_gpus)
    assert main(monkeypatch, run) == 0
    assert ('images/s per GPU' in (run / 'report.html').read_text()) == shown
    assert main(monkeypatch, run, run) == 0  # runs on different numbers of GPUs are compared by it
    assert 'images/s per GPU' in (tmp_path / 'comparison.html').read_text()


def test_scores_of_drawn_images_stand_next_to_the_losses(tmp_path, monkeypatch):
    scores = {'metrics/eval/kid/random-conv': -0.0000125, 'metrics/eval/clip': 21.5, 'metrics/eval/cmmd/random-conv_unbiased': 0.25}
    log = [*LOG, {'batch': 300, **scores, 'metrics/eval/clip_error': 0.31}]
    run = write_run(tmp_path / 'run', 'eval.samples.every=300ba', 'eval.samples.metrics=[kid@random-conv,clip]', 'eval.every=10ba',
                    'eval.streams.held.local=/held', log=log)  # fmt: skip
    assert main(monkeypatch, run) == 0
    page = assert_stands_alone((run / 'report.html').read_text())
    assert page.row('300') == [f'{0.7 / 30:.4f}', '21.50 ± 0.31', '0.25', '-1.25e-05', f'{0.9 / 30:.4f}']
    assert page.row('200')[1:4] == ['', '', '']
    assert page.row('batch') == ['loss', 'clip', 'cmmd@random-conv, unbiased', 'kid@random-conv', 't 000-099']
    assert 'almost the image. The other columns' in page.text
    assert 'The other columns score 256 images drawn from fixed noise: kid@random-conv, clip, 25 steps, guidance 3.0, 32 px' in page.text
    titles = {attributes['aria-label'] for attributes in page.attributes('svg')}
    assert {
        'kid@random-conv of drawn images over batches',
        'cmmd@random-conv, unbiased of drawn images over batches',
        'clip of drawn images over batches',
    } <= titles
    captions = dict(
        re.findall(r'aria-label="([^"]*) of drawn images over batches.*?</svg>\s*<figcaption>([^<]*)<', (run / 'report.html').read_text(), re.DOTALL)
    )
    assert captions == {
        'kid@random-conv': 'Lower is better.',
        'cmmd@random-conv, unbiased': 'Lower is better.',
        'clip': 'Higher is better. Bars: two standard deviations to either side.',
    }
    assert '21.50 ± 0.31 clip of drawn images, the last' in page.text  # among the tiles


def test_scores_during_training_are_the_first_tiles_and_the_worst_share_the_very_first(tmp_path, monkeypatch):
    shares = {'metrics/eval/right_place': 1.0, 'metrics/eval/right_shape': 0.39, 'metrics/eval/right_everything': 0.35}
    log = [*LOG, {'batch': 300, **shares, 'metrics/eval/right_shape_error': 0.06, 'metrics/eval/clip': 21.5}]
    run = write_run(tmp_path / 'run', log=log)
    assert main(monkeypatch, run) == 0
    text = assert_stands_alone((run / 'report.html').read_text()).text
    tiles = [f'{tile} of drawn images, the last' for tile in ('0.35 right_everything', '0.390 ± 0.060 right_shape', '1 right_place', '21.5 clip')]
    places = [text.index(tile) for tile in [*tiles, '300 of 600 batches']]
    assert places == sorted(places)


def test_a_resumed_log_may_have_errors_of_its_later_scores_alone(tmp_path, monkeypatch):
    score = 'metrics/eval/kid/random-conv'
    run = write_run(tmp_path / 'run', log=[*LOG, {'batch': 300, score: 0.5}, {'batch': 400, score: 0.4, f'{score}_error': 0.02}])
    assert main(monkeypatch, run) == 0
    page = assert_stands_alone((run / 'report.html').read_text())
    assert '0.5' in page.row('300')
    assert '0.400 ± 0.020' in page.row('400')


def test_prompts_stand_next_to_their_images(tmp_path, monkeypatch):
    run = write_run(tmp_path / 'run')
    assert main(monkeypatch, run) == 0
    page = assert_stands_alone((run / 'report.html').read_text())
    assert [attributes['alt'] for attributes in page.attributes('img')] == [prompt for prompt in PROMPTS for _ in range(2)]
    whole = Image.open(run / 'samples/ba00000300-ema.png')
    assert [image.getpixel((8, 8)) for image in cells(whole, 3)] == [(i, 300 % 256, 0) for i in range(3)]
    assert [image.size for image in cells(whole, 3)] == [(16, 16)] * 3


def test_drawn_images_are_shown_without_an_export_too(tmp_path, monkeypatch):
    run = write_run(tmp_path / 'run')
    (run / 'generated').mkdir()
    Image.new('RGB', (8, 8)).save(run / 'generated/0000.png')
    assert main(monkeypatch, run) == 0
    assert 'The first 1 of 1 image from the exported pipeline, each' in assert_stands_alone((run / 'report.html').read_text()).text


def test_tables_of_stable_diffusion_are_the_demos(tmp_path, monkeypatch):
    run = write_run(tmp_path / 'run')
    assert main(monkeypatch, run) == 0
    assert '$33,875' not in (run / 'report.html').read_text()
    (run / 'judge.json').write_text('{"foreground": 0.94, "background": 1.0}')
    assert main(monkeypatch, run) == 0
    assert '$33,875' in (run / 'report.html').read_text()


def test_a_page_begins_with_the_scores_and_the_worst_of_them(tmp_path, monkeypatch):
    run = write_run(tmp_path / 'run')
    shares = '"foreground": 0.984, "background": 1.0, "shape": 0.359, "size": 0.844, "place": 0.906, "everything": 0.344'
    (run / 'judge.json').write_text(f'{{"num_images": 64, {shares}}}')
    assert main(monkeypatch, run) == 0
    text = assert_stands_alone((run / 'report.html').read_text()).text
    page = [
        text.index(tile)
        for tile in ('all five right', 'right shape', 'right size', 'right place', 'right foreground', 'right background', 'images/s')
    ]
    assert page == sorted(page)
    assert text.index('34.4%') < text.index('35.9%') < text.index('84.4%') < text.index('images/s')


def test_hostile_names_and_captions_are_text(tmp_path, monkeypatch):
    run = write_run(tmp_path / 'run', prompts=[EVIL, 'b'], weights=EVIL, device=EVIL, commit=EVIL, cpu=EVIL)
    for path in [run / 'generated/0000.png']:
        path.parent.mkdir()
        info = PngInfo()
        info.add_text('prompt', EVIL)
        Image.new('RGB', (8, 8)).save(path, pnginfo=info)
    (run / EVIL).mkdir()
    (run / EVIL / 'manifest.json').write_text(json.dumps({'kind': EVIL, 'attempted': 2, 'num_samples': 1, 'dropped': {EVIL: 1}}))
    (run / 'export').mkdir()
    (run / 'export/export.json').write_text(json.dumps({'weights': EVIL}))
    assert main(monkeypatch, run) == 0
    page = assert_stands_alone((run / 'report.html').read_text())
    assert page.text.count(EVIL) >= 8
    other = write_run(tmp_path / EVIL, 'optimizer.lr=1e-3')
    assert main(monkeypatch, run, other, '--out', tmp_path / 'both.html') == 0
    assert EVIL in assert_stands_alone((tmp_path / 'both.html').read_text()).text


def test_two_runs_are_compared(tmp_path, monkeypatch, capsys):
    slower = [{**record, 'loss/train/total': 2 * record['loss/train/total']} for record in LOG[:20]]
    runs = [
        write_run(tmp_path / 'one', 'name=one', 'ema.half_life=40ba'),
        write_run(tmp_path / 'two', 'name=two', 'optimizer.lr=3e-3', 'ema.half_life=null', log=slower, commit='def5678'),
    ]
    assert main(monkeypatch, *runs) == 0
    assert capsys.readouterr().out == f'report: {tmp_path}/comparison.html\n'
    page = assert_stands_alone((tmp_path / 'comparison.html').read_text())
    assert ['', 'one', 'two'] in page.rows
    assert page.row('batches') == ['300 of 600', '200 of 600']
    assert 'learning rate over batches' in {attributes['aria-label'] for attributes in page.attributes('svg')}
    assert page.row('training loss in the last tenth, ± standard deviation') == [
        FINAL,
        f'{1 / 19 + 1 / 20:.4f} ± {np.std([2 / 19, 2 / 20], ddof=1):.4f}',
    ]
    headings = [text.strip() for text in page.texts if text.strip() in ('Differences of the recipes', 'Results', 'Curves', 'Samples')]
    assert headings == ['Differences of the recipes', 'Results', 'Curves', 'Samples']
    assert page.row('optimizer.lr') == ['0.0015', '0.003']
    assert page.row('ema.half_life') == ['40ba', 'null']
    assert page.row('commit') == ['abc1234', 'def5678']
    assert not [row for row in page.rows if row[0] in ('optimizer.eps', 'name', 'run_folder')]
    assert [attributes['alt'] for attributes in page.attributes('img')] == [prompt for prompt in PROMPTS for _ in range(2)]
    assert {'one: batch 300, ema weights', 'two: batch 300, ema weights'} <= set(page.texts)


def test_runs_of_different_batch_sizes_are_compared_by_samples(tmp_path, monkeypatch):
    """300 batches of 64 and of 32: the second curve is half as long."""
    runs = [write_run(tmp_path / 'one', 'name=one'), write_run(tmp_path / 'two', 'name=two', 'batch.global_size=32', 'batch.micro_size=32')]
    assert main(monkeypatch, *runs) == 0
    text = (tmp_path / 'comparison.html').read_text()
    titles = {attributes['aria-label'] for attributes in assert_stands_alone(text).attributes('svg')}
    assert titles
    assert all(title.endswith(' over samples seen') for title in titles)
    panel = text[text.index('aria-label="learning rate over') :].split('</svg>')[0]
    curves = re.findall(r'<path d="([^"]*)" clip-path="[^"]*" style="fill: none; stroke: var\(--series[12]\)', panel)
    ends = [[float(line.split()[0]) for line in re.split('[ML]', curve)[1:]] for curve in curves]
    long, short = (line[-1] - line[0] for line in ends)
    assert short / long == pytest.approx(0.5, abs=1e-4)


def test_what_is_no_run_is_refused(tmp_path, monkeypatch, capsys):
    run = write_run(tmp_path / 'run')
    assert main(monkeypatch, run, tmp_path / 'nowhere') == 2
    assert 'nowhere is not the folder of a run' in capsys.readouterr().err


def test_the_page_of_a_folder_that_is_closed_goes_elsewhere(tmp_path, monkeypatch, capsys):
    run = write_run(tmp_path / 'run')
    monkeypatch.setattr(os, 'access', lambda folder, _: Path(folder) != run)  # root, who may run this, is kept from no folder
    assert main(monkeypatch, run) == 2
    assert capsys.readouterr().err == f'{run}/report.html: cannot be written: {run} is closed to this user; name another place with --out FILE\n'
    assert main(monkeypatch, run, '--out', tmp_path / 'x.html') == 0
    assert 'abc1234' in assert_stands_alone((tmp_path / 'x.html').read_text()).text
    assert not (run / 'report.html').exists()


@pytest.mark.parametrize('count', range(1, 14))
def test_a_grid_can_be_cut_up_again(count):
    images = [Image.new('RGB', (5, 7), (i, 2 * i, 3 * i)) for i in range(count)]
    assert [image.tobytes() for image in cells(grid(images), count)] == [image.tobytes() for image in images]


END = {'event': 'end', 'process': 'a', 'time': 1_700_000_200.0, 'batch': 300, 'steps': 0, 'sec': {}}


@pytest.mark.parametrize(
    ('events', 'hours_left', 'duration', 'state', 'shown'),
    [
        (None, None, '600ba', 'not begun', 'Not begun.'),
        ([{**END, 'reason': 'finished'}], None, '300ba', 'finished', 'Finished: batch 300 of 300, 100.0%. Export it: python -m diffusion.export'),
        ([{**END, 'reason': 'stopped early', 'saved': 300}], None, '600ba', 'stopped early',
         'Stopped early: batch 300 of 600, 50.0%. Its score no longer improved; an eval.samples.stop.patience above 5 lets it train on. Export it:'),
        ([{**END, 'reason': 'Preempted', 'saved': 250}], None, '600ba', 'stopped on request',
         'Stopped on request: batch 300 of 600, 50.0%. Run the same command again: it resumes from the checkpoint of batch 250.'),
        ([{**END, 'reason': 'ZeroDivisionError'}], None, '600ba', 'stopped by ZeroDivisionError', 'it resumes from the beginning: nothing was saved.'),
        ([], None, '600ba', 'stopped without a word', 'Stopped without a word: batch 300 of 600'),
        ([{**END, 'event': 'steps', 'time': 4e9}], 1.5, '4ep', 'running', 'Running: batch 300 of 9,675, 3.1%. Nothing to do: about 1.50 h to go;'),
    ],
)  # fmt: skip
def test_a_page_begins_with_what_the_run_is_at(events, hours_left, duration, state, shown, tmp_path, monkeypatch):
    """1.5 hours at 111 images/s are 9,375 batches of 64 more; without a word for a quarter of an hour a process counts as gone."""
    log = LOG if hours_left is None else [*LOG, {'batch': 300, 'time/remaining_hours': hours_left, 'throughput/images_per_sec': 9375 * 64 / 5400}]
    run = write_run(tmp_path / 'run', f'train.duration={duration}', log=log)
    if events is None:
        (run / 'events.jsonl').unlink()
    else:
        with (run / 'events.jsonl').open('a') as file:
            file.writelines(json.dumps(event) + '\n' for event in events)
    assert main(monkeypatch, run) == 0
    text = assert_stands_alone((run / 'report.html').read_text()).text
    assert shown in text
    assert text.index(shown) < text.index('batches')
    assert main(monkeypatch, run, run) == 0
    assert assert_stands_alone((tmp_path / 'comparison.html').read_text()).row('state') == [state, state]


def test_the_final_loss_of_a_short_run_is_of_its_end(tmp_path, monkeypatch):
    losses = [1.0, 0.5, 0.3, 0.2, 0.12, 0.1, 0.09, 0.08]
    run = write_run(tmp_path / 'run', log=[{'batch': 5 * i, 'loss/train/total': loss} for i, loss in enumerate(losses, 1)])
    assert main(monkeypatch, run) == 0
    assert '0.08 training loss in the last tenth (1 record)' in assert_stands_alone((run / 'report.html').read_text()).text


def test_samples_use_the_width(tmp_path, monkeypatch):
    """Two images of 16 px have a column each, and fill it."""
    run = write_run(tmp_path / 'run')
    assert main(monkeypatch, run) == 0
    text = (run / 'report.html').read_text()
    assert text.count('class="strips" style="--images: 2"') == 1
    assert '.strips img { width: 100%' in text
    assert not [attributes for attributes in assert_stands_alone(text).attributes('img') if 'width' in attributes]


@pytest.mark.parametrize(
    ('name', 'content'),
    [
        *((name, b'{"device": "C') for name in ('environment.json', 'judge.json', 'export/export.json', 'samples/ba00000300-ema.png')),
        *(('environment.json', content) for content in (b'[' * 100_000, b'[1]', b'', b'{"num_gpus": "x"}', b'{"price": {"dollars": 1}}')),
        ('judge.json', b'{"foreground": "x"}'),
        ('judge.json', b'{"real": 1}'),
        ('data/manifest.json', b'{"kind": "images"}'),
        ('generated/0000.png', b'x'),
        ('recipe.yaml', b'\xff'),
        *((name, folder_or_fifo) for name in ('log.jsonl', 'events.jsonl', 'environment.json', 'samples/ba00000300-ema.png')
          for folder_or_fifo in (Path.mkdir, os.mkfifo)),
    ],
    ids=range(22),
)  # fmt: skip
def test_a_damaged_file_is_named(name, content, tmp_path, monkeypatch, capsys):
    run = write_run(tmp_path / 'run')
    (run / name).parent.mkdir(exist_ok=True)
    (run / name).unlink(missing_ok=True)
    content(run / name) if callable(content) else (run / name).write_bytes(content)
    assert main(monkeypatch, run) == 2
    assert capsys.readouterr().err.startswith(f'{run / name}: ')


@pytest.mark.parametrize(
    ('name', 'line'),
    [
        ('log.jsonl', {'batch': '<script>', 'loss/train/total': 'x'}),
        ('log.jsonl', {'loss/train/total': 1.0}),
        ('log.jsonl', ['batch']),
        ('log.jsonl', {'batch': 310, 'loss/train/total': math.nan}),
        ('log.jsonl', {'batch': 310, 'loss/train/total': 10**400}),
        ('log.jsonl', {'batch': None}),
        ('events.jsonl', {'event': 'x'}),
        ('events.jsonl', {'event': 'x', 'process': 'a', 'time': math.nan, 'sec': {}}),
        ('events.jsonl', {'event': 'x', 'process': 'a', 'time': 1e15, 'sec': {}}),
        ('events.jsonl', {'event': 'x', 'process': 'a', 'time': 1.0, 'sec': {}, 'batch': None, 'steps': 1}),
        ('events.jsonl', {'event': 'save', 'process': 'a', 'time': 1.0, 'sec': {}}),
        ('events.jsonl', {'event': 'batch', 'process': 'a', 'time': 1.0, 'sec': {'compute': 'x'}}),
        ('events.jsonl', {'event': 'batch', 'process': 'a', 'time': 1.0, 'sec': {}, 'batch': 1}),
    ],
)
def test_a_line_of_another_kind_is_named(name, line, tmp_path, monkeypatch, capsys):
    run = write_run(tmp_path / 'run')
    with (run / name).open('a') as file:
        file.write(json.dumps(line) + '\n')
    number = len((run / name).read_text().splitlines())
    assert main(monkeypatch, run) == 2
    assert capsys.readouterr().err.startswith(f'{run / name}: line {number} is not what a run writes there')


@pytest.mark.parametrize(
    ('prompts', 'size', 'message'),
    [
        ('[1, 2', (16, 16), 'is no grid of samples'),
        (json.dumps(['x'] * 81), (16, 16), 'is no grid of samples: 81 prompts of 16 x 16 pixels'),
        ('[]', (20_000, 20_000), 'cannot be read: Image size (400000000 pixels) exceeds limit'),
    ],
)
def test_an_image_that_is_no_grid_is_named(prompts, size, message, tmp_path, monkeypatch, capsys):
    run = write_run(tmp_path / 'run')
    info = PngInfo()
    info.add_text('prompts', prompts)
    Image.new('1', size).save(run / 'samples/ba00000300-ema.png', pnginfo=info)
    assert main(monkeypatch, run) == 2
    assert f'samples/ba00000300-ema.png: {message}' in capsys.readouterr().err


ONLINE = ['data.kind=images', 'data.encoders={ray: {actors: 8, gpus: 0.5, resource: A10G}}']
PAID = [*LOG, {'batch': 300, 'cost/dollars_so_far': 0.5}]


def test_encoders_on_other_machines_are_part_of_the_money(tmp_path, monkeypatch):
    """160 seconds of running processes, 8 encoders of half an A10G at $1.212."""
    run = write_run(tmp_path / 'run', *ONLINE, log=PAID)
    assert main(monkeypatch, run) == 0
    page = assert_stands_alone((run / 'report.html').read_text())
    spent = 8 * 160 / 3600 * 0.5 * 1.212
    assert '8 encoders x 0.044 h' in page.row('encoders (data.encoders)')[0]
    assert page.row('spent on encoders')[0].startswith(f'${spent:.4f} at $1.212 per GPU-hour (gpu_hour.a10g.on-demand')
    assert page.row('spent with encoders')[0] == f'${0.5 + spent:.4f}'
    assert f'${0.5 + spent:.3f}' in page.text

    alone = write_run(tmp_path / 'alone', log=PAID)
    assert main(monkeypatch, alone, run, '--out', tmp_path / 'both.html') == 0
    assert assert_stands_alone((tmp_path / 'both.html').read_text()).row('dollars') == ['$0.5000', f'${0.5 + spent:.4f}']


def test_encoders_without_a_price_are_said_to_be_missing(tmp_path, monkeypatch):
    run = write_run(tmp_path / 'run', *ONLINE, 'data.encoders.ray.resource=rack7', log=PAID)
    assert main(monkeypatch, run) == 0
    page = assert_stands_alone((run / 'report.html').read_text())
    assert 'not included: their price is not known; give cost.price_per_encoder_hour' in page.row('spent on encoders')[0]
    assert 'dollars so far, without the encoders' in page.text
    given = write_run(tmp_path / 'given', *ONLINE, 'data.encoders.ray.resource=rack7', 'cost.price_per_encoder_hour=9', log=PAID)
    assert main(monkeypatch, given) == 0
    assert f'${8 * 160 / 3600 * 9:.4f} at $9.00 per machine-hour' in (given / 'report.html').read_text()
