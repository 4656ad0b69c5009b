"""Files of a run folder that a crash of the machine, a full disk or somebody else has spoiled: recovered, or refused with what to do."""

import os
import shutil

import pytest

from diffusion.contracts.errors import BAD_DATA, CheckpointError, train_code
from diffusion.faults import rollback
from diffusion.faults.guards import RunLock
from diffusion.faults.rollback import LeftOut
from diffusion.recipe import RecipeError, load_recipe
from diffusion.training.builder import build_trainer
from tests.conftest import REPOSITORY, TINY
from tests.faults.children import fit


@pytest.fixture(scope='module')
def base(encoders_folder):
    return [*TINY, f'model.encoders.source={encoders_folder}', 'data.kind=synthetic', 'data.synthetic_samples=24', 'optimizer.lr=3e-4']


@pytest.fixture(scope='module')
def run(base, tmp_path_factory):
    folder = tmp_path_factory.mktemp('run') / 'run'
    fit([*base, f'run_folder={folder}'])
    return folder


def test_a_torn_recipe_is_written_again_from_the_checkpoint(run, base, tmp_path):
    """Half of it is a recipe, too: with another learning rate."""
    shutil.copytree(run, tmp_path / 'run', symlinks=True)
    recipe = tmp_path / 'run/recipe.yaml'
    whole = recipe.read_text()
    recipe.write_text(whole[: whole.index('optimizer:')])
    fit([*base, f'run_folder={tmp_path}/run', 'train.duration=3ba'])
    assert recipe.read_text() == whole.replace('duration: 2ba', 'duration: 3ba').replace(str(run), f'{tmp_path}/run')
    for spoiled in ('', '[' * 100_000):
        recipe.write_text(spoiled)
        build(base, tmp_path / 'run', 'train.duration=4ba').close()
    recipe.write_text('')
    build(base, tmp_path / 'run', 'train.duration=3ba').close()  # a finished run
    assert 'duration: 3ba' in recipe.read_text()
    with pytest.raises(RecipeError, match='optimizer.lr: 0.0003 -> 0.1'):  # what it was is in the checkpoint
        build(base, tmp_path / 'run', 'optimizer.lr=0.1')


def build(base, folder, *more):
    return build_trainer(load_recipe(REPOSITORY / 'yamls/sd2-base-256.yaml', [*base, f'run_folder={folder}', *more]))


@pytest.mark.parametrize('content', ['', '[', '{}x', '[1]', '{"a": 1}', '[{"after_batch": 1}]', '[' * 100_000, '9' * 5_000], ids=range(8))
def test_a_damaged_list_of_what_is_left_out_is_no_empty_one(tmp_path, content):
    (tmp_path / 'left-out.json').write_text(content)
    with pytest.raises(CheckpointError, match=f'{tmp_path}/left-out.json: damaged: .* restore it, or delete it to train on them again'):
        rollback.read(str(tmp_path))
    with pytest.raises(CheckpointError):
        rollback.add(str(tmp_path), LeftOut(1, 2, 'cause'))
    assert train_code(CheckpointError('x')) == BAD_DATA


@pytest.mark.parametrize('name', ['log.jsonl', 'events.jsonl', 'environment.json', 'recipe.yaml'])
def test_a_folder_or_a_fifo_with_the_name_of_a_file_is_refused_before_the_run(tmp_path, name):
    """The first record of the log met it, after a batch and with a traceback."""
    RunLock(tmp_path).post_close()
    (tmp_path / name).mkdir()
    with pytest.raises(RecipeError, match=f'{tmp_path}/{name} is not a file; move it away'):
        RunLock(tmp_path)
    (tmp_path / name).rmdir()
    os.mkfifo(tmp_path / name)
    with pytest.raises(RecipeError, match=f'{tmp_path}/{name} is not a file; move it away'):
        RunLock(tmp_path)
