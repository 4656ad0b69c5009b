"""Sweeps for real: on one and two processes, and with launchers that fail in every way."""

import json
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from subprocess import DEVNULL, Popen

import pytest
import torch
import yaml

from benchmarks import throughput
from benchmarks.measured import environment
from benchmarks.sweeping import launching
from benchmarks.sweeping.loading import load_sweep
from benchmarks.sweeping.rows import NUMBERS, RowsFile, verdict
from benchmarks.sweeping.sweep import Sweep
from benchmarks.throughput import sweep_points
from diffusion.common.files import read_json_lines
from diffusion.contracts.errors import InputError
from diffusion.families.registry import build_network, training_flops
from diffusion.faults.process import explain
from diffusion.recipe import RecipeError
from diffusion.training.micro_batch import NoRoom
from tests.conftest import REPOSITORY, run_python
from tests.faults.children import exit_code, start

METHOD = {'warmup_steps': 2, 'windows': 2, 'steps_per_window': 2, 'steady_within': 0.9, 'max_steps': 40}
SMALL = {
    'recipe': str(REPOSITORY / 'yamls/shapes.yaml'),
    'set': {
        'model.network': 'tiny',
        'data.kind': 'synthetic',
        'data.workers': 0,
        'batch.global_size': 8,
        'batch.micro_size': 4,
        'train.cpu_threads': 1,
        'ema.start': '0ba',
    },
    'stand_in_encoders': True,
    'time_limit_sec': 200,
    **METHOD,
}
# A launcher in the place of composer, which writes what a run logs; what it does is said by the point's weight decay.
FAKE = """
import json, os, signal, subprocess, sys, time
from pathlib import Path

given = dict(word.split('=', 1) for word in sys.argv if '=' in word)
folder, deed = Path(json.loads(given['run_folder'])), int(float(given['optimizer.weight_decay']) * 10)
with open(sys.argv[1], 'a') as file:
    file.write(f'{deed}\\n')
print('about to do', deed, flush=True)
if deed == 1:
    raise ValueError('no such thing')
if deed in (2, 8):
    child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])
    Path(sys.argv[1] + '.child').write_text(str(child.pid))
    if deed == 8:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)
if deed == 3:
    os.kill(os.getpid(), signal.SIGKILL)
if deed == 4:
    print('Traceback (most recent call last):\\nValueError: second')
    print('Traceback (most recent call last):\\ntorch.OutOfMemoryError: 3 GB')
    sys.exit('ERROR:composer.cli.launcher:Rank 1 crashed with exit code 70.')
if deed == 5:
    sys.exit(0)
(folder / 'environment.json').write_text(json.dumps({'device': 'CPU', 'attention': 'flash', 'micro_batch': 4, 'commit': os.environ.get('FAKE_COMMIT', 'aaa'),
                                                    'torch': '2.14.1', 'cpu': 'a CPU'}))
with (folder / 'events.jsonl').open('a') as file:
    for batch in (2, 4, 6):
        file.write(json.dumps({'event': 'steps', 'batch': batch, 'sec': {'compute': 16 / (10 + deed)}}) + '\\n')
if deed == 9:
    time.sleep(600)  # as training, which is stopped when it has been measured
"""
OUTCOMES = {
    0.0: ('measured', None),
    0.1: ('crashed', 'the launcher ended with exit code 1: ValueError: no such thing'),
    0.3: ('crashed', 'a process was killed by SIGKILL'),
    0.4: ('out of memory', 'torch.OutOfMemoryError: 3 GB'),
    0.5: ('crashed', 'the launcher ended without a result: about to do 5'),
    0.8: ('timed out', 'not done after 4 s (time_limit_sec)'),
    0.9: ('measured', None),
}


@pytest.fixture
def fake(tmp_path):
    """A function that writes a sweep over what the fake launcher does, and the list of what it did."""
    (tmp_path / 'fake.py').write_text(FAKE)
    did = tmp_path / 'did.txt'
    did.touch()

    def write(deeds, **content):
        launcher = f'{sys.executable} {tmp_path}/fake.py {did} {{command}}'
        grid = {'optimizer.weight_decay': list(deeds)}
        everything = {**SMALL, 'grid': grid, 'launcher': launcher, 'hardware': 'none', 'time_limit_sec': 4, **content}
        everything['stand_in_encoders'] = False
        everything['set'] = {**SMALL['set'], 'model.encoders.source': str(tmp_path)}
        (tmp_path / 'fake.yaml').write_text(yaml.safe_dump(everything, sort_keys=False))
        return tmp_path / 'fake.yaml'

    return write, lambda: [int(line) for line in did.read_text().split()]


@pytest.fixture(autouse=True)
def environment_at_hand(monkeypatch):
    """In this process, which has imported PyTorch and has no GPU whose memory matters."""
    monkeypatch.setattr(throughput, 'environment_apart', lambda without_gpu=False: environment())


def sweep(path, out, again=()):
    results = RowsFile(out)
    rows = sweep_points(*load_sweep(path), results, again)
    results.file.close()
    return rows


def is_alive(pid):
    try:
        return Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[0] != 'Z'
    except FileNotFoundError:
        return False


def wait_for(condition, seconds=240):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, 'it did not come about'
        time.sleep(0.05)


def test_whatever_becomes_of_a_point_it_is_a_row(fake, tmp_path, monkeypatch):
    write, did = fake
    monkeypatch.setattr(launching, 'PATIENCE_SEC', 0.5)
    rows = sweep(write(OUTCOMES, interconnect='8 x HDR'), tmp_path / 'rows.jsonl')
    assert did() == [0, 1, 3, 4, 5, 8, 9]
    assert rows == list(read_json_lines(tmp_path / 'rows.jsonl'))
    for row, (deed, (status, reason)) in zip(rows, OUTCOMES.items(), strict=True):
        assert row['settings'] == {'optimizer.weight_decay': deed}
        assert (row['status'], row['reason'] is None) == (status, reason is None)
        assert reason is None or row['reason'].startswith(reason)
        assert {'torch', 'commit', 'date', 'cpu'} <= row.keys()
        assert (row['num_gpus'], row['interconnect']) == (1, '8 x HDR')
        if status == 'measured':
            assert row['log'] is None
        else:
            assert all(row[key] is None for key in NUMBERS)
            assert f'about to do {deed * 10:.0f}' in Path(row['log']).read_text()
    assert sorted(path.name for path in (tmp_path / 'rows.points').iterdir()) == sorted(row['point'] for row in rows[1:-1])
    assert not is_alive(int((tmp_path / 'did.txt.child').read_text()))  # the whole group has ended


def test_a_point_that_has_a_row_is_not_run_again_unless_asked(fake, tmp_path):
    write, did = fake
    out = tmp_path / 'rows.jsonl'
    sweep(write([0.0, 0.3]), out)
    assert [row['images_per_sec'] for row in sweep(write([0.0, 0.3, 0.6]), out)] == [10, None, 16]  # a value was added
    assert did() == [0, 3, 6]
    sweep(write([0.6, 0.3]), out, again=['crashed'])
    assert did() == [0, 3, 6, 3]
    assert [row['status'] for row in RowsFile(out).rows.values()] == ['measured', 'crashed', 'measured']
    assert sum(1 for _ in read_json_lines(out)) == 4  # the last row of a point counts


def test_a_sweep_of_the_cpu_is_one_where_there_is_a_gpu_too(monkeypatch, tmp_path):
    def with_a_gpu(without_gpu=False):
        return {'cpu': 'EPYC', 'gpu': None if without_gpu else 'NVIDIA H200'}

    monkeypatch.setattr(throughput, 'environment_apart', with_a_gpu)
    quick, points = load_sweep(REPOSITORY / 'benchmarks/sweeps/quick-cpu.yaml')
    assert [throughput.hardware_of(one) for one in (quick, Sweep(hardware='a100-80gb'), Sweep())] == ['EPYC', 'a100-80gb', 'NVIDIA H200']
    seen = "import os; print(repr(os.environ['CUDA_VISIBLE_DEVICES']))"
    monkeypatch.setenv('CUDA_VISIBLE_DEVICES', '0')
    # Another program takes the place of Composer's launcher: what it hands on is what the processes see.
    words = launching.fill(quick.launcher.replace('-m composer.cli -n {gpus_per_node} ', ''), vars(points[0].place), ['-c', seen])
    launching.run(words, tmp_path / 'log', 60)
    assert (tmp_path / 'log').read_text() == "''\n"


@pytest.mark.parametrize('how', [signal.SIGKILL, signal.SIGINT])
def test_stopped_in_the_middle_and_run_again_gives_every_point_once(how, fake, tmp_path):
    write, did = fake
    path, out = write([0.0, 0.2, 0.7], time_limit_sec=100), tmp_path / 'rows.jsonl'
    command = [sys.executable, '-m', 'benchmarks.throughput', path, '--out', out]
    process = Popen(command, cwd=REPOSITORY, stdout=DEVNULL, stderr=(tmp_path / 'err').open('w'))
    child = tmp_path / 'did.txt.child'
    wait_for(lambda: child.exists() and child.read_text())
    process.send_signal(how)
    assert process.wait(240) == (130 if how == signal.SIGINT else -signal.SIGKILL)
    if how == signal.SIGINT:
        assert 'run the same command again to resume' in (tmp_path / 'err').read_text()
        wait_for(lambda: not is_alive(int(child.read_text())))
    else:  # the fake has ended with its sweep; ranks end with their launcher, as train.py does, and this stands for none
        os.kill(int(child.read_text()), signal.SIGKILL)
    assert [row['settings']['optimizer.weight_decay'] for row in read_json_lines(out)] == [0.0]
    with out.open('a') as file:
        file.write('{"benchmark": "throughput", "poi')  # a kill while a line was written
    (tmp_path / 'fake.py').write_text(FAKE.replace('if deed in (2, 8):', 'if deed == 8:'))
    rows = sweep(path, out)
    assert did() == [0, 2, 2, 7]
    assert [row['images_per_sec'] for row in rows] == [10, 12, 17]
    assert [row['settings']['optimizer.weight_decay'] for row in read_json_lines(out)] == [0.0, 0.2, 0.7]


@pytest.mark.parametrize(
    ('code', 'log', 'reason'),
    [
        (247, 'ERROR:composer.cli.launcher:Rank 0 crashed with exit code -9.', 'SIGKILL'),  # what Composer's launcher makes of it
        (75, 'ERROR:composer.cli.launcher:Rank 1 crashed with exit code -9.\nbye', 'SIGKILL'),
        (137, '', 'SIGKILL'),  # a shell's
        (-15, 'x', 'ended with signal SIGTERM: x'),
        (1, '', 'ended with exit code 1 and printed nothing'),
    ],
)
def test_a_launcher_that_ends_without_a_message(code, log, reason):
    found = verdict(code, log, 10)
    assert found['status'] == 'crashed'
    assert reason in found['reason']


ERRORS = {
    'too much': lambda: torch.empty(2**60, dtype=torch.uint8),  # PyTorch's own words for it
    'on a GPU': lambda: torch.cuda.OutOfMemoryError('CUDA out of memory. Tried to allocate 2.00 GiB'),
    'of a library': lambda: RuntimeError('cuDNN error: CUDNN_STATUS_ALLOC_FAILED'),
    'not one sample': lambda: NoRoom('sd2-base-256', ['batch.micro_size: not even one sample fits on this GPU']),
    'not supported': lambda: RuntimeError('cuDNN error: CUDNN_STATUS_NOT_SUPPORTED'),
    'forbidden': lambda: RecipeError('sd2-base-256', ['batch.micro_size: auto tries how much fits on a GPU, and this machine has none']),
    'a mistake': lambda: KeyError('x'),
}


def _end_by(kind, log):
    """A rank as train.py ends it."""
    with log.open('w') as file:
        os.dup2(file.fileno(), 2)
        try:
            raise ERRORS[kind]()
        except Exception as reason:
            code = explain(reason)
        sys.stderr.flush()
    os._exit(code)


@pytest.mark.parametrize(
    ('kind', 'status', 'code'),
    [
        ('too much', 'out of memory', 70),
        pytest.param('on a GPU', 'out of memory', 70, marks=pytest.mark.long),
        pytest.param('of a library', 'out of memory', 70, marks=pytest.mark.long),
        ('not one sample', 'out of memory', 64),
        pytest.param('not supported', 'crashed', 70, marks=pytest.mark.long),
        ('forbidden', 'refused', 64),
        pytest.param('a mistake', 'crashed', 70, marks=pytest.mark.long),
    ],
)
def test_what_ended_a_run_is_read_from_what_it_printed(kind, status, code, tmp_path):
    assert exit_code(start(_end_by, kind, tmp_path / 'log')) == code
    log = (tmp_path / 'log').read_text() + f'ERROR:composer.cli.launcher:Global rank 0 (PID 7) exited with code {code}\n'
    found = verdict(code, log, 10)
    assert found['status'] == status
    with pytest.raises((RuntimeError, RecipeError, KeyError)) as caught:
        raise ERRORS[kind]()
    reason = caught.value.errors[0] if isinstance(caught.value, RecipeError) else f'{type(caught.value).__name__}: {caught.value}'
    assert reason.splitlines()[0] in found['reason']


def test_a_lost_rank_is_no_lack_of_memory():
    said = 'this rank ends because rank 1 is gone without a message: killed (out of memory?), or its machine was lost; resume with: x\n'
    found = verdict(76, f'RuntimeError: closed\n{said}(exit code 76, docs/reliability.md)\nbye', 10)
    assert found == {'status': 'crashed', 'reason': f'the launcher ended with exit code 76: {said.strip()}'}


def test_a_request_to_stop_that_comes_while_a_process_starts_is_not_lost(tmp_path, monkeypatch):
    """An exception in the middle of Popen would leave the process behind, or be swallowed."""

    class Interrupted(Popen):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            os.kill(os.getpid(), signal.SIGTERM)
            with suppress(KeyboardInterrupt):  # as code that swallows it
                time.sleep(0.01)

    monkeypatch.setattr(launching.subprocess, 'Popen', Interrupted)
    pid = tmp_path / 'pid'
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            launching.run(
                [sys.executable, '-c', f'import os, time; open({str(pid)!r}, "w").write(str(os.getpid())); time.sleep(600)'], tmp_path / 'log', 60
            )
        assert signal.getsignal(signal.SIGTERM) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGTERM, before)
    assert not pid.exists() or not is_alive(int(pid.read_text()))


@pytest.fixture(scope='module')
def measured(tmp_path_factory):
    """A sweep of a point on two processes, as the command does it, and its rows; tests/test_readme.py has one on one process."""
    folder = tmp_path_factory.mktemp('sweep')
    path, out = folder / 'two.yaml', folder / 'rows.jsonl'
    path.write_text(yaml.safe_dump({**SMALL, 'grid': {'num_gpus': [2]}}, sort_keys=False))
    printed = run_python('-m', 'benchmarks.throughput', path, '--out', out)
    return path, out, printed.stdout


@pytest.mark.timeout(600)  # two launchers and four ranks, each of them 6 to 10 s of imports where nothing else runs
def test_a_row_agrees_with_itself(measured):
    _, out, printed = measured
    rows = list(read_json_lines(out))
    assert [row['num_gpus'] for row in rows] == [2]
    assert '1 point: ' in printed
    for row in rows:
        assert row['status'] in ('measured', 'unsteady')
        # By construction: all images of the measured steps in the measured time, two processes counted as two.
        assert row['images_per_sec'] * row['measured_sec'] == pytest.approx(row['measured_steps'] * 8, rel=1e-12)
        assert row['images_per_sec_per_gpu'] * row['num_gpus'] == pytest.approx(row['images_per_sec'], rel=1e-12)
        assert row['step_sec'] * row['images_per_sec'] == pytest.approx(row['global_size'], rel=1e-12)
        assert row['num_gpus'] * row['micro_size'] * row['accumulation'] == row['global_size'] == 8
        assert len(row['windows_images_per_sec']) * METHOD['steps_per_window'] == row['measured_steps']
        assert min(row['windows_images_per_sec']) <= row['images_per_sec'] <= max(row['windows_images_per_sec'])
        assert row['warmup_steps'] >= 2
        assert row['warmup_steps'] + row['measured_steps'] <= METHOD['max_steps']
        assert row['wall_sec'] > row['measured_sec']
        assert row['flop_per_image'] == training_flops('tiny', (8, 8), 16)
        assert row['num_parameters'] == sum(weights.numel() for weights in build_network('tiny').parameters())
        assert (row['device'], row['mfu'], row['peak_reserved_bytes']) == ('CPU', None, None)
        assert row['peak_allocated_bytes'] > 10**8  # a Python with PyTorch
        assert 0 <= row['data_wait_share'] < 1
        assert (row['ema'], row['precision'], row['sharding'], row['kind'], row['resolution']) == (True, 'fp32', 'ddp', 'synthetic', 32)
    assert not out.with_suffix('.points').exists()  # nothing failed


@pytest.mark.timeout(600)
def test_the_same_command_again_runs_nothing(measured):
    path, out, _ = measured
    before = out.read_bytes()
    again = run_python('-m', 'benchmarks.throughput', path, 'launcher=false {command}', '--out', out)  # which would be seen
    assert '1 point: ' in again.stdout
    assert out.read_bytes() == before
    row = json.loads(before.splitlines()[0])
    assert f'1 of 1 point was measured before (commit {row["commit"]}, torch {row["torch"]}, {row["date"][:10]}); --again ' in again.stdout


def test_old_rows_do_not_pass_for_new_ones(fake, tmp_path, monkeypatch, capsys):
    write, _ = fake
    out = tmp_path / 'rows.jsonl'
    monkeypatch.setattr(throughput.signal, 'signal', lambda *_: None)  # this process keeps its own

    def last_line(deeds, commit, *again):
        monkeypatch.setenv('FAKE_COMMIT', commit)
        monkeypatch.setattr(throughput, 'environment_apart', lambda without_gpu=False: {'commit': commit, 'torch': '2.14.1'})
        monkeypatch.setattr(throughput, 'now', lambda: '2026-11-20T10:00:00+00:00')
        monkeypatch.setattr(sys, 'argv', ['throughput', str(write(deeds)), '--out', str(out), *again])
        assert throughput.main() == 0
        return capsys.readouterr().out.splitlines()[-1]

    assert last_line([0.0, 0.4], 'aaa').startswith('2 points: ')  # all are new
    assert last_line([0.0, 0.4, 0.6], 'bbb') == (
        '2 of 3 points were measured before (commit aaa, torch 2.14.1, 2026-11-20); --again measured --again "out of memory" measures again.'
    )
    assert last_line([0.0, 0.6], 'ccc') == (
        '2 of 2 points were measured before (commit aaa, torch 2.14.1, 2026-11-20: 1; commit bbb, torch 2.14.1, 2026-11-20: 1); --again measured measures again.'
    )
    assert last_line([0.6, 0.4], 'ccc', '--again', 'measured') == (
        '1 of 2 points was measured before (commit aaa, torch 2.14.1, 2026-11-20); --again "out of memory" measures again.'
    )
    assert last_line([0.6], 'ddd', '--again', 'measured').startswith('1 point: ')


def test_a_list_says_what_has_a_row_and_what_would_be_run(fake, tmp_path, monkeypatch, capsys):
    write, did = fake
    monkeypatch.setattr(throughput.signal, 'signal', lambda *_: None)  # this process keeps its own
    out = tmp_path / 'rows.jsonl'
    rows = sweep(write([0.0, 0.4]), out)
    before = out.read_bytes()

    def listed(*options):
        monkeypatch.setattr(sys, 'argv', ['throughput', str(write([0.0, 0.4, 0.6])), '--out', str(out), '--list', *options])
        assert throughput.main() == 0
        return capsys.readouterr().out.splitlines()

    held = RowsFile(out)  # by a sweep at work, say
    with pytest.raises(InputError, match='another sweep writes into it; let it end, or name another file with --out'):
        RowsFile(out)
    head, *lines = listed()
    assert head.startswith('fake: 3 points, 1 to run in at most ')
    assert lines[0] == '  optimizer.weight_decay=0.0  (1 x 1): measured, 10.0 images/s'
    assert lines[1].startswith('  optimizer.weight_decay=0.4  (1 x 1): out of memory: torch.OutOfMemoryError: 3 GB (log: ')
    assert lines[2] == '  optimizer.weight_decay=0.6  (1 x 1): to run'
    head, *lines = listed('--again', 'measured')
    assert head.startswith('fake: 3 points, 2 to run in at most ')
    assert [line.endswith('to run again') for line in lines] == [True, False, False]
    held.file.close()
    assert out.read_bytes() == before
    assert did() == [0, 4]
    assert [line[1:4] for line in throughput.table(rows)] == [['measured', 10.0, 10.0], ['out of memory', None, None]]


def test_an_interruption_speaks_of_rows_only_if_there_are_any(fake, tmp_path, monkeypatch, capsys):
    write, _ = fake
    monkeypatch.setattr(throughput.signal, 'signal', lambda *_: None)  # this process keeps its own
    out = tmp_path / 'rows.jsonl'

    def interrupted(*_):
        raise KeyboardInterrupt

    def said(where):
        with monkeypatch.context() as patch:
            patch.setattr(throughput, where, interrupted)
            patch.setattr(sys, 'argv', ['throughput', str(write([0.0, 0.6])), '--out', str(out)])
            assert throughput.main() == 130
        return capsys.readouterr().err.splitlines()[-1]

    assert said('load_sweep') == 'stopped; nothing was run'
    assert not out.exists()
    assert said('measure_point') == 'stopped; no point was done: run the same command again to start with the first'
    sweep(write([0.0]), out)
    assert said('measure_point') == f'stopped; {out} keeps its 1 row: run the same command again to resume'
