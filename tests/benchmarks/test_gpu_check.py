"""A GPU check ends in slices, resumes, survives its parts, and says what is wrong; its small form is right on a CPU."""

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import gpu_check
from benchmarks import measured as measured_by
from benchmarks.checking import compile_cache, page
from benchmarks.checking.cases import PARTS, Setting
from benchmarks.checking.judging import Prediction, comparisons, load_predictions, problems
from benchmarks.checking.profiling import CLASSES, class_of
from benchmarks.checking.rows import default_out
from benchmarks.checking.slices import CACHE, Check, Held, TooShort, hold
from benchmarks.levers import LEVERS, ladder
from benchmarks.measuring import step
from diffusion.common.json_lines import read_lines
from diffusion.recipe import RecipeError
from tests.benchmarks.small_parts import MACHINE, part
from tests.conftest import REPOSITORY, run_here, run_python


@pytest.fixture
def check(tmp_path):
    """Makes a check of small parts; each of them in a process of its own, as on a GPU."""

    def make(*functions, machine=MACHINE, tiny=False):
        setting = Setting(tiny, str(tmp_path / 'work'), str(tmp_path / 'rows'))
        (tmp_path / 'work').mkdir(exist_ok=True)
        return Check([part(function, function) for function in functions], setting, tmp_path / 'rows.jsonl', machine, reserve_sec=0.0)

    return make


def measured(check):
    path = check.setting.folder / 'measured.txt'
    return path.read_text().split() if path.exists() else []


def statuses(check):
    return {(part, name): row['status'] for (part, name), row in check.rows.items()}


def predictions():
    return replace(load_predictions(), devices={})


def test_every_case_becomes_a_row_and_a_second_run_measures_nothing(check, capsys):
    first = check('good', 'skipped')
    first.run_slice(60)
    assert statuses(first) == {('good', 'first'): 'measured', ('good', 'second'): 'measured', ('good', ''): 'finished',
                               ('skipped', 'on the moon'): 'skipped', ('skipped', ''): 'finished'}  # fmt: skip
    assert first.rows['skipped', 'on the moon']['reason'] == 'needs the moon'
    row = first.rows['good', 'first']
    assert (row['commit'], row['cpu'], row['gb_per_sec']) == ('abc1234', 'a CPU', 10.0)
    assert row['date'] > '2026'
    assert '10 GB/s' in capsys.readouterr().out
    again = check('good', 'skipped')
    assert not again.remaining()
    again.run_slice(60)
    assert measured(again) == ['first', 'second']
    again.forget(['good'])
    again.run_slice(60)
    assert measured(again) == ['first', 'second'] * 2
    assert len(list(read_lines(again.out))) == 5 + 1 + 3


def test_rows_of_another_commit_or_form_do_not_count(check):
    check('good').run_slice(60)
    assert check('good', machine={**MACHINE, 'commit': 'other'}).remaining()
    assert check('good', machine={**MACHINE, 'gpu': 'NVIDIA H200'}).remaining()
    assert check('good', tiny=True).remaining()


def test_a_slice_that_ends_keeps_its_rows_and_the_next_one_measures_the_rest(check):
    first = check('endless')
    first.run_slice(4)
    assert statuses(first) == {('endless', 'first'): 'measured'}
    assert [part.name for part in first.remaining()] == ['endless']
    with first.out.open('a') as file:
        file.write('{"benchmark": "gpu_check", "part": "endl')  # a kill in the middle of a line
    second = check('endless')
    second.run_slice(60)
    assert statuses(second)['endless', 'slow'] == 'measured'
    assert measured(second) == ['first', 'slow', 'slow']
    names = [(row['part'], row['row']) for row in read_lines(second.out)]
    assert len(names) == len(set(names)) == 3


def test_what_does_not_fit_into_any_slice_is_refused_with_the_length_it_needs(check):
    with pytest.raises(TooShort, match=r'planned_long, long is planned with 1000 s.*give --limit 1030 or more'):
        check('planned_long').run_slice(30)
    assert measured(check('planned_long')) == ['first', 'second']


def test_a_part_that_fails_or_breaks_is_named_and_the_others_follow(check):
    one = check('failing', 'crashing', 'broken', 'good')
    one.run_slice(60)
    found = statuses(one)
    assert found['failing', 'raises'] == 'failed'
    assert found['failing', 'second'] == 'measured'
    assert found['crashing', 'crashes'] == 'crashed'
    assert found['crashing', 'after'] == 'measured'
    assert found['broken', ''] == 'crashed'
    assert found['good', ''] == 'finished'
    assert not one.remaining()
    wrong = problems(one.rows, predictions())
    assert len(wrong) == 3
    assert 'failing, raises: failed: ValueError: this is wrong (once that is put right: --again failing)' in wrong
    assert any(line.startswith('crashing, crashes: crashed: exit code 7') for line in wrong)
    assert any(line.startswith('broken: crashed: exit code 1') and 'no such library' in line for line in wrong)


def test_small_parts_share_a_process_and_a_crash_ends_only_its_own_case(check):
    one = check('good', 'crashing', 'skipped', tiny=True)
    one.run_slice(60)
    assert statuses(one)['crashing', 'crashes'] == 'crashed'
    assert not one.remaining()
    assert measured(one) == ['first', 'second', 'before', 'after']


def test_a_case_that_hangs_is_given_up(check):
    one = check('hanging')
    one.run_slice(60)  # its limit is 2 s
    assert statuses(one)['hanging', 'hangs'] == 'timed out'
    assert statuses(one)['hanging', 'next'] == 'measured'
    assert problems(one.rows, predictions())[0].startswith('hanging, hangs: timed out: not done after 2 s')


def test_a_check_beyond_its_limit_is_wrong_and_so_is_nan(check):
    one = check('out_of_limits')
    one.run_slice(60)
    assert problems(one.rows, predictions()) == ['out_of_limits, check: too large is 3, the limit is 2', 'out_of_limits, check: not a number is nan, the limit is 2']  # fmt: skip


def row(part='good', name='first', gpu=None, tiny=False, **values):
    return {'part': part, 'row': name, 'status': 'measured', 'tiny': tiny, 'gpu': gpu, **values}


@pytest.mark.parametrize(
    ('value', 'low', 'high', 'off', 'disagrees'),
    [(100, 90, 110, 0, False), (80, 90, 110, 80 / 90 - 1, False), (76, 90, 110, 76 / 90 - 1, True), (130, 90, 110, 130 / 110 - 1, True),
     (500, 90, None, 0, False), (10, None, 5, 1.0, True), (1, 0, 0, float('inf'), True), (None, 90, 110, None, True)],
)  # fmt: skip
def test_a_value_may_be_15_percent_outside_its_prediction(value, low, high, off, disagrees):
    there = replace(predictions(), devices={'h200': [Prediction('good', 'first', 'speed', 'a source', low, high)]})
    (found,) = comparisons([row(gpu='NVIDIA H200', speed=value)], there)
    assert found.disagrees == disagrees
    if off is not None:
        assert found.off == pytest.approx(off)
    (own,) = comparisons([row(speed=value, predicted={'speed': [low, high]})], predictions())
    assert own.disagrees == disagrees


def test_predictions_are_of_one_device_at_full_size():
    there = load_predictions()
    speed = row('headline', '256 px', 'NVIDIA H200', images_per_sec=300.0)
    assert [one.row for one in comparisons([speed], there)] == ['256 px']
    assert not comparisons([{**speed, 'gpu': 'NVIDIA H200 MIG 3g.71gb'}, {**speed, 'gpu': None}, {**speed, 'tiny': True}], there)
    assert str(comparisons([speed], there)[0]).startswith('headline, 256 px: images_per_sec is 300, predicted 750 (-60%; ')


def test_every_prediction_is_of_a_row_that_there_is():
    names = {'ceilings': {'matmul', 'copy'}, 'headline': {f'{px} px' for px in Setting(False, '', '').micro_batch}, 'optimizer': {'clipping + AdamW', 'EMA'},
             'demo': {'drawn shapes'}}  # fmt: skip
    for device in load_predictions().devices.values():
        for one in device:
            assert one.row in names[one.part]


def test_predictions_with_a_mistake_are_refused(tmp_path, capsys, monkeypatch):
    path = tmp_path / 'mine.yaml'
    path.write_text('tolerence: 0.1\nroofline: {source: x, resolution: 1, micro_batch: 1, classes: {}}\n')
    with pytest.raises(RecipeError, match='tolerance'):
        load_predictions(path)
    monkeypatch.setattr(sys, 'argv', ['gpu_check', '--predictions', str(path)])
    assert gpu_check.main() == 2
    assert 'tolerance' in capsys.readouterr().err


def test_the_page_has_every_row_and_the_verdict(check, tmp_path):
    one = check('good', 'failing', 'skipped', 'endless')
    one.parts = one.parts[:3]
    one.run_slice(60)
    one.parts = [*one.parts, part('endless', 'endless')]
    page.write(tmp_path / 'page.html', one, predictions())
    html = (tmp_path / 'page.html').read_text()
    for text in ('GPU check: a CPU', 'abc1234', '1 problem', 'this is wrong', 'needs the moon', 'Still to be measured: endless', 'failing: raises'):
        assert text in html, text
    assert 'http' not in html.replace('http://www.w3.org', '')  # it stands alone


def test_ceilings_that_are_measured_bound_the_classes_of_kernels():
    there = load_predictions()
    rows = {('ceilings', 'matmul'): row('ceilings', 'matmul', tflop_per_sec=788.0), ('ceilings', 'copy'): row('ceilings', 'copy', gb_per_sec=4300.0)}
    bounds = page.roof_ms(rows, there)
    assert bounds['convolution'] == pytest.approx(51.0, abs=0.1)  # 17.0 + 34.0
    assert bounds['pointwise (Triton)'] == pytest.approx(14.5, abs=0.1)
    assert set(bounds) <= set(CLASSES)


@pytest.mark.parametrize(
    ('kernel', 'name'),
    [('sm90_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc', 'convolution'), ('nvjet_tst_256x128_64x4', 'matrix product'),
     ('void cudnn::ops::nchwToNhwcKernel', 'layout change'), ('pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel', 'attention'),
     ('multi_tensor_apply_kernel<FusedAdamMathFunctor>', 'optimizer, clipping, average'), ('triton_red_fused_native_group_norm_3', 'reductions (Triton)'),
     ('triton_poi_fused_silu_12', 'pointwise (Triton)'), ('something else', 'other')],
)  # fmt: skip
def test_kernels_have_a_class(kernel, name):
    assert class_of(kernel) == name


def test_a_compile_cache_goes_to_the_next_machine(check, tmp_path, monkeypatch):
    monkeypatch.setattr(compile_cache, 'PART_BYTES', 60_000)
    one = check('compiles')
    archive, folder = tmp_path / 'cache.tar', one.setting.folder / CACHE
    assert 'nothing is packed' in compile_cache.pack(folder, archive, MACHINE)
    assert 'everything is compiled here' in compile_cache.unpack(archive, folder, MACHINE)
    one.run_slice(60)
    kernels = {path.relative_to(folder): path.read_bytes() for path in folder.rglob('kernel')}
    assert len(kernels) == 2
    compile_cache.pack(folder, archive, MACHINE)
    assert [path.stat().st_size <= 60_000 for path in compile_cache.parts_of(archive)] == [True] * 4
    other = tmp_path / 'other'
    assert 'made with torch 2.7.0, this is 2.11.0' in compile_cache.unpack(archive, other, {**MACHINE, 'torch': '2.11.0'})
    assert not other.exists()
    assert 'unpacked' in compile_cache.unpack(archive, other, MACHINE)
    assert {path.relative_to(other): path.read_bytes() for path in other.rglob('kernel')} == kernels
    assert 'there already' in compile_cache.unpack(archive, other, MACHINE)
    compile_cache.parts_of(archive)[1].write_bytes(b'torn')
    assert 'is damaged' in compile_cache.unpack(archive, tmp_path / 'third', MACHINE)
    monkeypatch.setattr(compile_cache, 'PART_BYTES', 1000)
    assert 'is the limit' in compile_cache.pack(folder, tmp_path / 'large.tar', MACHINE)
    assert not compile_cache.parts_of(tmp_path / 'large.tar')


def test_rows_of_an_earlier_day_are_resumed(check, tmp_path):
    there = tmp_path / 'a-cpu-2026-01-01.jsonl'
    assert default_out(MACHINE, False, (tmp_path, tmp_path / 'small')).parent == tmp_path
    one = check('good')
    one.run_slice(60)
    one.out.rename(there)
    assert default_out(MACHINE, False, (tmp_path, tmp_path / 'small')) == there
    assert default_out({**MACHINE, 'commit': 'other'}, False, (tmp_path, tmp_path / 'small')) != there
    assert default_out(MACHINE, True, (tmp_path, tmp_path / 'small')).parent == tmp_path / 'small'


def test_one_folder_and_one_file_of_rows_have_one_check(tmp_path):
    path = tmp_path / 'new/rows.jsonl'
    with hold(path), pytest.raises(Held, match='another check writes there'):
        hold(path)
    hold(path).close()


@pytest.mark.parametrize(('option', 'place', 'said'), [('--out', 'rows.html', 'where the page would go'), ('--out', '.', 'Is a directory'),
                                                       ('--out', 'file/rows.jsonl', 'File exists'), ('--work', 'file', 'File exists')])  # fmt: skip
def test_places_that_cannot_be_written_are_refused_before_anything_is_measured(tmp_path, monkeypatch, option, place, said):
    monkeypatch.setattr(measured_by, 'environment_apart', measured_by.environment)
    (tmp_path / 'file').touch()
    places = {'--out': tmp_path / 'rows.jsonl', '--work': tmp_path / 'work', option: tmp_path / place}
    refused = run_here('benchmarks.gpu_check', *(word for pair in places.items() for word in pair), code=2).stderr
    assert said in refused
    assert len(refused.splitlines()) == 1


def test_a_slice_that_measures_nothing_is_too_short(check):
    with pytest.raises(TooShort, match='nothing was measured in so short a time; give --limit 0 or more'):
        check('good').run_slice(0.1)


@pytest.mark.parametrize(
    ('line', 'said'),
    [
        ('{row: copy, key: ms, source: mine}', 'part missing'),
        ('{part: ceilings, row: copy, source: mine}', 'key missing'),
        ('{part: ceilngs, row: copy, key: ms, source: mine}', 'there is no part ceilngs; there are ceilings, correctness'),
        ('{part: ceilings, row: copy, key: ms, low: 7000, high: 8, source: mine}', 'low is 7,000, above high, 8'),
    ],
)
def test_a_prediction_that_means_nothing_is_refused(tmp_path, line, said):
    (tmp_path / 'wrong.yaml').write_text(FILE.replace(FILE.splitlines()[3], f'  cpu: [{line}]'))
    with pytest.raises(RecipeError, match=said):
        load_predictions(tmp_path / 'wrong.yaml')


def test_predictions_without_a_row_or_a_number_are_problems(check, tmp_path):
    one = check('good')
    one.run_slice(60)
    lines = [Prediction('good', 'third', 'gb_per_sec', 'mine', 1.0), Prediction('good', 'first', 'cpu', 'mine', 1.0)]
    assert problems(one.rows, replace(predictions(), devices={'cpu': lines})) == [
        'good, third: predicted, and there is no such row',
        'good, first: has no number cpu, predicted at least 1 (mine)',
    ]


def test_what_resumes_does_not_forget_again():
    assert gpu_check.command_to_resume(['--again', 'demo', 'memory', '--limit', '60']) == 'python -m benchmarks.gpu_check --limit 60'


def test_every_part_has_cases_with_names_of_their_own(tmp_path):
    for tiny in (True, False):
        for one in PARTS:
            if one.name == 'correctness' and not tiny:
                continue  # the same cases
            module, _, function = one.cases.partition(':')
            names = [case.name for case in getattr(importlib.import_module(module), function)(Setting(tiny, str(tmp_path), str(tmp_path / 'rows')))]
            assert names, one.name
            assert len(names) == len(set(names)), one.name


FILE = """
tolerance: 0.15
devices:
  cpu: [{part: ceilings, row: copy, key: gb_per_sec, low: 1e9, high: 1e9, source: a mistake}]
roofline: {source: x, resolution: 1, micro_batch: 1, classes: {}}
"""


def test_the_command_ends_with_1_where_a_prediction_is_wrong_and_with_0_where_it_is_not(tmp_path, monkeypatch):
    monkeypatch.setattr(measured_by, 'environment_apart', measured_by.environment)  # this process has imported torch already
    (tmp_path / 'wrong.yaml').write_text(FILE)
    parts = ['ceilings', 'correctness', 'optimizer', 'kernels']
    options = ['--only', *parts, '--work', tmp_path / 'work', '--out', tmp_path / 'rows.jsonl']
    said = run_here('benchmarks.gpu_check', *options, '--predictions', tmp_path / 'wrong.yaml', code=1).stdout
    assert '1 problem:\n  ceilings, copy: gb_per_sec is' in said
    assert 'predicted 1,000,000,000 (-100%; a mistake)' in said
    assert '1 problem' in (tmp_path / 'rows.html').read_text()
    rows = list(read_lines(tmp_path / 'rows.jsonl'))
    assert [row['part'] for row in rows if row['status'] == 'finished'] == parts
    assert len({(row['part'], row['row']) for row in rows}) == len(rows)
    assert sum(len(row.get('checks', ())) for row in rows) > 70  # all of them right, or there would be more than one problem
    assert {'torch', 'commit', 'cpu', 'gpu', 'date'} <= rows[0].keys()
    assert 'nothing disagrees' in run_here('benchmarks.gpu_check', *options).stdout
    assert list(read_lines(tmp_path / 'rows.jsonl')) == rows


def test_the_command_says_what_remains_and_how_to_go_on(tmp_path, monkeypatch):
    monkeypatch.setattr(measured_by, 'environment_apart', measured_by.environment)
    options = ['--only', 'ceilings', 'demo', '--work', tmp_path / 'work', '--out', tmp_path / 'rows.jsonl', '--limit']
    said = run_here('benchmarks.gpu_check', *options, 126, code=75).stdout  # 1 s more than planned, and the process takes longer to start
    assert '1 of 2 parts to do: demo. Resume with\n  python -m benchmarks.gpu_check --only ceilings demo' in said
    assert 'Still to be measured: demo' in (tmp_path / 'rows.html').read_text()
    assert '--limit 126: nothing was measured in so short a time' in run_here('benchmarks.gpu_check', *options, 126, code=2).stderr
    assert '--limit 60: demo, drawn shapes is planned with 120 s' in run_here('benchmarks.gpu_check', *options, 60, code=2).stderr


START = """
import sys
from pathlib import Path
from benchmarks.checking.cases import Setting
from benchmarks.checking.slices import Check
from tests.benchmarks.small_parts import MACHINE, part
folder = Path(sys.argv[1])
Check([part('endless', 'endless')], Setting(False, str(folder / 'work'), ''), folder / 'rows.jsonl', MACHINE, 0.0).run_slice(60)
"""


def test_a_killed_check_leaves_nothing_running_and_resumes(check, tmp_path):
    one = check('endless')
    process = subprocess.Popen([sys.executable, '-c', START, str(tmp_path)], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while 'slow' not in measured(one) and time.monotonic() < deadline:
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    task = str(one.setting.folder / 'task.json')
    while running(task) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not running(task)
    one.run_slice(60)
    assert measured(one) == ['first', 'slow', 'slow']
    assert [row['row'] for row in read_lines(one.out)] == ['first', 'slow', '']


def running(word):
    """Processes with this word in their command line."""
    found = []
    for path in Path('/proc').glob('[0-9]*/cmdline'):
        with suppress(OSError):
            found += [path] if word in path.read_text() else []
    return found


@pytest.mark.long
def test_the_small_form_of_everything_is_right(tmp_path, crawl):
    options = ['--work', tmp_path / 'work', '--out', tmp_path / 'rows.jsonl', '--crawl', crawl, '--limit', 1500]
    said = run_python('-m', 'benchmarks.gpu_check', *options).stdout
    assert 'nothing disagrees' in said
    rows = list(read_lines(tmp_path / 'rows.jsonl'))
    assert {row['part'] for row in rows if row['status'] == 'finished'} == {part.name for part in PARTS}
    assert sum(len(row.get('checks', ())) for row in rows) > 80
    html = (tmp_path / 'rows.html').read_text()
    assert html.count('<img') == 2  # the demo's images and those of the crawl
    assert (tmp_path / 'rows-demo.png').exists()
    assert not (tmp_path / 'work/runs').exists()


def test_a_step_that_cannot_be_measured_leaves_the_rows_before_it(encoders_folder, monkeypatch):
    """As on a GPU, where each row has the machine to itself."""
    rows = [step.Row(lever, ladder()[lever.name]) for lever in LEVERS[:3]]
    rows[1].status = 'skipped: needs a GPU'
    build = step.Row.build

    def break_down(row, *args):
        if row is rows[2]:
            raise RuntimeError('CUDA error')
        build(row, *args)

    monkeypatch.setattr(step.Row, 'build', break_down)
    setting = {'unet': 'tiny', 'resolution': 16, 'kind': 'latents', 'micro_batch': 2}
    done = []
    with pytest.raises(RuntimeError, match='CUDA error'):
        done += step.measured(rows, setting, encoders_folder, steps=1, warmup=1, alone=True)
    assert rows[0].timing is not None
    came = step.measured(rows, setting, encoders_folder, steps=1, warmup=1, alone=True)
    assert next(came).line(setting)['images_per_sec'] > 0  # before the next one is begun
    assert next(came).line(setting)['status'] == 'skipped: needs a GPU'
    with pytest.raises(RuntimeError, match='CUDA error'):
        next(came)


def test_benchmarks_step_writes_each_row_when_it_has_it(tmp_path, monkeypatch):
    """Nothing is in memory alone when the next row begins."""
    out = tmp_path / 'step.jsonl'
    at_start = []

    def rows_one_by_one(rows, *args, **kwargs):
        for row in rows:
            row.status = 'skipped: for a test'
            at_start.append(len(out.read_text().splitlines()) if out.exists() else 0)
            yield row

    monkeypatch.setattr(step, 'measured', rows_one_by_one)
    step.run(SimpleNamespace(unet='tiny', resolution=16, kind='latents', micro_batch=2, only=None, compile=False, steps=1, warmup=1, out=out))
    assert at_start == list(range(len(LEVERS)))
    assert [json.loads(line)['row'] for line in out.read_text().splitlines()] == [lever.name for lever in LEVERS]


def test_out_of_memory_is_a_row_of_the_ablation(encoders_folder, monkeypatch):
    def no_room(*args):
        raise torch.cuda.OutOfMemoryError('CUDA out of memory')

    monkeypatch.setattr(step.Row, 'build', no_room)
    rows = [step.Row(lever, ladder()[lever.name]) for lever in LEVERS[:2]]
    setting = {'unet': 'tiny', 'resolution': 16, 'kind': 'latents', 'micro_batch': 2}
    assert [row.status for row in step.measured(rows, setting, encoders_folder, steps=1, warmup=1, alone=True)] == ['out of memory'] * 2
