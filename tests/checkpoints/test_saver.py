"""When checkpoints are saved, and what happens when that fails; in this process on the tiny recipe."""

import json
from types import SimpleNamespace

import pytest

from diffusion.checkpoints import saver as module
from diffusion.checkpoints.manifest import CheckpointManifest, batches_of, sha256_of
from diffusion.checkpoints.saver import CheckpointSaver
from diffusion.contracts.errors import StorageOutage
from diffusion.faults import preemption
from diffusion.monitoring.report.run import read_log
from diffusion.recipe import load_recipe, to_yaml
from diffusion.training.builder import build_trainer
from tests.checkpoints.files import names
from tests.conftest import REPOSITORY


@pytest.fixture
def build(overrides):
    def make(*more):
        recipe = load_recipe(REPOSITORY / 'yamls/sd2-base-256.yaml', [*overrides, *more])
        trainer = build_trainer(recipe)
        trainer.recipe = recipe
        return trainer, next(callback for callback in trainer.state.callbacks if isinstance(callback, CheckpointSaver))

    return make


@pytest.fixture
def folder(tmp_path):
    return tmp_path / 'run/checkpoints'


def saved(folder):
    return batches_of(names(folder))


def test_at_the_interval_and_at_the_end(build, folder, tmp_path):
    trainer, _ = build('train.duration=10ba', 'checkpoint.every=3ba', 'checkpoint.keep=2', 'checkpoint.keep_every=3ba')
    trainer.fit()
    trainer.close()
    assert saved(folder) == [3, 6, 9, 10]
    said = CheckpointManifest.parse((folder / 'ba00000010.json').read_bytes(), 10)
    assert (said.batch, said.epoch, said.samples, said.world_size) == (10, 1, 80, 1)
    assert said.content.sha256 == sha256_of(folder / 'ba00000010.pt')
    assert said.packages['torch']
    assert json.loads((folder / 'latest.json').read_text()) == json.loads(said.to_json())
    record = read_log(tmp_path / 'run/log.jsonl')[-1]
    assert (record['checkpoint/bytes'], record['checkpoint/missed']) == (said.content.bytes, 0)
    assert 0 < said.save_sec <= record['checkpoint/save_sec']
    assert trainer.recipe.name in to_yaml(trainer.recipe)


def test_seconds_are_of_training(build, folder, monkeypatch):
    trainer, _ = build('train.duration=6ba', 'checkpoint.every=10sec')
    import datetime

    monkeypatch.setattr(trainer, '_accumulate_time_across_ranks', lambda samples, tokens, _: (samples, tokens, datetime.timedelta(seconds=4)))
    trainer.fit()
    trainer.close()
    assert saved(folder) == [3, 5, 6]  # after 12, 20 and 24 seconds


def test_on_request_and_after_a_look_at_the_state(build, folder, monkeypatch):
    trainer, saver = build('train.duration=5ba', 'checkpoint.every=100ba', 'checkpoint.keep=-1')
    seen = []
    saver.before_save = [lambda state: seen.append(state.timestamp.batch.value)]

    monkeypatch.setattr(preemption, '_state', SimpleNamespace(**vars(preemption._state)))  # the next trainer of this process has not been asked
    monkeypatch.setattr(preemption, 'received', lambda: trainer.state.timestamp.batch.value == 1)
    with pytest.raises(preemption.Preempted, match='saved after batch 2'):
        trainer.fit()
    trainer.close()
    assert saved(folder) == seen == [2]


def test_a_look_that_refuses_leaves_the_last_good_one(build, folder):
    trainer, saver = build('train.duration=4ba', 'checkpoint.every=2ba')

    def refuse(state):
        if state.timestamp.batch == 4:
            raise ArithmeticError('weights are not finite')

    saver.before_save = [refuse]
    with pytest.raises(ArithmeticError):
        trainer.fit()
    trainer.close()
    assert saved(folder) == [2]


def test_a_full_disk_is_a_miss_and_the_run_goes_on(build, folder, failpoints, capsys, tmp_path):
    failpoints('save.half@2:enospc,save.written@3:enospc')
    trainer, saver = build('train.duration=5ba', 'checkpoint.every=1ba', 'checkpoint.keep=-1')
    trainer.fit()
    trainer.close()
    assert saved(folder) == [1, 3, 5]  # batch 2 did not come to save.written, so its third time is in batch 4
    assert saver.misses.total == 2
    assert 'ba00000002.pt was not written: [Errno 28] No space left on device' in capsys.readouterr().err
    assert [record['checkpoint/missed'] for record in read_log(tmp_path / 'run/log.jsonl')][-1] == 2
    assert not [name for name in names(folder) if name.startswith('.')]


def test_too_many_misses_in_a_row_end_it(build, folder, failpoints):
    failpoints(','.join(f'save.begin@{count}:enospc' for count in (2, 3, 4)))
    trainer, _ = build('train.duration=9ba', 'checkpoint.every=1ba', 'checkpoint.allowed_misses=2')
    with pytest.raises(StorageOutage, match=r'3 checkpoints in a row missed, allowed are 2; the last: .*ba00000004.pt was not written'):
        trainer.fit()
    assert saved(folder) == [1]


def test_the_last_one_of_a_run_may_not_be_missed(build, failpoints):
    failpoints('save.begin@2:enospc')
    trainer, _ = build('train.duration=2ba', 'checkpoint.every=1ba')
    with pytest.raises(StorageOutage, match='ba00000002.pt was not written'):
        trainer.fit()


def test_a_mistake_is_no_miss(build, failpoints):
    failpoints('save.begin:crash')
    trainer, _ = build()
    with pytest.raises(RuntimeError, match='failpoint save.begin'):
        trainer.fit()


def test_room_is_made_before_a_save_and_half_a_checkpoint_is_never_begun(build, folder, monkeypatch, capsys):
    trainer, saver = build('train.duration=6ba', 'checkpoint.every=1ba', 'checkpoint.keep=2', 'checkpoint.allowed_misses=5')
    one_bytes, disk_bytes = 0, 0

    def free_bytes(_):
        nonlocal one_bytes, disk_bytes
        sizes = [path.stat().st_size for path in folder.glob('*.pt')]
        if sizes and not one_bytes:
            one_bytes = sizes[0]
            disk_bytes = int(2.5 * one_bytes)  # two, and not three
        return disk_bytes - sum(sizes)

    monkeypatch.setattr(module, '_free_bytes', free_bytes)
    trainer.fit()
    trainer.close()
    assert saver.misses.total == 0
    assert saved(folder) == [5, 6]
    disk_bytes = int(2.1 * one_bytes)  # from here on the second does not fit with what is to spare
    trainer, saver = build('train.duration=8ba', 'checkpoint.every=1ba', 'checkpoint.keep=2', 'checkpoint.allowed_misses=5')
    with pytest.raises(StorageOutage, match=r'GB free, .* GB needed'):
        trainer.fit()
    assert saved(folder) == [6]
    assert not [name for name in names(folder) if name.startswith('.')]
