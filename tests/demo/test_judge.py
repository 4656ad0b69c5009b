import random

import numpy as np
from PIL import Image

from data_prep.shapes import draw, random_scene
from diffusion.demo.__main__ import JUDGE_SEED, NUM_JUDGED, judged_scenes
from diffusion.demo.judge import judge


def scenes(count, seed=0):
    rng = random.Random(seed)
    return [random_scene(rng) for _ in range(count)]


def test_real_shapes_are_right():
    wanted = scenes(1000)
    rng = random.Random(1)
    verdict = judge([draw(scene, 32, rng) for scene in wanted], wanted)
    assert verdict.foreground > 0.98
    assert verdict.background > 0.98


def test_noise_is_near_chance():
    rng = np.random.default_rng(0)
    noise = [Image.fromarray(rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)) for _ in range(1000)]
    verdict = judge(noise, scenes(1000))
    assert abs(verdict.background - 1 / 8) < 0.05
    assert verdict.foreground < 0.2


def test_wrong_colours_are_wrong():
    wanted = scenes(500)
    rng = random.Random(1)
    shuffled = [draw(scene, 32, rng) for scene in wanted[1:] + wanted[:1]]
    verdict = judge(shuffled, wanted)
    assert verdict.foreground < 0.25
    assert verdict.background < 0.25


def test_the_judged_prompts_are_fixed_and_many():
    assert judged_scenes() == judged_scenes()
    assert len(judged_scenes()) == NUM_JUDGED == 64
    assert JUDGE_SEED > 2**16  # no seed of a sample grid
