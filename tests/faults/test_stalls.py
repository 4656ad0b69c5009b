"""A run that no longer moves ends within its limit, says where every rank stood, and names the rank's end to the others."""

import re
import time

import pytest

from diffusion.contracts.errors import CRASH, STALLED
from diffusion.faults import guards
from diffusion.monitoring.report.run import read_log
from tests.faults.driver import Forked, Process, launch

LIMIT_SEC = 3


@pytest.fixture
def base(overrides):
    return [*overrides, 'train.duration=100000ba', f'faults.stall_sec={LIMIT_SEC}']


def test_a_hung_step_ends_with_its_stacks(base, tmp_path):
    with Forked(base, tmp_path / 'output.txt', DIFFUSION_FAILPOINT='step@5:sleep') as process:
        output = process.wait(STALLED)
    stacks = (tmp_path / 'run/stalls/rank0.txt').read_text()
    for text in (output, stacks):
        assert 'nothing has moved for 3 s (faults.stall_sec)' in text
        assert 'in failpoint' in text  # where it hung
        assert 'in _train_batch' in text


def test_a_slow_step_is_announced_before_it_is_too_slow(monkeypatch, tmp_path, capsys):
    """Off a terminal nothing was printed for as long as a step took, its compilation too."""
    monkeypatch.setattr(guards, 'LINES_SEC', 0.05)
    watchdog = guards.StallWatchdog(600.0, tmp_path, 0.0)
    watchdog._beat(guards.FIRST_STEP_SEC)
    waits = iter([False] * 3 + [True])

    def wait(_):
        time.sleep(0.06)
        return next(waits)

    monkeypatch.setattr(watchdog.over, 'wait', wait)
    watchdog._watch()
    watchdog.close(None, None)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    assert all(re.search(r'nothing has ended for \d+ s; 1800 s end the run \(faults.stall_sec\)', line) for line in lines)


def test_a_run_that_moves_is_left_alone(base, tmp_path):
    """It takes longer than the limit, no step of it does."""
    with Forked([*base, 'train.duration=80ba', 'faults.stall_sec=1'], tmp_path / 'output.txt') as process:
        process.wait()


@pytest.mark.long
def test_a_stopped_rank_ends_the_others(base, tmp_path):
    with launch(2, base, DIFFUSION_FAILPOINT='step@5:stop', DIFFUSION_FAILPOINT_RANK='1') as process:
        process.wait(STALLED)
    assert 'in _train_microbatch' in (tmp_path / 'run/stalls/rank0.txt').read_text()  # where it waited for the other


@pytest.mark.long
def test_a_rank_that_fails_ends_the_others_with_its_code_and_at_once(base):
    """Rank 0 waits in a collective; without the announcement the launcher kills it after 30 s and reports that, because it reports the first rank."""
    with launch(2, [*base, 'faults.stall_sec=600'], DIFFUSION_FAILPOINT='step@5:crash', DIFFUSION_FAILPOINT_RANK='1') as process:
        output = process.wait(CRASH)
    assert 'RuntimeError: failpoint step' in output


@pytest.mark.long
@pytest.mark.parametrize('rank', ['0', '1'])
def test_a_killed_rank_ends_the_others_in_a_way_that_says_run_again(base, rank):
    with launch(2, [*base, 'faults.stall_sec=600'], DIFFUSION_FAILPOINT='step@5:kill', DIFFUSION_FAILPOINT_RANK=rank) as process:
        output = process.wait(STALLED if rank == '1' else None)  # the launcher reports the first rank
    assert f'this rank ends because rank {rank} (process ' in output
    assert '(exit code 76, docs/reliability.md)' in output


@pytest.mark.long
def test_twin_stock_composer_waits_for_ever(base, tmp_path):
    with Process(['-m', 'tests.faults.stock_recipe', tmp_path / 'stock', *base], DIFFUSION_FAILPOINT='step@5:sleep') as process:
        process.wait_until(lambda: (log := read_log(tmp_path / 'run/log.jsonl')) and log[-1]['batch'] >= 3)
        time.sleep(3 * LIMIT_SEC)
        assert process.code() is None
