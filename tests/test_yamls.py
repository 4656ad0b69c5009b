"""Every recipe that ships runs: two batches on the CPU, a tiny model in the named one's place, synthetic data."""

import json

import pytest

from diffusion.checkpoints.reading import batches_trained, find_checkpoint, read_checkpoint
from diffusion.families.networks import find_network
from diffusion.recipe import load_recipe, to_dict
from diffusion.training.builder import build_trainer, finished
from tests.conftest import REPOSITORY, read_json

TINY = {'sd2': 'tiny', 'prx': 'tiny-prx'}  # networks by family
YAMLS = sorted((REPOSITORY / 'yamls').glob('*.yaml'))


@pytest.mark.parametrize('path', YAMLS, ids=lambda path: path.stem)
def test_runs_two_batches(path, overrides, tmp_path):
    named = load_recipe(path, ['data.kind=synthetic', 'load_path=null', 'model.encoders.source=.', 'model.encoders.revision=null']).model.network
    tiny = TINY[find_network(named).family]
    recipe = load_recipe(path, [*overrides, f'model.network={tiny}', 'load_path=null', 'log.samples.every=1ba', 'log.samples.steps=2'])
    trainer = build_trainer(recipe)
    trainer.fit()
    assert finished(trainer)
    trainer.close()
    state = read_checkpoint(find_checkpoint(tmp_path / 'run'))
    assert batches_trained(state) == 2
    assert (tmp_path / 'run/recipe.yaml').read_text() == state['callbacks']['RunRecord']['recipe']
    assert load_recipe(tmp_path / 'run/recipe.yaml') == recipe
    assert read_json(tmp_path / 'run/environment.json')['num_gpus'] == 1
    names = sorted(path.name for path in (tmp_path / 'run/samples').iterdir())
    assert names == ['ba00000000-training.png', 'ba00000001-ema.png', 'ba00000002-ema.png']


@pytest.mark.parametrize('path', YAMLS, ids=lambda path: path.stem)
def test_every_key_has_a_comment_that_says_why(path):
    first, *lines = path.read_text().splitlines()
    assert first.startswith('# ')
    entries = [line for line in lines if line.strip() and not line.startswith('#') and not line.rstrip().endswith(':')]
    bare = [line for line in entries if ' # ' not in line and not line.startswith('      ')]  # prompts are deeper; their comment is above
    assert not bare


def test_the_whole_recipe_reaches_json():
    recipe = load_recipe(YAMLS[0], ['data.kind=synthetic', 'load_path=null'])
    assert json.loads(json.dumps(to_dict(recipe)))['optimizer']['betas'] == [0.9, 0.999]
