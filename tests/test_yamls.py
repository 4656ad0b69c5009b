"""Every recipe that ships runs: two batches on the CPU, a tiny model in the named one's place, synthetic data."""

import json

import pytest

from diffusion.checkpoints.reading import batches_trained, find_checkpoint, read_checkpoint
from diffusion.families.networks import find_network
from diffusion.finetuning.prepare import prepare_streams
from diffusion.recipe import load_recipe, to_dict
from diffusion.recipe.averaging import profiles
from diffusion.recipe.rules import network_names
from diffusion.recipe.schema import present
from diffusion.training.builder import build_trainer, finished
from tests.conftest import REPOSITORY, read_json
from tests.methods.test_alignment import write_features

CAPTIONS = [f'a {size} red circle at the left on a blue background' for size in ('large', 'small')]  # the metric shapes takes no others
TINY = {find_network(name).family: name for name in network_names() if name.startswith('tiny')}
ALL = [
    *sorted((REPOSITORY / 'yamls').glob('*.yaml')),
    *sorted((REPOSITORY / 'benchmarks/ablations').glob('*/*.yaml')),
]
YAMLS = [path for path in ALL if '\nautoencoder:' not in path.read_text()]  # of autoencoders: autoencoding/test_run.py


@pytest.mark.parametrize('path', YAMLS, ids=lambda path: f'{path.parent.name}/{path.stem}')
def test_runs_two_batches(path, overrides, bases, photos, images, tmp_path):
    squares = ['data.kind=synthetic', 'data.aspect_buckets=false', 'load_path=null']
    if '  alignment:  ' in path.read_text():  # which looks at images
        write_features(tmp_path / 'features')
        aligned = [f'methods.alignment.{key}' for key in (f'source={tmp_path}/features', 'block=1', 'width=8')]
        squares = [*squares[1:], 'data.kind=images', *aligned]
    named = load_recipe(path, [*squares, 'model.encoders.source=.', 'model.encoders.revision=null'])
    tiny = TINY[find_network(named.model.network).family]
    more = [f'model.network={tiny}', f'model.encoders.source={bases[tiny]}', 'log.samples.every=1ba', 'log.samples.guidance=1', 'log.samples.steps=2']
    more += ['ema.half_life=10ba'] if not profiles(named.ema) else []
    more += ['methods.routing={first_block: 0, last_block: 1}'] if named.methods.routing is not None else []
    if named.data.kind == 'images':
        more += [f'{section}.streams.{name}.local={images}' for section in ('data', 'eval') for name in present(getattr(named, section).streams)]
    scored = named.eval.samples.every is not None
    if scored:
        more += ['eval.every=1ba', *(f'eval.samples.{key}' for key in ('every=1ba', 'count=16', f'prompts=[{", ".join(CAPTIONS)}]', 'steps=2'))]
    if named.adapter is not None:
        as_published = ('prediction=epsilon', 'schedule.zero_terminal_snr=false')
        more += [f'model.diffusion.{value}' for value in as_published if named.model.diffusion is not None]
        more += [
            'data.kind=latents',
            'adapter.rank=2',
            'adapter.alpha=2',
            f'data.streams.subject.photos={{folder: {photos}, caption: a sks}}',
        ]
        if named.data.streams.get('class') is not None:
            more += [f'data.streams.class.drawn.{key}' for key in ('prompts=[a, b]', 'num_images=2', 'steps=1', f'cache={tmp_path}/drawn')]
    recipe = load_recipe(path, [*overrides, *squares, *more])
    prepare_streams(recipe)
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
    log = [json.loads(line) for line in (tmp_path / 'run/log.jsonl').read_text().splitlines()]
    assert [record['batch'] for record in log if any('@' in name or '/eval/kid' in name for name in record)] == ([0, 1, 2] if scored else [])


@pytest.mark.parametrize('path', ALL, ids=lambda path: f'{path.parent.name}/{path.stem}')
def test_every_key_has_a_comment_that_says_why(path):
    first, *lines = path.read_text().splitlines()
    assert first.startswith('# ')
    entries = [line for line in lines if line.strip() and not line.startswith('#') and not line.rstrip().endswith(':')]
    bare = [line for line in entries if ' # ' not in line and not line.startswith('      ')]  # prompts are deeper; their comment is above
    assert not bare


def test_the_whole_recipe_reaches_json():
    recipe = load_recipe(YAMLS[0], ['data.kind=synthetic', 'load_path=null'])
    assert json.loads(json.dumps(to_dict(recipe)))['optimizer']['betas'] == [0.9, 0.999]
