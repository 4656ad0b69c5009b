import random

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw, ImageFilter

from data_prep.shapes import draw, random_scene
from diffusion.contracts.errors import DataError
from diffusion.contracts.scenes import PALETTE, Scene
from diffusion.demo.__main__ import JUDGE_SEED, NUM_JUDGED, judged_scenes
from diffusion.demo.judge import calibration, judge
from diffusion.evaluation.features.drawn_shapes import look
from diffusion.evaluation.features.networks import load_extractors
from diffusion.evaluation.metrics.distances import share_of
from diffusion.evaluation.metrics.figures import METRICS


def scenes(count, seed=0):
    rng = random.Random(seed)
    return [random_scene(rng) for _ in range(count)]


def test_real_shapes_are_right():
    wanted = scenes(1000)
    rng = random.Random(1)
    verdict = judge([draw(scene, 32, rng) for scene in wanted], wanted)
    assert verdict['foreground'] > 0.98
    assert verdict['background'] > 0.98


def test_noise_is_near_chance():
    rng = np.random.default_rng(0)
    noise = [Image.fromarray(rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)) for _ in range(1000)]
    verdict = judge(noise, scenes(1000))
    assert abs(verdict['background'] - 1 / 8) < 0.05
    assert verdict['foreground'] < 0.2


def test_wrong_colours_are_wrong():
    wanted = scenes(500)
    rng = random.Random(1)
    shuffled = [draw(scene, 32, rng) for scene in wanted[1:] + wanted[:1]]
    verdict = judge(shuffled, wanted)
    assert verdict['foreground'] < 0.25
    assert verdict['background'] < 0.25


def test_the_judged_prompts_are_fixed_and_many():
    assert judged_scenes() == judged_scenes()
    assert len(judged_scenes()) == NUM_JUDGED == 192
    assert judged_scenes(64) == judged_scenes()[:64]
    assert JUDGE_SEED > 2**16  # no seed of a sample grid


@pytest.mark.parametrize('side', [32, 64])
def test_shape_size_and_place_are_right_on_real_shapes_alone(side):
    known = calibration(side)
    assert known['real']['everything'] > 0.98
    assert [known['noise'][field] for field in ('shape', 'size', 'place', 'everything')] == [0, 0, 0, 0]
    chance = known['chance']
    assert abs(chance['shape'] - 1 / 3) < 0.1
    assert abs(chance['size'] - 1 / 2) < 0.12
    assert abs(chance['place'] - 1 / 5) < 0.1
    assert chance['everything'] < 0.02


def test_soft_and_grainy_shapes_are_seen():
    """As a small VAE draws them."""
    wanted, rng, grain = scenes(200), random.Random(1), np.random.default_rng(0)
    images = []
    for scene in wanted:
        soft = np.asarray(draw(scene, 64, rng).filter(ImageFilter.GaussianBlur(1.5)), dtype=np.float32)
        images.append(Image.fromarray((soft + grain.normal(0, 10, soft.shape)).clip(0, 255).astype(np.uint8)))
    verdict = judge(images, wanted)
    assert min(verdict['shape'], verdict['size'], verdict['place']) > 0.95


@pytest.mark.parametrize('box', [(4, 28, 60, 36), (0, 0, 64, 63)])
def test_what_is_no_shape_has_none(box):
    """A bar; and a background that leaves a line of its colour."""
    image = Image.new('RGB', (64, 64), PALETTE['blue'])
    ImageDraw.Draw(image).rectangle(box, fill=PALETTE['red'])
    seen = look(image)
    assert (seen.shape, seen.size, seen.place) == ('', '', '')


def test_a_cross_is_no_shape():
    image = Image.new('RGB', (64, 64), PALETTE['blue'])
    for box in ((12, 28, 52, 36), (28, 12, 36, 52)):
        ImageDraw.Draw(image).rectangle(box, fill=PALETTE['red'])
    assert look(image) == Scene('', 'red', '', '', 'blue')


def test_a_caption_and_its_scene_are_the_same():
    assert all(Scene.of(scene.caption) == scene for scene in scenes(200))
    for caption in ('a small red circle', 'a tiny red circle at the left on a blue background', 'a small red dog at the left on a blue background'):
        assert Scene.of(caption) is None


def test_the_metric_says_what_the_judge_says():
    wanted, rng = scenes(40), random.Random(1)
    images = [draw(scene, 32, rng) for scene in [*wanted[:30], *wanted[29:39]]]  # a quarter is of other captions
    [look_at] = load_extractors(['shapes-look'])
    pixels = torch.stack([torch.from_numpy(np.array(image)).permute(2, 0, 1) for image in images])
    drawn, texts = look_at.images(pixels)['shapes-look'], look_at.texts([scene.caption for scene in wanted])
    found = METRICS['shapes'](None, drawn, texts, 0)
    verdict = judge(images, wanted)
    said = [found[f'right_{field}']['value'] for field in ('colour', 'background', 'shape', 'size', 'place', 'everything')]
    assert said == [verdict['foreground'], verdict['background'], verdict['shape'], verdict['size'], verdict['place'], verdict['everything']]
    assert found['right_everything'] == {'value': 0.75, 'error': share_of(torch.tensor([1.0] * 30 + [0.0] * 10)).error}
    assert len(look_at.sha256) == 64
    with pytest.raises(DataError, match="'a dog' is no caption of data_prep.shapes"):
        look_at.texts(['a dog'])
