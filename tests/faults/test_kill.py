"""Killed at any instant, a run ends bit-identical to one that nobody touched."""

from __future__ import annotations

import random
import signal
import time

import pytest

from diffusion.checkpoints.reading import find_checkpoint
from diffusion.faults import exit_codes
from tests.faults.driver import Forked, digest, everything_in, train

SAVING = ('save.begin', 'save.half', 'save.written', 'save.renamed', 'save.manifest', 'save.latest', 'retention.between')
EPOCHS_BATCHES = 12  # two epochs of 48 samples


@pytest.fixture
def base(latents, overrides):
    return [
        *overrides,
        'data.kind=latents',
        f'data.streams.train.local={latents}',
        'data.caption_dropout=0.3',
        f'train.duration={EPOCHS_BATCHES}ba',
        'optimizer.lr=1e-2',
        'optimizer.decay=cosine',
        'ema.half_life=3ba',
        'checkpoint.every=2ba',
        'checkpoint.keep=2',
    ]


@pytest.fixture
def untouched(base, tmp_path):
    """The final state of an uninterrupted run, by number of loader processes."""

    def run(workers):
        folder = tmp_path / f'untouched-{workers}'
        with Forked([*base, f'run_folder={folder}', f'data.workers={workers}'], tmp_path / 'untouched.txt') as process:
            assert process.wait() == 0, process.output
        return everything_in(find_checkpoint(folder))

    return run


def go_on(base, tmp_path, failpoint=''):
    with Forked(base, tmp_path / 'output.txt', DIFFUSION_FAILPOINT=failpoint) as process:
        return process.wait()


def same(ours, theirs):
    assert ours.keys() == theirs.keys()
    return [part for part in ours if digest(ours[part]) != digest(theirs[part])]


def test_killed_in_a_step_and_in_a_save(base, untouched, tmp_path):
    for failpoint in ('save.half@2:kill', 'step@4:kill', 'save.renamed@2:kill'):
        assert go_on(base, tmp_path, failpoint) == -signal.SIGKILL
    assert go_on(base, tmp_path) == 0, (tmp_path / 'output.txt').read_text()
    assert same(everything_in(find_checkpoint(tmp_path / 'run')), untouched(0)) == []


@pytest.mark.long
@pytest.mark.parametrize('workers', [0, 1, 2])
def test_killed_at_every_step_of_a_save(base, untouched, tmp_path, workers):
    run = [*base, f'data.workers={workers}']
    killed = 0
    for failpoint in (f'{place}@{count}:kill' for place in SAVING for count in (1, 2)):
        code = go_on(run, tmp_path, failpoint)
        assert code in (0, -signal.SIGKILL), (tmp_path / 'output.txt').read_text()
        killed += code != 0
        if code == 0:
            break
    assert killed >= 6
    assert go_on(run, tmp_path) == 0
    assert same(everything_in(find_checkpoint(tmp_path / 'run')), untouched(workers)) == []


@pytest.mark.long
@pytest.mark.parametrize(('workers', 'seed'), [(0, 1), (1, 2), (2, 3)])
def test_killed_at_random_instants(base, untouched, tmp_path, workers, seed):
    run, rng = [*base, f'data.workers={workers}'], random.Random(seed)
    for _ in range(8):
        with Forked(run, tmp_path / 'output.txt') as process:
            process.process.join(rng.uniform(1.0, 8.0))
            if process.process.exitcode is None:
                process.kill()
            else:
                assert process.process.exitcode == 0, process.output
    assert go_on(run, tmp_path) == 0, (tmp_path / 'output.txt').read_text()
    assert same(everything_in(find_checkpoint(tmp_path / 'run')), untouched(workers)) == []


def test_a_finished_run_ends_at_once_and_changes_nothing(base, tmp_path):
    short = [*base, 'train.duration=3ba', 'optimizer.decay=constant']
    assert go_on(short, tmp_path) == exit_codes.FINISHED
    before = {path.name: path.read_bytes() for path in (tmp_path / 'run/checkpoints').iterdir()}
    assert go_on(short, tmp_path) == exit_codes.FINISHED
    assert 'is already trained' in (tmp_path / 'output.txt').read_text()
    assert {path.name: path.read_bytes() for path in (tmp_path / 'run/checkpoints').iterdir()} == before


def test_two_processes_do_not_train_into_one_folder(base, tmp_path, monkeypatch):
    with Forked([*base, 'train.duration=100000ba', 'optimizer.decay=constant'], tmp_path / 'first.txt') as first:
        while not (tmp_path / 'run/log.jsonl').exists():
            time.sleep(0.05)
        with train(base, DIFFUSION_LOCK_PATIENCE_SEC='1') as second:
            assert 'trains into this folder' in second.wait(exit_codes.PREEMPTED)
        assert first.process.exitcode is None
