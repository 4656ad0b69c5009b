"""Class images: what the base draws, once for all runs that want the same."""

import shutil
import signal
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from streaming import LocalDataset

from diffusion.families.pipeline import generate
from diffusion.families.registry import build_network, family_of
from diffusion.finetuning.drawn import Base, cache_of, put_drawn
from diffusion.finetuning.prepare import prepare_streams
from diffusion.objectives import build_objective
from diffusion.recipe.schema import DiffusionSettings, Model
from tests.common.s3_server import BUCKET
from tests.faults.driver import Forked

PROMPTS = ['a dog', 'a red dog', 'a dog at night']
NUM_IMAGES = 8


@pytest.fixture(scope='module')
def base(encoders, tmp_path_factory):
    """A whole model in the diffusers layout."""
    torch.manual_seed(0)
    scheduler = build_objective(Model('tiny', diffusion=DiffusionSettings())).scheduler()
    folder = tmp_path_factory.mktemp('base')
    family_of('tiny').pipeline(build_network('tiny'), encoders, scheduler, 32).save_pretrained(folder)
    return folder


@pytest.fixture
def settings(settings, base, tmp_path):
    """Overrides of a run on photos and images that the base draws."""
    drawn = f'{{prompts: [{", ".join(PROMPTS)}], num_images: {NUM_IMAGES}, seed: 5, guidance: 3, steps: 2, cache: {tmp_path}/cache}}'
    proportions = [f'data.streams.class={{proportion: 0.5, drawn: {drawn}}}', 'data.streams.subject.proportion=0.5']
    return [*settings, *proportions, f'load_path={base}']


def pixels(folder):
    return [np.asarray(Image.open(file)) for file in sorted(folder.rglob('*.png'))]


def test_they_are_what_diffusers_draws_and_are_drawn_once(load, base, tmp_path, monkeypatch):
    recipe = load()
    prepare_streams(recipe)
    (cached,) = (tmp_path / 'cache').iterdir()
    expected = [next(generate(base, [PROMPTS[i % 3]], 5 + i, guidance=3, steps=2)) for i in range(NUM_IMAGES)]
    found = pixels(cached)
    assert len(found) == NUM_IMAGES
    for ours, theirs in zip(found, expected, strict=True):
        assert np.abs(ours.astype(int) - np.asarray(theirs).astype(int)).max() <= 1
    assert len({one.tobytes() for one in found}) == NUM_IMAGES
    stored = LocalDataset(local=f'{recipe.run_folder}/prepared/data-class')
    assert [stored[i]['caption'] for i in range(NUM_IMAGES)] == [PROMPTS[i % 3] for i in range(NUM_IMAGES)]
    monkeypatch.setattr(Base, 'pipeline', None)
    prepare_streams(load(f'run_folder={tmp_path}/second'))


@pytest.mark.parametrize('damage', ['no image', 'another image'])
def test_what_is_not_as_it_was_drawn_is_drawn_again(load, tmp_path, capfd, damage):
    recipe = load()
    prepare_streams(recipe)
    (cached,) = (tmp_path / 'cache').iterdir()
    before, file = pixels(cached), cached / '00003.png'
    if damage == 'no image':
        file.write_text('damaged')
    else:
        Image.new('RGB', (32, 32), 'red').save(file)
    prepare_streams(load(f'run_folder={tmp_path}/second'))
    assert '00003.png: is not what was drawn; it is drawn again' in capfd.readouterr().err
    assert np.abs(pixels(cached)[3].astype(int) - before[3]).max() <= 1
    moments = [LocalDataset(local=f'{folder}/prepared/data-class')[3]['moments'] for folder in (recipe.run_folder, tmp_path / 'second')]
    np.testing.assert_allclose(*moments, atol=0.05)
    shutil.rmtree(cached)
    (shard,) = (tmp_path / 'second/prepared/data-class').rglob('*.mds')
    shard.unlink()
    prepare_streams(load(f'run_folder={tmp_path}/second'))  # what lacks a shard is made again
    assert shard.exists()


def test_the_cache_is_told_apart_by_all_that_the_images_depend_on(load, base, tmp_path):
    recipe = load()
    drawn = recipe.data.streams['class'].drawn

    def place(drawn=drawn, recipe=recipe):
        return cache_of(drawn, recipe, Base(recipe))[0].url

    torch.manual_seed(1)
    build_network('tiny').save_pretrained(tmp_path / 'trained/unet')
    others = [
        *(place(replace(drawn, **change)) for change in ({'prompts': PROMPTS[:2]}, {'num_images': 9}, {'seed': 6}, {'guidance': 4.0}, {'steps': 3})),
        place(recipe=load('data.resolution=40')),
        place(recipe=load('train.precision=amp_bf16')),
        place(recipe=load(f'load_path={tmp_path}/trained')),
        place(recipe=load(f'load_path={tmp_path}/trained', 'model.diffusion.schedule.beta_end=0.013')),  # the base names its own
    ]
    assert len({place(), *others}) == len(others) + 1
    assert place(recipe=load(f'run_folder={tmp_path}/second', 'optimizer.lr=0.1')) == place()
    assert place(recipe=load(f'model.encoders.source={base}', 'load_path=null', 'adapter={}')) == place()  # the same weights


def test_two_runs_at_once_and_one_that_is_killed(settings, tmp_path):
    """One is stopped after its second image; another is killed after three, preempted after one more, and draws the rest; then the first resumes."""
    encoded = ',finetuning.encoded@{}:kill'  # the class stream, after the photos where they are new: what follows is none of this test's business

    def start(name, point):
        return Forked([*settings, f'run_folder={tmp_path}/{name}'], tmp_path / f'{name}.txt', DIFFUSION_FAILPOINT=f'finetuning.drawn{point}')

    def cached():
        return pixels(tmp_path / 'cache')

    with start('a', f'@2:stop{encoded.format(2)}') as first:
        first.wait_until(lambda: len(cached()) == 2)
        for point, code, least in (('@3:kill', -signal.SIGKILL, 3), (':term', 75, 4), (f'@99:kill{encoded.format(1)}', -signal.SIGKILL, NUM_IMAGES)):
            with start('b', point) as second:
                second.wait(code)
            assert least <= len(cached())
        before = cached()
        first.signal(signal.SIGCONT)
        first.wait(-signal.SIGKILL)
    assert len(before) == NUM_IMAGES
    assert all(np.abs(one.astype(int) - other).max() <= 1 for one, other in zip(before, cached(), strict=True))


def test_a_cache_in_object_storage(load, s3, tmp_path):
    recipe = load()
    drawn = replace(recipe.data.streams['class'].drawn, cache=f's3://{BUCKET}/drawn', num_images=3)
    (tmp_path / 'copies').mkdir()
    put_drawn(drawn, recipe, tmp_path / 'copies')
    assert [file.read_text() for file in sorted((tmp_path / 'copies').glob('*.txt'))] == PROMPTS
    listed = cache_of(drawn, recipe, Base(recipe))[0].files()
    assert sorted(listed) == ['00000.png', '00001.png', '00002.png', 'drawn.json']
