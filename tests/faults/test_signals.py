"""Requests to stop give a checkpoint of the very step, and an exit code that says: run me again."""

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import Dataset

from diffusion.checkpoints.reading import batches_trained, find_checkpoint, read_checkpoint
from diffusion.common.processes import STOP_SIGNALS, shield_worker, signals_held_back
from diffusion.contracts.errors import BAD_RECIPE, FINISHED, PREEMPTED
from diffusion.datasets.watched import WatchedLoader
from diffusion.faults import preemption
from diffusion.faults.process import end, explain
from diffusion.monitoring.report.run import read_log
from tests.faults.driver import Forked, Process, launch, launch_command, train, upstream_mended_it


@pytest.fixture
def endless(overrides):
    return [*overrides, 'train.duration=100000ba', 'checkpoint.every=100000ba']


def has_trained(tmp_path, batches=5):
    def reached():
        log = read_log(tmp_path / 'run/log.jsonl')
        return bool(log) and log[-1]['batch'] >= batches

    return reached


def with_handlers(number, group):
    """Command lines of the processes of `group`, but for its leader, whose main thread runs a handler of signal `number`: caught, not blocked."""
    found = []
    for folder in Path('/proc').glob('[0-9]*'):
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            if int(folder.name) != group and os.getpgid(int(folder.name)) == group:
                status = dict(line.split(':', 1) for line in (folder / 'status').read_text().splitlines())
                if (int(status['SigCgt'], 16) & ~int(status['SigBlk'], 16)) >> (number - 1) & 1:
                    found.append((folder / 'cmdline').read_text().replace('\0', ' '))
    return found


@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGUSR1])  # the others: test_terminal.py
def test_a_signal_saves_the_very_step_and_the_run_goes_on(endless, tmp_path, number):
    with Forked([*endless, 'data.workers=1'], tmp_path / 'output.txt') as process:
        process.wait_until(has_trained(tmp_path))
        assert with_handlers(number, process.pid) == []  # Composer's, in a helper, prints a traceback if the second signal comes while that ends
        sent = time.monotonic()
        process.signal(number)  # to the loader's process too, as Slurm and Ctrl-C in a terminal do
        process.signal(number)
        output = process.wait(PREEMPTED)
        assert time.monotonic() - sent < 60
    last = read_log(tmp_path / 'run/log.jsonl')[-1]['batch']
    assert f'saved after batch {last:,}; resume with: ' in output
    assert f'{last:,} steps, 0 of them lost; 1 process' in output
    assert 'Traceback' not in output
    assert batches_trained(read_checkpoint(find_checkpoint(tmp_path / 'run'))) == last
    if number == signal.SIGTERM:
        with Forked([*endless, f'train.duration={last + 2}ba'], tmp_path / 'output.txt') as process:
            process.wait()
        assert batches_trained(read_checkpoint(find_checkpoint(tmp_path / 'run'))) == last + 2


@pytest.mark.parametrize('number', [signal.SIGSEGV, signal.SIGABRT])
def test_a_crash_in_native_code_says_where(endless, tmp_path, number):
    with Forked(endless, tmp_path / 'output.txt') as process:
        process.wait_until(has_trained(tmp_path))
        process.signal(number)
        output = process.wait(-number)
    assert 'Fatal Python error' in output
    assert 'diffusion/training/builder.py' in output


def test_a_loader_process_heeds_its_parent_only():
    process = get_context('fork').Process(target=_worker, daemon=True)
    with signals_held_back():  # a library may start a thread in a fork, as PyTorch does in a loader's process
        process.start()
    subprocess.run(['sh', '-c', f'sleep 1; kill -TERM {process.pid}; kill -USR1 {process.pid}'], check=True)
    process.join(0.5)
    assert process.exitcode is None
    process.terminate()
    process.join(5)
    assert process.exitcode == 0


def _worker():
    shield_worker(0)
    time.sleep(60)


class Signalled(Dataset):
    """Someone who is not its parent sends SIGTERM to the loader's process, for each sample once more."""

    def __len__(self):
        return 20

    def __getitem__(self, i):
        os.kill(os.getpid(), signal.SIGTERM)
        return i


def _signalled_at_birth(worker_id):
    os.kill(os.getpid(), signal.SIGTERM)
    shield_worker(worker_id)


@pytest.mark.parametrize('begin', [shield_worker, _signalled_at_birth])
def test_a_loader_process_is_spared_from_its_birth_in_all_its_threads(begin):
    before = torch.get_num_threads()
    torch.set_num_threads(2)  # makes PyTorch start a thread in the loader's process before it calls `begin`
    try:
        assert list(WatchedLoader(Signalled(), batch_size=None, num_workers=1, worker_init_fn=begin)) == list(range(20))
    finally:
        torch.set_num_threads(before)
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()) & set(STOP_SIGNALS)  # this process still hears them


@pytest.fixture
def listening(monkeypatch):
    """This process hears requests, and has heard none."""
    monkeypatch.setattr(preemption, '_state', SimpleNamespace(received=False, agreed=False, phase=preemption.STARTING, stopped=None))
    preemption.listen()


def test_a_request_that_is_held_back_comes_in_the_end(listening):
    with preemption.at_step_boundaries():
        with signals_held_back():
            signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)
            assert not preemption.received()
        assert preemption.received()


def test_a_library_cannot_make_another_error_of_a_request(listening, capsys):
    try:
        signal.raise_signal(signal.SIGTERM)
    except BaseException as error:  # as safetensors does with whatever is raised within it, and diffusers with what safetensors makes of it
        wrapped = OSError(f'unable to load weights: {error!r}')
    assert explain(wrapped) == PREEMPTED
    assert 'before the first step' in capsys.readouterr().err


def test_a_library_cannot_swallow_a_request(listening):
    with suppress(preemption.Preempted):
        signal.raise_signal(signal.SIGUSR1)
    with pytest.raises(preemption.Preempted, match='before the first step'), preemption.at_step_boundaries():
        raise AssertionError('trained')


def test_a_request_after_training_does_not_replace_the_error_that_ended_it(listening):
    """The launcher sends one to all ranks when the first has ended."""
    with pytest.raises(ZeroDivisionError), preemption.at_step_boundaries():
        raise ZeroDivisionError
    signal.raise_signal(signal.SIGTERM)
    assert preemption.stopped() is None


def test_what_a_process_was_started_to_ignore_stays_ignored(listening):
    """By nohup, or in the background of a script."""
    for number in (signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    preemption.listen()
    for number in (signal.SIGHUP, signal.SIGINT):
        signal.raise_signal(number)
    assert not preemption.received()


def test_nobody_else_installs_a_handler(listening):
    ours = signal.getsignal(signal.SIGINT)
    with preemption.kept():  # as `import composer` tries to
        signal.signal(signal.SIGINT, lambda number, frame: sys.exit(128 + number))
        signal.signal(signal.SIGUSR2, signal.SIG_DFL)  # not one of ours
    assert signal.getsignal(signal.SIGINT) is ours


@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGINT])
def test_a_signal_before_training_ends_at_once(endless, tmp_path, number):
    with Forked(endless, tmp_path / 'output.txt') as process:
        process.wait_until((tmp_path / 'run/.lock').exists)
        process.signal(number)
        output = process.wait(PREEMPTED)
    assert 'before the first step: nothing is lost; resume with: ' in output
    assert 'Traceback' not in output
    assert not list((tmp_path / 'run').glob('checkpoints/*.pt'))


def test_of_a_wrong_recipe_all_ranks_have_the_same_code(tmp_path):
    """The launcher ends all of them when the first has found it wrong, and returns the code of any: 75 would be run again for ever."""
    with launch(3, ['optimizer.lr=nonsense', f'run_folder={tmp_path}/run']) as process:
        text = process.wait(None)
        code = process.code()
    # On a busy machine a rank may be told before its first line, and die of it: no code that stands for a request, so a scheduler's limit ends it.
    assert code in (BAD_RECIPE, 256 - signal.SIGTERM)
    assert 'optimizer.lr' in text
    assert f'exited with code {PREEMPTED}' not in text


def test_a_request_waits_for_the_recipe_to_be_read():
    lines = [
        'import os, signal, sys',
        'from diffusion.faults import preemption',
        'preemption.listen(preemption.READING)',
        'os.kill(os.getpid(), signal.SIGTERM)',
        'print("read", flush=True)',
        'preemption.listen(preemption.IMPORTING)',
        'print("imported", flush=True)',
    ]
    with Process(['-c', '\n'.join(lines)]) as process:
        text = process.wait(PREEMPTED)
    assert 'read' in text.splitlines()
    assert 'imported' not in text.splitlines()


def test_a_signal_while_a_finished_run_ends_changes_nothing():
    process = get_context('fork').Process(target=_finished_and_signalled)
    process.start()
    process.join(20)
    assert process.exitcode == FINISHED


def _finished_and_signalled():
    preemption.listen()
    code = end(FINISHED)
    for number in STOP_SIGNALS:
        os.kill(os.getpid(), number)
    time.sleep(2 * preemption.ONE_PRESS_SEC)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.2)
    assert all(signal.getsignal(number) is signal.SIG_IGN for number in STOP_SIGNALS)  # also when Python ends
    sys.exit(code)


@pytest.mark.long
def test_a_signal_while_a_checkpoint_is_written(endless, tmp_path):
    with train([*endless, 'checkpoint.every=3ba'], DIFFUSION_FAILPOINT='save.half@2:term') as process:
        process.wait(PREEMPTED)
    assert batches_trained(read_checkpoint(find_checkpoint(tmp_path / 'run'))) in (6, 7)


@pytest.mark.long
@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGUSR1])
def test_all_ranks_save_together_through_the_launcher(endless, tmp_path, number):
    if number == signal.SIGTERM:
        process = launch(2, endless)
    else:  # Slurm's warning goes to every process of a step, so the launcher has to be told to ignore it
        ignoring = f'import os, signal, sys; signal.signal({int(number)}, signal.SIG_IGN); os.execv(sys.executable, [sys.executable, *sys.argv[1:]])'
        process = Process(['-c', ignoring, *launch_command(2, endless)])
    with process:
        process.wait_until(has_trained(tmp_path))
        process.signal(number, group=number != signal.SIGTERM)
        process.wait(PREEMPTED)
    last = read_log(tmp_path / 'run/log.jsonl')[-1]['batch']
    assert batches_trained(read_checkpoint(find_checkpoint(tmp_path / 'run'))) == last


@pytest.mark.long
def test_twin_stock_composer_loses_what_it_did_since_the_last_checkpoint(endless, tmp_path):
    with Process(['-m', 'tests.faults.stock_recipe', tmp_path / 'stock', *endless]) as process:
        process.wait_until(has_trained(tmp_path))
        process.signal(signal.SIGTERM)
        process.wait(None)
    saved = sorted((tmp_path / 'stock').glob('ba*.pt'))
    last = read_log(tmp_path / 'run/log.jsonl')[-1]['batch']
    if process.code() == PREEMPTED or any(f'ba{last}-' in path.name for path in saved):
        upstream_mended_it()
    assert process.code() == 128 + signal.SIGTERM
