"""Sources that somebody else filled: devices, FIFOs and links. Nothing outside is read, nothing hangs, each is counted by its reason."""

import json
import multiprocessing
import os
import resource
import socket
import traceback
from contextlib import chdir
from pathlib import Path

import pytest

from data_prep.converting.conversion import Options, convert
from data_prep.encoding.dataset import encode
from data_prep.sources.folder import open_source
from diffusion.common.storage import StorageRefusal, open_folder
from diffusion.contracts.errors import DataError
from diffusion.recipe.schema import EncoderSource
from tests.data_prep.sources.test_sources import coco, hugging_face, put, put_table, samples, webdataset
from tests.data_prep.test_convert import jpeg, write_webdataset

DEADLINE_SEC = 30
MEMORY_BYTES = 2 << 30  # more than this process has


def in_bounds(work, *arguments):
    """What `work` returns, or the error as text, from a child that has neither endless time nor endless memory."""

    def run(answers):
        used = int(Path('/proc/self/statm').read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES,) * 2)
        try:
            answers.put(work(*arguments))
        except Exception as error:
            answers.put(f'{type(error).__name__}: {error}' if isinstance(error, DataError) else traceback.format_exc())

    context = multiprocessing.get_context('fork')
    answers = context.Queue()
    process = context.Process(target=run, args=(answers,))
    process.start()
    try:
        return answers.get(timeout=DEADLINE_SEC)
    finally:
        process.kill()


def outcome(source, out, **options):
    tally = convert(source, out, **options)
    return dict(tally.dropped), [(sample['key'], sample['caption']) for sample in samples(out)]


@pytest.fixture
def outside(tmp_path):
    """A folder next to the source: an image and a secret."""
    put(tmp_path / 'elsewhere', 'theirs.jpg', jpeg(seed=7))
    put(tmp_path / 'elsewhere', 'secret.txt', 'the root password')
    return tmp_path / 'elsewhere'


def test_an_image_folder_counts_what_it_must_not_open(tmp_path, outside):
    source = tmp_path / 's'
    for name in ('good', 'device', 'fifo', 'socket', 'out', 'self', 'nowhere', 'c-device', 'c-fifo', 'c-out', 'c-self'):
        put(source, f'{name}.jpg', jpeg(seed=1))
        put(source, f'{name}.txt', 'a caption')
    for name in (
        'device.jpg',
        'fifo.jpg',
        'socket.jpg',
        'out.jpg',
        'self.jpg',
        'nowhere.jpg',
        'c-device.txt',
        'c-fifo.txt',
        'c-out.txt',
        'c-self.txt',
    ):
        (source / name).unlink()
    for name in ('device.jpg', 'c-device.txt'):
        os.symlink('/dev/zero', source / name)
    for name in ('fifo.jpg', 'c-fifo.txt'):
        os.mkfifo(source / name)
    with socket.socket(socket.AF_UNIX) as server, chdir(source):  # names of sockets have to be short
        server.bind('socket.jpg')
    os.symlink(outside / 'theirs.jpg', source / 'out.jpg')
    os.symlink('../elsewhere/secret.txt', source / 'c-out.txt')
    os.symlink('self.jpg', source / 'self.jpg')
    os.symlink('c-self.txt', source / 'c-self.txt')
    os.symlink('missing.jpg', source / 'nowhere.jpg')
    os.symlink('good.jpg', source / 'inside.jpg')  # what is inside may be linked to
    os.symlink('good.txt', source / 'inside.txt')
    os.symlink('.', source / 'loop')  # known by its own names already
    os.symlink(outside, source / 'more')
    os.symlink('unrelated', source / 'unrelated')
    os.mkfifo(source / 'README.md')
    dropped, kept = in_bounds(outcome, source, tmp_path / 'out')
    assert kept == [('good.jpg', 'a caption'), ('inside.jpg', 'a caption')]
    assert dropped == {
        'not a regular file': 2,  # the FIFO, the socket
        'a link that leads out of the source': 2,  # the device and the file
        'a link that leads nowhere': 2,
        'a link to a folder outside the source': 1,
        'caption: not a regular file': 1,
        'caption: a link that leads out of the source': 2,
        'caption: a link that leads nowhere': 1,
    }


def test_coco_counts_what_it_must_not_open(tmp_path, outside):
    source = coco(tmp_path / 's')
    (source / 'val2017/0.jpg').unlink()
    os.mkfifo(source / 'val2017/0.jpg')
    (source / 'val2017/1.jpg').unlink()
    os.symlink(outside / 'theirs.jpg', source / 'val2017/1.jpg')
    dropped, kept = in_bounds(outcome, source, tmp_path / 'out')
    assert kept == [('5.jpg', 'spaces')]
    assert (dropped['not a regular file'], dropped['a link that leads out of the source']) == (1, 1)
    moved = (source / 'val2017').rename(tmp_path / 'val2017')
    os.symlink(moved, source / 'val2017')
    assert convert(source, tmp_path / 'out2').dropped == {'a link to a folder outside the source': 7}


LISTS = ['captions.jsonl', 'metadata.csv', 'annotations/captions_x.json', 'manifest.json', 'data.parquet', '00000.tar']


@pytest.mark.parametrize('kind', ['device', 'FIFO', 'link'])
@pytest.mark.parametrize('name', LISTS)
def test_a_list_or_shard_that_must_not_be_opened_is_an_error_that_names_it(name, kind, tmp_path, outside):
    source = webdataset(tmp_path / 's') if name == '00000.tar' else tmp_path / 's'
    put(source, 'x.jpg', jpeg())
    (source / name).unlink(missing_ok=True)
    (source / name).parent.mkdir(exist_ok=True)
    if name == 'manifest.json':
        put(source, 'index.json', '{"version": 2, "shards": []}')
    if kind == 'FIFO':
        os.mkfifo(source / name)
    else:
        os.symlink('/dev/zero' if kind == 'device' else outside / 'secret.txt', source / name)
    error = in_bounds(outcome, source, tmp_path / 'out')
    assert error.startswith('DataError') or 'StorageRefusal' in error, error
    assert name in error
    assert 'password' not in error


def test_links_in_a_format_of_shards(tmp_path, outside):
    source = hugging_face(tmp_path / 's')
    os.symlink('self.parquet', source / 'self')  # none of its files
    os.mkfifo(source / 'notes.txt')
    os.symlink('data', source / 'link')
    assert len(in_bounds(outcome, source, tmp_path / 'out')[1]) == 3  # its seven rows are read once
    os.symlink(outside, source / 'data/more')
    assert 'data/more: is a link to a folder outside the source; copy' in in_bounds(outcome, source, tmp_path / 'out2')


def test_a_snapshot_of_hugging_faces_cache_is_links_to_its_blobs(tmp_path, outside):
    put_table(tmp_path / 'datasets--x/blobs/0123')
    snapshot = tmp_path / 'datasets--x/snapshots/abc'
    snapshot.mkdir(parents=True)
    os.symlink('../../blobs/0123', snapshot / 'train.parquet')
    assert convert(snapshot, tmp_path / 'out').kept == 1
    put_table(outside / 'theirs.parquet')
    os.symlink(outside / 'theirs.parquet', snapshot / 'train2.parquet')
    with pytest.raises(DataError, match=r'train2.parquet: is a link that leads out of the source; copy'):
        convert(snapshot, tmp_path / 'out2')


def test_an_image_mds_is_not_read_from_elsewhere(tmp_path, encoders_folder):
    convert(write_webdataset(tmp_path / 's'), tmp_path / 'images')
    (tmp_path / 'images/00001').rename(tmp_path / '00001')
    os.symlink(tmp_path / '00001', tmp_path / 'images/00001')
    for work in (
        lambda: convert(tmp_path / 'images', tmp_path / 'a'),
        lambda: encode(tmp_path / 'images', tmp_path / 'b', [16], EncoderSource(str(encoders_folder))),
    ):
        with pytest.raises(DataError, match='00001.*a link .* outside the source|00001.*leads out of the source'):
            work()


@pytest.mark.parametrize('kind', ['device', 'FIFO'])
def test_a_skip_list_is_a_regular_file(kind, tmp_path):
    if kind == 'FIFO':
        os.mkfifo(tmp_path / 'optouts.txt')
    path = '/dev/zero' if kind == 'device' else str(tmp_path / 'optouts.txt')
    error = in_bounds(with_skip_list, write_webdataset(tmp_path / 's'), tmp_path / 'out', path)
    assert f'--skip-list {path}: is not a regular file' in error


def with_skip_list(source, out, path):
    return outcome(source, out, options=Options(skip_list=path))


def test_lists_are_read_up_to_a_size(tmp_path, monkeypatch):
    """Files of holes: they take no space, and would take all memory."""
    for name in ('captions.jsonl', 'annotations/captions_x.json'):
        source = tmp_path / name.replace('/', '-')
        put(source, 'x.jpg', jpeg())
        put(source, name, '')
        os.truncate(source / name, 1 << 40)
        assert f'{name}: has 1,099.5 GB, and a list is read as a whole, up to 4.3 GB' in in_bounds(outcome, source, tmp_path / 'out')
    monkeypatch.setattr('data_prep.sources.image_folder.MAX_LINE_CHARS', 1000)
    for name in ('captions.jsonl', 'metadata.csv'):
        put(tmp_path / name, 'x.jpg', jpeg())
        put(tmp_path / name, name, 'x' * 2000)
        with pytest.raises(DataError, match=f'{name}: has a line of more than 1,000 characters'):
            convert(tmp_path / name, tmp_path / 'out')


def test_a_file_that_grows_while_it_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr('data_prep.sources.base.MAX_IMAGE_BYTES', 5000)
    put(tmp_path / 's', 'x.jpg', jpeg())
    put(tmp_path / 's', 'x.txt', 'caption')
    fetch = type(open_source(tmp_path / 's')).fetch

    def growing(self, name, scratch):
        if name == 'x.jpg':
            put(tmp_path / 's', 'x.jpg', jpeg(300, 300))
        return fetch(self, name, scratch)

    monkeypatch.setattr('data_prep.sources.folder.SourceFolder.fetch', growing)
    assert convert(tmp_path / 's', tmp_path / 'out').dropped == {'over 64 MB': 1}


def test_numbers_of_5000_digits_and_columns_twice_are_errors_that_name_the_file(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    digits = '9' * 5000
    for i, (name, content) in enumerate(
        [
            ('captions.jsonl', f'{{"file_name": "x.jpg", "caption": "a", "n": {digits}}}'),
            ('annotations/captions_x.json', f'{{"images": [], "n": {digits}}}'),
        ]
    ):
        put(tmp_path / f'{i}', 'x.jpg', jpeg())
        put(tmp_path / f'{i}', name, content)
        with pytest.raises(DataError, match=name):
            convert(tmp_path / f'{i}', tmp_path / 'out')
    for name, columns in (('train', ['image', 'caption', 'caption']), ('00000', ['jpg', 'key', 'status', 'caption', 'caption'])):
        (tmp_path / name).mkdir()
        pq.write_table(
            pa.table([pa.array([jpeg() if column in ('image', 'jpg') else 'a']) for column in columns], names=columns),
            tmp_path / name / f'{name}.parquet',
        )
        with pytest.raises(DataError, match=f'{name}.parquet: .*the column caption is there 2 times'):
            convert(tmp_path / name, tmp_path / 'out')


def test_no_folder_reads_what_is_no_regular_file(tmp_path):
    """Manifests of training data are read by the same code."""
    os.mkfifo(tmp_path / 'manifest.json')
    with pytest.raises(StorageRefusal, match=r'manifest.json: is not a regular file'):
        open_folder(tmp_path).read('manifest.json')
    os.symlink('x', tmp_path / 'x')
    assert open_folder(tmp_path).files()['x'].num_bytes == 0
    with pytest.raises(FileNotFoundError):
        open_folder(tmp_path).read('x')
    assert json.dumps(open_source(tmp_path).files()['x'].refused) == '"a link that leads nowhere"'
