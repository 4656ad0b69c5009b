"""A new word from six photos: every stage, too short to learn anything; and at length, against the figures of a base without training."""

import json
import random
import shutil

import pytest

from data_prep.shapes import draw
from diffusion.contracts.scenes import SHAPES
from diffusion.demo.__main__ import judged_scenes
from diffusion.demo.lora import PHOTOS, SHAPE, measure_words, new_scenes
from tests.conftest import TINY, read_json, run_python

SHORT = [*TINY, 'train.duration=4ba', 'checkpoint.every=2ba', 'data.streams.class.drawn.prompts=[a, b]',
         'data.streams.class.drawn.num_images=4', 'data.streams.class.drawn.steps=1',
         'log.samples.steps=1', 'ema.half_life=1ba', 'adapter.rank=2', 'adapter.alpha=2',
         'model.diffusion.prediction=epsilon', 'model.diffusion.schedule.zero_terminal_snr=false']  # fmt: skip


@pytest.mark.timeout(400)
def test_every_stage_hands_over_to_the_next(base, tmp_path):
    shutil.copytree(base, tmp_path / 'base')
    (tmp_path / 'base' / 'export.json').write_text(json.dumps({'steps': 1, 'guidance': 1.5}))
    command = ['-m', 'diffusion.demo.lora', f'run_folder={tmp_path}/run', f'model.encoders.source={tmp_path}/base', *SHORT]
    out = run_python(*command).stdout
    assert 'is trained to 4ba' in out
    page = tmp_path / 'run/lora.html'
    assert f'Open {page}' in out
    for expected in (
        'A new word from six photos',
        'What it could draw before',
        'old prompts that became a cross',
        'a large sks at the left on a blue background',
    ):
        assert expected in page.read_text()
    learned = read_json(tmp_path / 'run/learned.json')
    assert learned.keys() == {'before', 'after'}
    assert len(list((tmp_path / 'run/photos').glob('*.png'))) == len(PHOTOS) == 6

    again = run_python(*command).stdout
    assert '== ' not in again  # nothing is left to do
    assert read_json(tmp_path / 'run/learned.json') == learned


def test_the_judge_of_four_shapes_is_right_about_drawn_scenes():
    assert SHAPE not in SHAPES
    rng = random.Random(0)
    new, old = ([draw(scene, 32, rng) for scene in scenes] for scenes in (new_scenes(), judged_scenes(64)))
    right = measure_words(new, old)
    assert min(right[field] for field in ('word', 'word_background', 'old')) > 0.95
    assert right['turned'] == 0
    assert measure_words(old, new)['word'] == 0
    assert measure_words(old, new)['turned'] > 0.95
    assert len({(scene.place, scene.background) for scene in new_scenes()}) == 35


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_six_photos_teach_a_word_and_the_others_stay(tmp_path):
    """With the demo's model, which is trained first: a quarter of an hour on two cores."""
    run_python('-m', 'diffusion.demo.lora', f'run_folder={tmp_path}/lora', f'model.encoders.source={tmp_path}/shapes/export')
    learned = read_json(tmp_path / 'lora/learned.json')
    assert not has_learned(learned['before'], learned['before'])
    assert has_learned(learned['after'], learned['before'])


def has_learned(after: dict[str, float], before: dict[str, float]) -> bool:
    return after['word'] >= 0.35 and after['word_background'] >= 0.8 and after['old'] >= before['old'] - 0.2
