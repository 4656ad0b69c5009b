import random

import pyarrow.parquet as pq

from data_prep.shapes import PALETTE, draw, random_scene, vocabulary
from tests.conftest import run_python


def test_a_seed_gives_the_same_bytes_and_a_longer_set_begins_with_the_shorter(tmp_path):
    for name, count, seed in (('a', 20, 0), ('b', 20, 0), ('long', 30, 0), ('other', 20, 1)):
        run_python('-m', 'data_prep.shapes', tmp_path / name, '--count', count, '--per-shard', 10, '--seed', seed)
    read = {name: [(tmp_path / name / f'{i:05d}.tar').read_bytes() for i in range(2)] for name in ('a', 'b', 'long', 'other')}
    assert read['a'] == read['b'] == read['long']
    assert read['a'] != read['other']
    rows = pq.read_table(tmp_path / 'a/00000.parquet').to_pylist()
    assert [row['status'] for row in rows] == ['success'] * 10
    assert rows[0]['key'] == '000000000'


def test_images_show_their_captions():
    rng = random.Random(0)
    for _ in range(100):
        scene = random_scene(rng)
        assert scene.colour != scene.background
        image = draw(scene, 32, rng)
        assert image.getpixel((0, 0)) == PALETTE[scene.background]
        assert PALETTE[scene.colour] in {image.getpixel((x, y)) for x in range(32) for y in range(32)}
        assert set(scene.caption.split()) <= set(vocabulary())


def test_nonsense_is_refused(tmp_path):
    run_python('-m', 'data_prep.shapes', tmp_path / 'a', '--count', '5')
    run_python('-m', 'data_prep.shapes', tmp_path / 'a', '--count', '5')
    assert 'was begun with count=5, now it is 6' in run_python('-m', 'data_prep.shapes', tmp_path / 'a', '--count', '6', code=2).stderr
    assert 'holds something else already' in run_python('-m', 'data_prep.shapes', tmp_path, '--count', '6', code=2).stderr
    assert '--count 0: is not above 0' in run_python('-m', 'data_prep.shapes', tmp_path, '--count', '0', code=2).stderr
