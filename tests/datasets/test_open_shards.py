"""Rows are those of Streaming's reader, and open files are few, forgotten when they are replaced, and never another process's."""

import copy
import multiprocessing
import os
from pathlib import Path

import numpy as np
import pytest
from streaming import MDSWriter
from streaming.base.format.mds import MDSReader

from diffusion.common.files import parse_json
from diffusion.contracts.manifest import INDEX_NAME
from diffusion.datasets.open_shards import OpenShards
from tests.datasets.streams import ours, rows, shard, write_data

NUM_ROWS = 40
COLUMNS = {
    'text': 'str', 'image': 'bytes', 'several': 'json', 'whole': 'int', 'short': 'int16', 'half': 'float16', 'fixed': 'ndarray:float16:2,3', 'of_type': 'ndarray:int32',
    'any': 'ndarray', 'empty': 'bytes',
}  # fmt: skip


@pytest.fixture(scope='module')
def shards(tmp_path_factory) -> list[MDSReader]:
    folder, rng = tmp_path_factory.mktemp('data') / 'of', np.random.default_rng(0)
    with MDSWriter(out=str(folder), columns=COLUMNS, size_limit=2000) as writer:
        for i in range(NUM_ROWS):
            row = {
                'text': 'ä' * (i % 5),
                'image': rng.bytes(i % 7),
                'several': [['a', 0.5], [str(i), 0.5]],
                'whole': -i,
                'short': np.int16(i),
                'half': np.float16(i / 3),
            }
            arrays = {'fixed': rng.random((2, 3)).astype(np.float16), 'of_type': np.arange(1 + i, dtype=np.int32), 'any': rng.random((1 + i % 3, 2))}
            writer.write({**row, **arrays, 'empty': b''})
    found = [MDSReader.from_json(str(folder), None, entry) for entry in parse_json((folder / INDEX_NAME).read_bytes())['shards']]
    assert len(found) > 3
    return found


def open_files(folder: Path) -> set[str]:
    """Files of a folder that this process has open, by their names."""
    links = [os.path.realpath(f'/proc/self/fd/{number}') for number in os.listdir('/proc/self/fd')]
    return {Path(link).name for link in links if Path(link).parent == folder.resolve()}


@pytest.mark.parametrize('most', [0, 2, 100])
def test_rows_are_those_of_streamings_reader(shards, most):
    places = [(one, position) for one in shards for position in range(len(one))]
    np.random.default_rng(1).shuffle(places)
    opened = OpenShards(most)
    for one, position in places:
        row, expected = opened.row(one, position), one[position]
        assert list(row) == list(expected)
        for name, value in expected.items():
            np.testing.assert_array_equal(row[name], value)
            assert type(row[name]) is type(value)
    assert len(open_files(Path(shards[0].dirname))) == min(most, len(shards))


def test_a_replaced_file_is_read_anew_once_it_was_closed(tmp_path):
    folder = write_data(tmp_path / 'data')
    dataset = ours(None, folder).dataset
    before = dataset[24]['noise']
    path = shard(folder)
    (tmp_path / 'copy').write_bytes(path.read_bytes().replace(before, bytes(reversed(before))))
    os.replace(tmp_path / 'copy', path)
    assert dataset[24]['noise'] == before
    dataset._open.close(dataset.shards[3])
    assert dataset[24]['noise'] == bytes(reversed(before))


def test_with_a_limited_cache_no_file_stays_open(tmp_path):
    """Or the disk would keep what was evicted."""
    remote = write_data(tmp_path / 'remote')
    for limit in (None, '20kb'):
        loader = ours(remote, tmp_path / f'cache-{limit}', cache_limit=limit)
        assert len(list(rows(loader))) == 64
        assert bool(open_files(tmp_path / f'cache-{limit}')) == (limit is None)


def test_offsets_outside_of_the_file_are_refused(shards, tmp_path):
    one = shards[0]
    content = bytearray(Path(one.dirname, one.raw_data.basename).read_bytes())
    content[8:12] = (2**31).to_bytes(4, 'little')
    (tmp_path / one.raw_data.basename).write_bytes(content)
    index = parse_json(Path(one.dirname, INDEX_NAME).read_bytes())
    damaged = MDSReader.from_json(str(tmp_path), None, index['shards'][0])
    with pytest.raises(ValueError, match=r'row 0 is said to be the bytes \d+ to 2,147,483,648 of a file of [\d,]+'):
        OpenShards().row(damaged, 0)


def test_a_copy_for_another_process_has_no_files_of_this_one(shards):
    opened = OpenShards()
    expected = opened.row(shards[0], 1)['text']
    copied = copy.copy(opened)  # by what pickle takes, too
    assert len(copied._open) == 0
    with multiprocessing.get_context('fork').Pool(2) as pool:  # which have the descriptors, and no position of them in common
        texts = pool.starmap(_text, [(opened, shards[0], 1)] * 8)
        pool.close()
        pool.join()  # `with` would send SIGTERM, for which an earlier test of this process may have left a handler that waits
    assert set(texts) == {expected}


def _text(opened: OpenShards, one: MDSReader, position: int) -> str:
    return opened.row(one, position)['text']
