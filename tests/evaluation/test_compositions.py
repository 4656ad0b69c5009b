"""Scenes of several objects: what is drawn is what the caption says, and the metric `composition` sees it, and sees each thing that is wrong."""

import io
import json
import random

import pytest
import torch
from PIL import Image, ImageDraw

from data_prep.shapes import draw_composition
from diffusion.contracts.compositions import CATEGORIES, HELD_OUT, RELATIONS, Composition, random_composition
from diffusion.contracts.errors import DataError
from diffusion.contracts.scenes import PALETTE, SHAPES
from diffusion.evaluation.features.drawn_compositions import embedded, look
from diffusion.evaluation.features.networks import load_extractors
from diffusion.evaluation.metrics.figures import find_metric
from tests.conftest import run_here

RED, BLUE, WHITE = (PALETTE[name] for name in ('red', 'blue', 'white'))


def score(images, captions):
    """Values by figure, through the same network and metric as an evaluation."""
    [network] = load_extractors(['compositions-look'])
    pixels = torch.stack([torch.tensor(list(image.convert('RGB').tobytes()), dtype=torch.uint8).view(*image.size[::-1], 3) for image in images])
    drawn = network.images(pixels.permute(0, 3, 1, 2))['compositions-look']
    return {name: value['value'] for name, value in find_metric('composition')(None, drawn, network.texts(captions), 0).items()}


def scenes(count, seed=0):
    rng = random.Random(seed)
    return [random_composition(CATEGORIES[number % len(CATEGORIES)], rng) for number in range(count)]


def saved_as_jpeg(image):
    buffer = io.BytesIO()
    image.save(buffer, 'JPEG', quality=95, subsampling=0)
    return Image.open(buffer)


@pytest.mark.parametrize('side_px', [32, 64, 100])
def test_what_is_drawn_is_right_and_what_others_say_is_not(side_px):
    asked = scenes(140)
    images = [saved_as_jpeg(draw_composition(scene, side_px, random.Random(number))) for number, scene in enumerate(asked)]
    captions = [scene.caption for scene in asked]
    assert set(score(images, captions).values()) == {1}
    by_chance = score([*images[7:], *images[:7]], captions)  # of another caption of the same category
    assert by_chance['composition'] < 0.25
    assert by_chance['composition_held_out'] < 0.2
    noise = [Image.effect_noise((side_px, side_px), 120) for _ in captions]
    assert score(noise, captions)['composition'] == 0


def test_the_overall_score_is_the_mean_of_the_categories_that_occur():
    asked = [random_composition(category, random.Random(number)) for number, category in enumerate(['single'] * 9 + ['colours'])]
    images = [draw_composition(scene, 64, random.Random(0)) for scene in asked[:-1]] + [Image.new('RGB', (64, 64), RED)]
    assert score(images, [scene.caption for scene in asked]) == {'composition': 0.5, 'composition_single': 1, 'composition_colours': 0}


@pytest.mark.parametrize(
    ('drawn', 'wrong'),
    [
        ('a red circle', ['a blue circle', 'a red square', 'a red circle and a blue square', 'two circles']),
        (
            'a circle left of a square',
            ['a square left of a circle', 'a circle above a square', 'a circle inside a square', 'a circle and a triangle'],
        ),
        ('a triangle above a circle', ['a circle above a triangle', 'a circle left of a triangle', 'a triangle']),
        ('a square inside a triangle', ['a triangle inside a square', 'a square left of a triangle', 'a square and a circle']),
        ('three squares', ['two squares', 'four squares', 'three circles', 'a square']),
        ('a red circle and a blue square', ['a blue circle and a red square', 'a red square and a blue circle', 'a red circle']),
    ],
)
def test_each_thing_that_is_wrong_is_seen(drawn, wrong):
    images = [draw_composition(Composition.of(drawn), 64, random.Random(seed)) for seed in range(5)]
    assert score(images, [drawn] * 5)['composition'] == 1
    for caption in wrong:
        assert score(images, [caption] * 5)['composition'] == 0, caption


def test_a_seam_of_two_colours_is_no_third_object():
    """Red fades into blue through the palette's magenta, as autoencoders draw edges."""
    image = Image.new('RGB', (64, 64), BLUE)
    pen = ImageDraw.Draw(image)
    pen.rectangle((14, 14, 49, 49), fill=tuple((a + b) // 2 for a, b in zip(RED, BLUE, strict=True)))
    pen.rectangle((16, 16, 47, 47), fill=RED)
    assert [(one.colour, one.shape) for one in look(image)] == [('red', 'square')]


def test_what_has_no_shape_spoils_a_scene():
    image = Image.new('RGB', (64, 64), WHITE)
    pen = ImageDraw.Draw(image)
    pen.ellipse((8, 20, 28, 40), fill=RED)
    assert score([image], ['a red circle'])['composition'] == 1
    pen.line((40, 8, 40, 56), fill=BLUE, width=6)
    assert score([image], ['a red circle'])['composition'] == 0


def test_an_empty_image_shows_nothing():
    assert embedded(Image.new('RGB', (64, 64), RED)).count_nonzero() == 0


def test_captions_are_read_as_they_are_written():
    for scene in scenes(700):
        assert Composition.of(scene.caption) == scene
    assert {scene.relation for scene in scenes(700)} == {'', *RELATIONS}
    for caption in (
        'a circle left of a red square',
        'a pink circle',
        'five circles',
        'two circle',
        'one circles',
        'a circle and',
        'a circle and a square and a circle',
    ):
        assert Composition.of(caption) is None, caption
    with pytest.raises(DataError, match="'a photo' is no caption of data_prep.shapes --scenes composed"):
        load_extractors(['compositions-look'])[0].texts(['a photo'])


def test_training_data_never_has_what_is_held_out(tmp_path):
    for kind, expected in (('composed', False), ('held-out', True)):
        run_here('data_prep.shapes', tmp_path / kind, '--scenes', kind, '--count', 210, '--size', 48)
        import pyarrow.parquet as pq

        captions = pq.read_table(tmp_path / kind / '00000.parquet')['caption'].to_pylist()
        asked = [Composition.of(caption) for caption in captions]
        shown = set()
        for number, scene in enumerate(asked):
            shown |= {(one.colour, one.shape) for one in look(draw_composition(scene, 48, random.Random(f'0/{number:09d}')))}
        assert bool(shown & HELD_OUT) == any(scene.category == 'held_out' for scene in asked) == expected
        assert {shape for _, shape in shown} == set(SHAPES)
        assert json.loads((tmp_path / kind / 'shapes.json').read_text())['scenes'] == kind
