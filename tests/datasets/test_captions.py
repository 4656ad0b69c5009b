import numpy as np
import pytest

from diffusion.datasets.shards import captions_of, pick

THREE = [('often', 0.5), ('sometimes', 0.3), ('seldom', 0.2)]


@pytest.mark.parametrize(
    ('uniform', 'caption'),
    [(1e-9, 'often'), (0.5, 'often'), (np.nextafter(0.5, 1), 'sometimes'), (0.8, 'sometimes'), (np.nextafter(0.8, 1), 'seldom'), (1.0, 'seldom')],
)
def test_where_a_draw_falls(uniform, caption):
    assert pick(THREE, uniform) == caption


@pytest.mark.parametrize('captions', [THREE, [(str(i), 1 / 7) for i in range(7)], [('only', 1.0)]])
def test_captions_are_drawn_as_often_as_their_weights_say(captions):
    draws = 1 - np.random.default_rng(0).random(20_000)  # from (0, 1]
    found = [pick(captions, draw) for draw in draws]
    for caption, weight in captions:
        deviation = (weight * (1 - weight) / len(draws)) ** 0.5
        assert found.count(caption) / len(draws) == pytest.approx(weight, abs=4 * deviation)


def test_weights_that_add_up_to_a_little_less_than_one():
    assert pick([('a', 0.3), ('b', 0.3), ('c', 0.3)], 1.0) == 'c'


def test_the_captions_of_a_row():
    assert captions_of({'caption': 'a'}) == [('a', 1.0)]
    assert captions_of({'caption': 'a', 'captions': [['a', 0.75], ['b', 0.25]]}) == [('a', 0.75), ('b', 0.25)]
