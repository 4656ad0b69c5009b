"""Killed ten times at random moments, convert and encode end with what an uninterrupted run gives."""

import re
import time
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from streaming import LocalDataset

from tests.conftest import read_json, run_python
from tests.data_prep.test_convert import jpeg, write_webdataset

NUM_KILLS = 10
NUM_ROWS = 600
PER_SHARD = 20


@pytest.fixture(scope='module')
def source(tmp_path_factory):
    """30 shards; each has a few rows that cannot be used."""
    rows = []
    for i in range(NUM_ROWS):
        image, caption = jpeg(400 if i % 3 else 30, 300, seed=i), f'caption {i}'
        status = 'success'
        if i % 10 == 3:
            image, status = None, 'failed_to_download'
        if i % 10 == 5:
            caption = ''
        rows.append((f'{i:09d}', caption, image, status))
    return write_webdataset(tmp_path_factory.mktemp('kill') / 'source', rows, PER_SHARD)


@pytest.fixture(scope='module')
def uninterrupted(source, encoders_folder):
    folder = source.parent / 'uninterrupted'
    for job in (('convert', source, folder / 'images', 1), ('encode', folder / 'images', folder / 'latents', 1, encoders_folder)):
        run_python('-m', 'tests.data_prep.kill', 0, 0, *job, OMP_NUM_THREADS='1')
    return folder


def content(folder: Path, stream: str = ''):
    return [
        {name: value.tobytes() if isinstance(value, np.ndarray) else value for name, value in row.items()}
        for row in LocalDataset(str(folder / stream))
    ]


def kill_and_finish(*job):
    out = run_python('-m', 'tests.data_prep.kill', NUM_KILLS, time.time_ns() % 10_000, *job, OMP_NUM_THREADS='1').stdout
    print(out)  # shown if the test fails
    kills, survived = re.findall(r'(\d+) kills left \[(.*)\] parts', out)[0]
    assert int(kills) == NUM_KILLS
    assert set(survived.split(', ')) - {'0', '30'}  # some fell into the middle


def assert_equal(one: Path, other: Path, streams):
    for stream in streams:
        assert content(one, stream) == content(other, stream)  # the order, too
    assert pq.read_table(one / 'failures.parquet').equals(pq.read_table(other / 'failures.parquet'))
    assert read_json(one / 'manifest.json') == read_json(other / 'manifest.json')
    assert not list(one.glob('.scratch-*/'))


@pytest.mark.parametrize('processes', [pytest.param(1, marks=pytest.mark.long), 2])
def test_convert(processes, source, uninterrupted, tmp_path):
    kill_and_finish('convert', source, tmp_path / 'out', processes)
    assert_equal(tmp_path / 'out', uninterrupted / 'images', [''])
    assert len(content(tmp_path / 'out')) == NUM_ROWS * 8 // 10


@pytest.mark.long
@pytest.mark.parametrize('processes', [1, 2])
def test_encode(processes, uninterrupted, encoders_folder, tmp_path):
    kill_and_finish('encode', uninterrupted / 'images', tmp_path / 'out', processes, encoders_folder)
    assert read_json(tmp_path / 'out/manifest.json')['dropped'] == {'short side below 32 px': 160}
    assert_equal(tmp_path / 'out', uninterrupted / 'latents', ['16', '32'])
