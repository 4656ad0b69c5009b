"""A GPU check ends in slices, resumes, survives its parts, and says what is wrong; its small form is right on a CPU."""

import importlib
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from benchmarks import gpu_check
from benchmarks import measured as measured_by
from benchmarks.checking.cases import PARTS, Setting
from benchmarks.checking.judging import problems
from benchmarks.checking.rows import default_out
from benchmarks.checking.slices import Check, TooShort
from benchmarks.measured import hold
from diffusion.common.files import read_json_lines
from diffusion.contracts.errors import InputError
from tests.benchmarks.small_parts import MACHINE, PREDICTIONS, measured, predictions
from tests.conftest import REPOSITORY, run_here, run_python


def statuses(check):
    return {(part, name): row['status'] for (part, name), row in check.rows.items()}


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
    assert len(list(read_json_lines(again.out))) == 5 + 1 + 3


def test_rows_of_another_commit_or_form_do_not_count(check):
    check('good').run_slice(60)
    assert check('good', machine={**MACHINE, 'commit': 'other'}).remaining()
    assert check('good', machine={**MACHINE, 'gpu': 'NVIDIA H200'}).remaining()
    assert check('good', tiny=True).remaining()


def test_a_slice_that_ends_keeps_its_rows_and_the_next_one_measures_the_rest(check):
    first = check('endless')
    first.run_slice(10)
    assert statuses(first) == {('endless', 'first'): 'measured'}
    assert [part.name for part in first.remaining()] == ['endless']
    with first.out.open('a') as file:
        file.write('{"benchmark": "gpu_check", "part": "endl')  # a kill in the middle of a line
    second = check('endless')
    second.run_slice(60)
    assert statuses(second)['endless', 'slow'] == 'measured'
    assert measured(second) == ['first', 'slow', 'slow']
    names = [(row['part'], row['row']) for row in read_json_lines(second.out)]
    assert len(names) == len(set(names)) == 3


def test_what_does_not_fit_into_any_slice_is_refused_with_the_length_it_needs(check):
    with pytest.raises(TooShort, match=r'planned_long, long is planned with 1000 s.*give --limit 1030 or more'):
        check('planned_long').run_slice(30)
    assert measured(check('planned_long')) == ['first', 'second']
    with pytest.raises(TooShort, match='nothing was measured in so short a time; give --limit 0 or more'):
        check('good').run_slice(0.1)


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


def test_compiled_code_stays_in_the_folder_that_is_named_for_it(check, tmp_path):
    one = check('compiles')
    one.cache = tmp_path / 'cache'
    one.run_slice(60)
    assert len(list((tmp_path / 'cache').rglob('kernel'))) == 2
    one.clear()
    assert len(list((tmp_path / 'cache').rglob('kernel'))) == 2


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
    with hold(path, 'another check'), pytest.raises(InputError, match='another check'):
        hold(path, 'another check')
    hold(path, 'another check').close()


@pytest.mark.parametrize(('option', 'place', 'said'), [('--out', 'rows.html', 'where the page would go'), ('--out', '.', 'Is a directory'),
                                                       ('--out', 'file/rows.jsonl', 'File exists'), ('--work', 'file', 'File exists')])  # fmt: skip
def test_places_that_cannot_be_written_are_refused_before_anything_is_measured(tmp_path, monkeypatch, option, place, said):
    monkeypatch.setattr(measured_by, 'environment_apart', measured_by.environment)
    (tmp_path / 'file').touch()
    places = {'--out': tmp_path / 'rows.jsonl', '--work': tmp_path / 'work', option: tmp_path / place}
    refused = run_here('benchmarks.gpu_check', *(word for pair in places.items() for word in pair), code=2).stderr
    assert said in refused
    assert len(refused.splitlines()) == 1


def test_what_resumes_does_not_forget_again():
    assert gpu_check.command_to_resume(['--again', 'demo', 'memory', '--limit', '60']) == 'python -m benchmarks.gpu_check --limit 60'


def test_what_is_measured_again_is_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        sys, 'argv', ['gpu_check', '--only', 'ceilings', '--again', 'demo', '--work', str(tmp_path), '--out', str(tmp_path / 'rows.jsonl')]
    )
    assert gpu_check.main() == 2
    assert '--again demo: not one of --only ceilings, and would not be measured' in capsys.readouterr().err


def test_an_error_while_measuring_does_not_pass_for_a_wrong_place(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_check, 'environment_apart', lambda: MACHINE)
    monkeypatch.setattr(gpu_check.signal, 'signal', lambda *_: None)  # this process keeps its own
    monkeypatch.setattr(Check, 'run_slice', lambda *_: (tmp_path / 'none').read_text())
    monkeypatch.setattr(sys, 'argv', ['gpu_check', '--work', str(tmp_path / 'work'), '--out', str(tmp_path / 'rows.jsonl')])
    with pytest.raises(FileNotFoundError):
        gpu_check.main()
    hold(tmp_path / 'work/lock', 'held').close()  # is free again


def test_every_part_has_cases_with_names_of_their_own(tmp_path):
    for tiny in (True, False):
        for one in PARTS:
            if one.name == 'correctness' and not tiny:
                continue  # the same cases
            module, _, function = one.cases.partition(':')
            names = [case.name for case in getattr(importlib.import_module(module), function)(Setting(tiny, str(tmp_path), str(tmp_path / 'rows')))]
            assert names, one.name
            assert len(names) == len(set(names)), one.name


def test_the_command_ends_with_1_where_a_prediction_is_wrong_and_with_0_where_it_is_not(tmp_path, monkeypatch):
    monkeypatch.setattr(measured_by, 'environment_apart', measured_by.environment)  # this process has imported torch already
    (tmp_path / 'wrong.yaml').write_text(PREDICTIONS)
    parts = ['ceilings', 'correctness', 'optimizer']
    options = ['--only', *parts, '--work', tmp_path / 'work', '--out', tmp_path / 'rows.jsonl']
    said = run_here('benchmarks.gpu_check', *options, '--predictions', tmp_path / 'wrong.yaml', code=1).stdout
    assert '1 problem:\n  ceilings, copy: gb_per_sec is' in said
    assert 'predicted 1,000,000,000 (-100%; a mistake)' in said
    html = (tmp_path / 'rows.html').read_text()
    for text in ('1 problem', 'gb_per_sec 1,000,000,000 (-100%)', 'words that differ', 'ms, Composer&#39;s'):
        assert text in html, text
    rows = list(read_json_lines(tmp_path / 'rows.jsonl'))
    assert [row['part'] for row in rows if row['status'] == 'finished'] == parts
    assert len({(row['part'], row['row']) for row in rows}) == len(rows)
    assert sum(len(row.get('checks', ())) for row in rows) >= 12  # all of them right, or there would be more than one problem
    assert {'torch', 'commit', 'cpu', 'gpu', 'date'} <= rows[0].keys()
    assert 'nothing disagrees' in run_here('benchmarks.gpu_check', *options).stdout
    assert list(read_json_lines(tmp_path / 'rows.jsonl')) == rows


def test_the_command_says_what_remains_and_how_to_go_on(tmp_path, monkeypatch):
    monkeypatch.setattr(measured_by, 'environment_apart', measured_by.environment)
    options = ['--only', 'ceilings', 'demo', '--work', tmp_path / 'work', '--out', tmp_path / 'rows.jsonl', '--limit']
    said = run_here('benchmarks.gpu_check', *options, 125, code=75).stdout  # 120 s planned and 5 s kept back: no time is left for the start
    assert '1 of 2 parts to do: demo. Resume with\n  python -m benchmarks.gpu_check --only ceilings demo' in said
    assert 'Still to be measured: demo' in (tmp_path / 'rows.html').read_text()
    assert '--limit 125: nothing was measured in so short a time' in run_here('benchmarks.gpu_check', *options, 125, code=2).stderr
    assert '--limit 60: demo, drawn shapes is planned with 120 s' in run_here('benchmarks.gpu_check', *options, 60, code=2).stderr


START = """
import sys
from pathlib import Path
from benchmarks.checking.cases import Setting
from benchmarks.checking.slices import Check
from tests.benchmarks.small_parts import MACHINE, PREDICTIONS, measured, part, predictions
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
    assert [row['row'] for row in read_json_lines(one.out)] == ['first', 'slow', '']


def running(word):
    """Processes with this word in their command line."""
    found = []
    for path in Path('/proc').glob('[0-9]*/cmdline'):
        with suppress(OSError):
            found += [path] if word in path.read_text() else []
    return found


@pytest.mark.long
def test_the_small_form_of_everything_is_right(tmp_path):
    options = ['--work', tmp_path / 'work', '--out', tmp_path / 'rows.jsonl', '--limit', 1500]
    said = run_python('-m', 'benchmarks.gpu_check', *options).stdout
    assert 'nothing disagrees' in said
    rows = list(read_json_lines(tmp_path / 'rows.jsonl'))
    assert {row['part'] for row in rows if row['status'] == 'finished'} == {part.name for part in PARTS}
    assert sum(len(row.get('checks', ())) for row in rows) >= 17
    html = (tmp_path / 'rows.html').read_text()
    assert html.count('<img') == 1  # the demo's
    assert (tmp_path / 'rows-demo.png').exists()
    assert not (tmp_path / 'work/runs').exists()
