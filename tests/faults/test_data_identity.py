"""A run goes on with the data it was begun with, or says which stream is another."""

import shutil

import pytest

from diffusion.contracts.errors import BAD_DATA, FINISHED, CheckpointError
from diffusion.recipe import load_recipe
from diffusion.training.builder import build_trainer
from tests.conftest import REPOSITORY
from tests.faults.driver import YAML, train


def test_other_data_under_the_same_name_are_refused(latents, latents_with_nan, overrides, tmp_path):
    """The same samples but one, in shards of the same names and nearly the same sizes."""
    data = tmp_path / 'data'
    shutil.copytree(latents, data)
    run = [*overrides, 'data.kind=latents', f'data.streams.train.local={data}']
    trainer = build_trainer(load_recipe(REPOSITORY / YAML, run))
    trainer.fit()
    trainer.close()
    moved = data.rename(tmp_path / 'moved')
    again = [*run, 'train.duration=3ba', f'data.streams.train.local={moved}']
    build_trainer(load_recipe(REPOSITORY / YAML, again)).close()  # where it lies does not matter
    shutil.copytree(latents_with_nan, data)
    with pytest.raises(CheckpointError, match='was trained on other data: stream train: [0-9a-f]{64} then, [0-9a-f]{64} now'):
        build_trainer(load_recipe(REPOSITORY / YAML, [*run, 'train.duration=3ba']))


@pytest.mark.long
def test_it_ends_with_its_own_code(latents, latents_with_nan, overrides, tmp_path):
    run = [*overrides, 'data.kind=latents', 'train.duration=3ba']
    for data, code in ((latents, FINISHED), (latents_with_nan, BAD_DATA)):
        with train([*run, f'data.streams.train.local={data}']) as process:
            process.wait(code)
