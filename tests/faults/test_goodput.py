"""The accounts of real runs close: their sum is what a clock beside them says, and what was lost is what was done again."""

import signal
import time

import pytest

from diffusion.common.files import read_json_lines
from diffusion.monitoring.time_accounts import account, propose
from diffusion.recipe import load_recipe
from diffusion.training.builder import build_trainer
from tests.conftest import REPOSITORY
from tests.faults.driver import YAML, train

BUSY = ['checkpoint.every=4ba', 'log.samples.every=5ba', 'log.samples.steps=2', 'log.every=1']


def test_every_second_of_a_run_has_a_name(latents, overrides, tmp_path):
    """A trainer that ends by an exception, and one that goes on, in this process; saves, grids and evaluations on the way."""
    data = ['data.kind=latents', f'data.streams.train.local={latents}', f'eval.streams.val.local={latents}', 'eval.every=3ba', 'eval.batches=2']
    recipe = load_recipe(REPOSITORY / YAML, [*overrides, *data, *BUSY, 'train.duration=8ba'])
    path, took_sec = tmp_path / 'run/events.jsonl', 0.0
    for crashes in (True, False):
        began = time.monotonic()
        trainer = build_trainer(recipe)
        if crashes:
            trainer.state.callbacks[0].batch_start = lambda state, logger: 1 / 0 if state.timestamp.batch == 6 else None
            with pytest.raises(ZeroDivisionError):
                trainer.fit()
        else:
            trainer.fit()
        trainer.close()
        took_sec += time.monotonic() - began
        time.sleep(0.3)
    lines = list(read_json_lines(path))
    first = next(i for i, line in enumerate(lines) if line['process'] != lines[0]['process'])
    assert account(lines[:first]).num_unsaved_steps == 2  # at 6 it crashed, and there is a checkpoint of 4
    accounts = account(lines)
    age_sec = sum(account(lines[:1]).sec.values())  # of the process that runs the tests, if this is its first trainer
    assert sum(accounts.sec.values()) == pytest.approx(accounts.wall_sec, rel=1e-3)
    assert accounts.wall_sec == pytest.approx(age_sec + took_sec + 0.3, rel=0.01, abs=0.1)
    assert accounts.sec['stopped'] >= 0.3
    assert accounts.sec['other'] < 0.01 * accounts.wall_sec + 0.1  # two trainers in a run of seconds
    assert all(accounts.sec[phase] > 0 for phase in ('compute', 'recompute', 'start', 'data wait', 'save', 'evaluation', 'sampling'))
    assert (accounts.num_steps, accounts.num_lost_steps) == (6 + 4, 2)  # back from 6 to the checkpoint of 4
    saves = sorted(line['batch'] for line in lines[first:] if line['event'] == 'save')
    assert saves == [8]
    assert len(accounts.saves_sec) == 1 + 1
    assert [line['batch'] for line in lines[:first] if line['event'] == 'sampling'] == [0, 5]
    assert [line['batch'] for line in lines[first:] if line['event'] == 'evaluation'] == [6, 8]  # and at the end
    assert lines[-1]['reason'] == 'finished'
    accounts.wall_sec = max(accounts.wall_sec, 3600)  # of a shorter run nothing is proposed
    assert propose(accounts, recipe.checkpoint.every, 50_000.0) is not None


@pytest.mark.long
def test_a_killed_run_is_accounted_for_and_its_lost_steps_are_those_done_again(overrides, tmp_path):
    path = tmp_path / 'run/events.jsonl'
    wanted = [*overrides, *BUSY, 'checkpoint.every=20ba', 'train.duration=60ba']

    def reached():
        return max((line.get('batch', 0) for line in read_json_lines(path)), default=0)

    began = time.time()
    with train(wanted) as killed:
        killed.wait_until(lambda: reached() >= 25)
        killed.signal(signal.SIGKILL)
        killed.process.wait()
    lost_at = reached()
    time.sleep(2)
    with train(wanted) as process:
        output = process.wait()
    accounts, lines = account(read_json_lines(path)), list(read_json_lines(path))
    again = next(line['batch'] for line in lines if line['process'] != lines[0]['process'] and 'batch' in line)
    assert again == lost_at // 20 * 20
    assert accounts.num_lost_steps == lost_at - again > 0
    assert accounts.num_steps == 60 + accounts.num_lost_steps
    assert accounts.wall_sec == pytest.approx(lines[-1]['time'] - began, rel=0.01)
    assert sum(accounts.sec.values()) == pytest.approx(accounts.wall_sec, rel=1e-3)
    assert accounts.sec['other'] < 0.01 * accounts.wall_sec
    assert 2 < accounts.sec['stopped'] < 3
    assert accounts.sec['recompute'] > 0
    assert 'where the time went' in output
    assert f'60 steps, {accounts.num_lost_steps} of them lost' in output.replace(f'{accounts.num_steps} steps', '60 steps')
