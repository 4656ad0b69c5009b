"""Killed at any instant, a run ends bit-identical to one that nobody touched."""

import random
import re
import signal

import pytest

from diffusion.checkpoints.owner import OWNER
from diffusion.checkpoints.reading import find_checkpoint
from diffusion.contracts.errors import PREEMPTED, RunHeld
from diffusion.faults.guards import RunLock
from diffusion.faults.process import explain
from tests.faults.driver import Forked, digest, everything_in

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
            process.wait()
        return everything_in(find_checkpoint(folder))

    return run


def go_on(base, tmp_path, failpoint='', code=0):
    with Forked(base, tmp_path / 'output.txt', DIFFUSION_FAILPOINT=failpoint) as process:
        process.wait(code)
        return process.code()


def same(ours, theirs):
    assert ours.keys() == theirs.keys()
    return [part for part in ours if digest(ours[part]) != digest(theirs[part])]


def test_killed_in_a_step_and_in_a_save(base, untouched, tmp_path):
    for failpoint in ('save.half@2:kill', 'step@4:kill', 'save.renamed@2:kill'):
        go_on(base, tmp_path, failpoint, code=-signal.SIGKILL)
    go_on(base, tmp_path)
    assert same(everything_in(find_checkpoint(tmp_path / 'run')), untouched(0)) == []


@pytest.mark.parametrize('workers', [pytest.param(0, marks=pytest.mark.long), 1])
def test_killed_after_the_last_batch_of_an_epoch(base, untouched, tmp_path, workers):
    """There nothing is left to load, and loader processes that stay draw their seed but once a run."""
    run = [*base, f'data.workers={workers}']
    go_on(run, tmp_path, 'save.latest@3:kill', code=-signal.SIGKILL)
    go_on(run, tmp_path)
    assert same(everything_in(find_checkpoint(tmp_path / 'run')), untouched(workers)) == []


@pytest.mark.long
@pytest.mark.parametrize('workers', [0, 1, 2])
def test_killed_at_every_step_of_a_save(base, untouched, tmp_path, workers):
    run = [*base, f'data.workers={workers}']
    killed = 0
    for failpoint in (f'{place}@{count}:kill' for place in SAVING for count in (1, 2)):
        code = go_on(run, tmp_path, failpoint, code=None)
        assert code in (0, -signal.SIGKILL), (tmp_path / 'output.txt').read_text()
        killed += code != 0
        if code == 0:
            break
    assert killed >= 6
    go_on(run, tmp_path)
    assert same(everything_in(find_checkpoint(tmp_path / 'run')), untouched(workers)) == []


@pytest.mark.long
@pytest.mark.parametrize(('workers', 'seed'), [(0, 1), (1, 2), (2, 3)])
def test_killed_at_random_instants(base, untouched, tmp_path, workers, seed):
    run, rng = [*base, f'data.workers={workers}'], random.Random(seed)
    for _ in range(8):
        with Forked(run, tmp_path / 'output.txt') as process:
            assert process.code(rng.uniform(1.0, 8.0)) in (None, 0), process.read()
    go_on(run, tmp_path)
    assert same(everything_in(find_checkpoint(tmp_path / 'run')), untouched(workers)) == []


def test_a_finished_run_ends_at_once_and_changes_nothing(base, tmp_path):
    short = [*base, 'train.duration=3ba', 'optimizer.decay=constant']
    go_on(short, tmp_path)

    def checkpoints():
        return {path.name: path.read_bytes() for path in (tmp_path / 'run/checkpoints').iterdir() if path.name != OWNER}

    before = checkpoints()
    go_on(short, tmp_path)
    assert 'is already trained' in (tmp_path / 'output.txt').read_text()
    assert checkpoints() == before


def test_two_processes_do_not_train_into_one_folder(base, tmp_path, capsys):
    with Forked([*base, 'train.duration=100000ba', 'optimizer.decay=constant'], tmp_path / 'first.txt') as first:
        first.wait_until((tmp_path / 'run/log.jsonl').exists)
        with pytest.raises(RunHeld, match=f'process {first.pid} on .* trains into this folder'):
            RunLock(tmp_path / 'run', patience_sec=0.5)
        (said,) = capsys.readouterr().err.splitlines()  # once, before the wait
        assert re.fullmatch(rf'{tmp_path}/run: process {first.pid} on .* trains into this folder; waiting up to 0.5 s for it to end', said)
        assert first.code() is None
    RunLock(tmp_path / 'run', patience_sec=0.5).post_close()  # it goes with its process, however that ends
    assert explain(RunHeld('held')) == PREEMPTED
