"""benchmarks.online limits encoders to the rate that it says, trains recipes that are sound, and draws what it measured."""

import time

import numpy as np
import pytest

from benchmarks.online import Prepared, TrainingRun, figure_of, limited
from diffusion.common.files import read_json_lines
from diffusion.common.pages import png
from diffusion.online.encoder import ImageEncoder
from diffusion.recipe import load_recipe
from tests.conftest import REPOSITORY, run_python


@pytest.mark.parametrize('took_sec', [0.0, 0.05])
def test_an_encoder_is_held_to_its_rate_whatever_it_takes_itself(monkeypatch, took_sec):
    def encode(self, images, training):
        time.sleep(took_sec)
        return np.zeros((len(images), 8, 4, 4))

    monkeypatch.setattr(ImageEncoder, 'encode', encode)
    encoder = limited(100).__new__(limited(100))
    begun = time.monotonic()
    for _ in range(4):
        assert len(encoder.encode(np.zeros((10, 3, 32, 32)), True)) == 10
    assert 0.4 <= time.monotonic() - begun < 2


@pytest.mark.parametrize(
    'run', [TrainingRun('latents'), TrainingRun('images'), TrainingRun('images', 3, 10.0), TrainingRun('images', 2, None, 'bytes', 256)]
)
def test_its_recipes_are_sound(run, encoders_folder, tmp_path):
    (tmp_path / 'encoders').symlink_to(encoders_folder)
    recipe = load_recipe(REPOSITORY / 'yamls/sd2-base-256.yaml', Prepared(str(tmp_path), 16, 60, 15).overrides(run))
    assert (recipe.data.kind, recipe.data.resolution) == (run.data, run.resolution)
    assert (recipe.data.encoders is None) == (run.actors == 0)
    if run.actors:
        assert (recipe.data.encoders.ray.actors, recipe.data.encoders.ray.send) == (run.actors, run.send)


def test_the_figure_has_both_lines_and_the_limits():
    figure = figure_of(in_step=80, free=100, rate=30, measured={1: 29, 2: 57, 3: 88, 4: 97, 5: 99})
    (axes,) = figure.axes
    lines = {line.get_label().split(':')[0]: line for line in axes.get_lines()}
    assert list(lines['measured'].get_xdata()) == [1, 2, 3, 4, 5]
    assert list(lines['predicted'].get_ydata()) == [0, 100, 100]
    assert lines['predicted'].get_xdata()[1] == pytest.approx(100 / 30)  # where encoders keep up
    assert set(lines['encoding in the step'].get_ydata()) == {80}
    assert png(figure).startswith(b'\x89PNG')


@pytest.mark.long
@pytest.mark.timeout(900)
def test_training_waits_for_slow_encoders_and_bytes_are_fewer_than_pixels(tmp_path):
    options = ['--actors', 1, 2, '--rate', 10, '--images', 250, '--batches', 10, '--batch', 8]
    run_python('-m', 'benchmarks.online', *options, '--figure', tmp_path / 'figure.png', '--out', tmp_path / 'rows.jsonl')
    latents, in_step, one, two, pixels, stored = read_json_lines(tmp_path / 'rows.jsonl')
    assert (latents['data'], in_step['actors'], one['actors'], two['actors']) == ('latents', 0, 1, 2)
    assert one['images_per_sec'] < 1.3 * 10 < 1.3 * two['images_per_sec']
    assert pixels['sent_bytes_per_image'] == 3 * 256 * 256 > 2 * stored['sent_bytes_per_image']
    assert (tmp_path / 'figure.png').read_bytes().startswith(b'\x89PNG')
