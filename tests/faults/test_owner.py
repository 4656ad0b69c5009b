"""Two runs, or two processes of one run on two machines, with one `checkpoint.folder`."""

import os
import signal

import pytest

from diffusion.checkpoints.manifest import batches_of
from diffusion.common.storage import open_folder
from diffusion.contracts.errors import SUPERSEDED
from diffusion.recipe import RecipeError, load_recipe
from diffusion.training.builder import build_trainer
from tests.conftest import TINY
from tests.faults.children import start
from tests.faults.driver import YAML, Forked, _train_here

URL = 's3://bucket/run/checkpoints'


class Machine(Forked):
    """train.py on a machine whose disk nobody else sees: with a working folder of its own."""

    def __init__(self, disk, overrides, **environment):
        disk.mkdir(exist_ok=True)
        self.output_path = disk / 'output.txt'
        self.process = start(_train_on, str(disk), [YAML, *overrides], str(self.output_path), **environment)
        self.pid = self.process.pid or 0


def _train_on(disk, arguments, output):
    os.chdir(disk)
    _train_here(arguments, output)


@pytest.fixture
def base(encoders_folder):
    return [
        *TINY, f'model.encoders.source={encoders_folder}', 'data.kind=synthetic', 'data.synthetic_samples=24', 'run_folder=run',
        f'checkpoint.folder={URL}', 'checkpoint.every=1ba', 'checkpoint.keep=2',
    ]  # fmt: skip


@pytest.mark.long
def test_a_machine_given_up_for_dead_ends_when_its_run_was_resumed_elsewhere(base, s3, tmp_path):
    def versions():
        return {name: stat.version for name, stat in open_folder(URL).files().items()}

    with Machine(tmp_path / 'dead', [*base, 'train.duration=100000ba']) as dead:
        dead.wait_until(lambda: batches_of(versions()))
        dead.signal(signal.SIGSTOP)
        begun = max(batches_of(versions()))
        with Machine(tmp_path / 'new', [*base, f'train.duration={begun + 5}ba']) as new:
            assert f'batch {begun}' in new.wait()
        left = versions()
        assert max(batches_of(left)) == begun + 5  # which of the others remain depends on what the upload had time for
        dead.signal(signal.SIGCONT)
        assert 'taken over by process' in dead.wait(SUPERSEDED)
        assert left.items() <= versions().items()


def test_a_run_is_refused_the_checkpoints_of_another(base, s3, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trainer = build_trainer(load_recipe(YAML, [*base, 'train.duration=2ba']))
    trainer.fit()
    trainer.close()
    before = s3.object_names()
    with pytest.raises(RecipeError, match='checkpoint.folder: holds the checkpoints of another run .its run_folder, as seen from there: run;'):
        build_trainer(load_recipe(YAML, [*base, 'name=other', 'run_folder=other', 'train.duration=3ba']))
    assert s3.object_names() == before
