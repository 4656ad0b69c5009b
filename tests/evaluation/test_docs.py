"""The commands of docs/evaluation.md and docs/reconstruction.md run, with tiny models and random weights where published ones would lie."""

import os
import random
import re
import shlex
import shutil
import subprocess
import sys
from glob import glob

import pytest
import torch
from safetensors.torch import save_file

from diffusion.contracts.scenes import random_scene
from diffusion.demo.__main__ import JUDGE_SEED, METRICS, NUM_JUDGED
from diffusion.evaluation.features.networks import EXTRACTORS
from diffusion.evaluation.job.results import read_evaluation
from diffusion.recipe import load_recipe
from tests.conftest import REPOSITORY, TINY, read_json, run_here
from tests.evaluation.networks import without_digest, write_dino, write_vgg16
from tests.pages import commands
from tests.test_adapter_export import exported as adapter  # noqa: F401
from tests.test_after_training import run  # noqa: F401
from tests.training.test_adapters import trained  # noqa: F401

PAGE = 'docs/evaluation.md'
MODELS, TRIAL, SHAPES, CRAWL, SUBJECT = range(5)  # its blocks
SMALL = {  # options in place of the page's
    '--samples 1000': '--samples 16 --steps 2',
    '--samples 200': '--samples 16',
    '--samples 64': '--samples 16',
    '--steps 20': '--steps 2',
    '--steps 25': '--steps 2',
}


@pytest.fixture(scope='module')
def place(base, images, crawl, inception_file, clip_folder, tmp_path_factory):
    """A folder with what the page's commands name, but for runs and adapters."""
    folder = tmp_path_factory.mktemp('evaluation')
    for name in ('weights', 'data', 'models', 'runs/shapes', 'yamls'):
        (folder / name).mkdir(parents=True)
    shutil.copytree(REPOSITORY / 'yamls', folder / 'yamls', dirs_exist_ok=True)
    (folder / 'train.py').symlink_to(REPOSITORY / 'train.py')
    for name, target in {
        'CRAWL': crawl,
        'data/val': images,
        'data/coco-val': images,
        'models/mine': base,
        'runs/shapes/export': base,
        'runs/shapes/images': images,
        'weights/clip-vit-large-patch14': clip_folder,
        'weights/clip-vit-large-patch14-336': clip_folder,
        'weights/inception-2015-12-05.pth': inception_file,
    }.items():
        (folder / name).symlink_to(target)
    write_dino(folder / 'weights/dino-vits16')
    rng = random.Random(0)
    (folder / 'runs/shapes/prompts.txt').write_text(''.join(f'{random_scene(rng).caption}\n' for _ in range(NUM_JUDGED)))
    (folder / 'prompts.txt').write_text('a {} on the beach\na red {}\n')
    return folder


@pytest.fixture
def here(place, photos, monkeypatch):
    """In that folder; Inception's digest is not asked for, because its weights are random."""
    monkeypatch.chdir(place)
    monkeypatch.setitem(EXTRACTORS, 'inception', without_digest('inception'))
    if not (place / 'photos').exists():
        shutil.copytree(photos, place / 'photos')
    return place


def words_of(line, *more):
    """A command of the page, scaled down, without `python -m`; globs expanded as a shell does."""
    for large, small in SMALL.items():
        line = line.replace(large, small)
    words = [found for word in shlex.split(line, comments=True) for found in (sorted(glob(word)) if '*' in word else [word])]
    if words[0] == 'composer':
        assert words[1] == '-n'
        return [words[3].removesuffix('.py').replace('/', '.'), *words[4:], *more]
    assert words[0] == 'python'
    return [*words[2 if words[1] == '-m' else 1 :], *more]


def start(place, *words):
    """`python WORDS` in a process of its own, as a reader starts it; returns what it prints."""
    command, environment = [sys.executable, *map(str, words)], {**os.environ, 'PYTHONPATH': str(REPOSITORY)}
    result = subprocess.run(command, cwd=place, capture_output=True, text=True, check=False, env=environment)
    assert result.returncode == 0, f'{result.stdout[-2000:]}\n{result.stderr[-4000:]}'
    return result.stdout


@pytest.mark.long
def test_models_are_scored_resumed_on_ranks_and_compared(here, run, monkeypatch):  # noqa: F811
    (here / 'runs/mine').symlink_to(run)
    whole, ranks, without_weights, compared = commands(PAGE)[MODELS]
    # Without FID: its 2,048 dimensions take minutes of one core, and KID takes the same features.
    small = ('--samples', 16, '--steps', 2, '--guidance', 3, '--metrics', 'kid,cmmd,clip')
    said = run_here(*words_of(whole, *small)).stdout
    out = here / 'runs/mine/evaluations/ba550000'
    found = read_evaluation(out)
    assert found['protocol']['metrics'] == ['kid', 'cmmd', 'clip']
    assert all(f'{name} ' in said for name in ('kid', 'cmmd', 'clip'))
    with monkeypatch.context() as patch:
        patch.setenv('RANK', '7')
        patch.setenv('WORLD_SIZE', re.search(r'-n (\d+)', ranks)[1])
        run_here(*words_of(ranks, *small))
    assert read_evaluation(out)['scores'] == found['scores']
    run_here(*words_of(without_weights))
    assert list(read_evaluation(here / 'scored/mine')['scores'][0]['metrics']) == ['kid@random-conv']
    run_here(*words_of(compared))
    assert 'ba' in (here / 'comparison.html').read_text()
    assert (here / 'scored/mine/evaluation.html').exists()


def test_missing_weights_are_named_by_the_first_command(here, run, tmp_path, monkeypatch):  # noqa: F811
    """As on a machine that has none: nothing is drawn, and the message has the command that gets them."""
    monkeypatch.setenv('HF_HUB_CACHE', str(tmp_path / 'hub'))
    monkeypatch.setenv('TORCH_HOME', str(tmp_path / 'torch'))
    line = commands(PAGE)[MODELS][0].replace('runs/mine', str(run)).replace('--weights weights', f'--weights {tmp_path}')
    said = run_here(*words_of(line, '--samples', 16, '--out', tmp_path / 'out'), code=2).stderr
    assert 'weights-inception-2015-12-05-6726825d.pth' in said
    assert 'curl -L' in said


def test_a_model_of_random_weights_is_scored_for_trial(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for line in commands(PAGE)[TRIAL]:
        run_here(*words_of(line))
    assert set(read_evaluation(tmp_path / 'runs/tiny/scored')['scores'][0]['metrics']) > {'kid@random-conv', 'right_shape'}


def test_the_shapes_are_scored_as_the_demo_scores_them(here):
    [line] = commands(PAGE)[SHAPES]
    given = dict(zip(*[iter(shlex.split(line.partition('runs/shapes/export ')[2]))] * 2, strict=True))
    samples = load_recipe(REPOSITORY / 'yamls/shapes.yaml', ['model.encoders.source=.']).log.samples
    expected = {'--samples': NUM_JUDGED, '--seed': JUDGE_SEED, '--metrics': METRICS, '--guidance': f'{samples.guidance:g}', '--steps': samples.steps}
    assert {name: given[name] for name in expected} == {name: str(value) for name, value in expected.items()}
    run_here(*words_of(line))
    assert 'right_shape' in read_evaluation(here / 'runs/shapes/scored')['scores'][0]['metrics']


@pytest.mark.long
def test_a_crawl_becomes_a_model_and_its_score(here):
    prepared, trains, scores = commands(PAGE)[CRAWL]
    start(here, '-m', *words_of(prepared, '--resolution', 32, '--held-out', 0.5, '--autoencoder-steps', 1))
    tiny = [override for override in TINY if not override.startswith('model.')]
    start(here, *words_of(trains, *tiny, 'eval.every=2ba', 'eval.samples.count=16', 'eval.samples.every=2ba', 'eval.samples.steps=2'))
    run_here(*words_of(scores))
    found = read_evaluation(here / 'runs/emoji-64/scored')
    assert found['model']['batches'] == 2
    assert found['neighbours']['count_known'] == read_json(here / 'runs/emoji-64/train/images/manifest.json')['num_samples']


def test_autoencoders_are_scored(here, encoders_folder, images):
    """With random weights of VGG16 in place of the published ones; FID of its 2,048 dimensions would take minutes."""
    [[with_weights, without]] = commands('docs/reconstruction.md')
    for name, target in {
        'runs/vae/export': encoders_folder,
        'runs/emoji-64/encoders': encoders_folder,
        'runs/emoji-64/held-out/images': images,
    }.items():
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        if not (here / name).exists():
            (here / name).symlink_to(target)
    save_file(torch.load(write_vgg16(here / 'vgg16.pth'), weights_only=True), here / 'weights/vgg16.safetensors')
    small = ('--samples', 16, '--resolution', 32)
    run_here(*words_of(with_weights, *small, '--metrics', 'psnr,ssim,lpips'))
    found = read_json(here / 'scored/vae/reconstruction.json')
    assert [list(one['metrics']) for one in found['autoencoders']] == [['psnr', 'ssim', 'lpips']] * 2
    run_here(*words_of(without, *small))
    assert list(read_json(here / 'scored/emoji-vae/reconstruction.json')['autoencoders'][0]['metrics']) == [
        'psnr',
        'ssim',
        'lpips@random-conv',
        'fid@random-conv',
    ]


@pytest.mark.long
@pytest.mark.parametrize('kind', ['adapter', 'merged'])
def test_a_subject_is_scored_in_a_process_of_its_own(here, base, adapter, kind):  # noqa: F811
    """The floor is the model that the adapter belongs to, also of a folder that holds the whole model next to the adapter."""
    model = here / 'models/timber'
    shutil.rmtree(model, ignore_errors=True)
    shutil.copytree(adapter, model)
    if kind == 'adapter':
        (model / 'model_index.json').unlink()
    shutil.rmtree(here / 'scored/timber', ignore_errors=True)
    [line] = commands(PAGE)[SUBJECT]
    said = start(here, '-m', *words_of(line, '--steps', 2))
    found = read_evaluation(here / 'scored/timber')
    assert {name for name, value in found['scores'][0]['metrics'].items() if 'floor' in value} == {'clip_i', 'dino', 'clip_t'}
    assert found['scores'][0]['count'] == 8  # four of each prompt
    assert found['protocol']['prompts']['class'] == 'dog'
    assert 'clip_i' in said
    assert 'dino' in said
    assert found['samples']['7.5'][1]['prompt'] == 'a red timber dog'
