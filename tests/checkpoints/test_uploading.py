"""The uploader against a storage that fails when told to; how the real one behaves under a storm is in tests/faults."""

import shutil
import threading
import time

import pytest

from diffusion.checkpoints import uploading
from diffusion.checkpoints.uploading import Misses, Uploader
from diffusion.common.storage import LocalFolder, StorageError, StorageRefusal
from tests.checkpoints.files import content_of, manifest, names, write_checkpoint


class Storage(LocalFolder):
    """On a disk, with a switch; `order` lists what was put."""

    def __init__(self, url):
        super().__init__(url)
        object.__setattr__(self, 'broken', threading.Event())
        object.__setattr__(self, 'wedged', threading.Event())
        object.__setattr__(self, 'refused', threading.Event())
        object.__setattr__(self, 'attempts', [])
        object.__setattr__(self, 'order', [])
        object.__setattr__(self, 'torn', [])

    def copy(self, path, name):
        while self.wedged.is_set():
            time.sleep(0.01)
        self.attempts.append(name)
        if self.refused.is_set():
            raise StorageRefusal(f'{name}: AccessDenied')
        if self.broken.is_set():
            raise StorageError(f'{name}: the storage is away')
        copied = path.with_name(f'.copy-{name}')
        shutil.copy(path, copied)
        if self.torn:
            copied.write_bytes(copied.read_bytes()[: self.torn.pop()])
        self.put(copied, name)

    def put(self, path, name):
        super().put(path, name)
        self.order.append(name)


@pytest.fixture
def storage(tmp_path, monkeypatch):
    monkeypatch.setattr(uploading, 'FIRST_PAUSE_SEC', 0.01)
    return Storage(str(tmp_path / 'remote'))


@pytest.fixture
def uploader(storage, tmp_path):
    misses, safe = Misses(), []
    made = Uploader(tmp_path / 'staging', storage, misses, lambda said: safe.append(said.batch))
    made.safe = safe
    yield made
    made.stop()


def submit(uploader, batch):
    write_checkpoint(uploader.staging, batch)
    uploader.submit(manifest(batch, content_of(batch)))


def wait(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_the_manifest_comes_after_the_file_and_latest_last(uploader, storage):
    submit(uploader, 4)
    assert uploader.finish() == ''
    assert storage.order == ['ba00000004.pt', 'ba00000004.json', 'latest.json']
    assert (uploader.safe, uploader.misses.in_a_row) == ([4], 0)
    assert names(uploader.staging) == ['ba00000004.json', 'ba00000004.pt']  # it stays
    submit(uploader, 4)
    assert uploader.finish() == ''
    assert len(storage.order) == 3  # it was there already
    assert uploader.safe == [4, 4]


def test_a_file_of_the_same_batch_loses_its_manifest_first(uploader, storage, tmp_path):
    """After a run went back; killed between the two, the storage has a file that nothing vouches for."""
    write_checkpoint(tmp_path / 'remote', 4)
    (tmp_path / 'remote/ba00000004.json').write_text(manifest(4, b'another').to_json())
    storage.broken.set()
    submit(uploader, 4)
    wait(lambda: 'ba00000004.json' not in names(tmp_path / 'remote'))
    storage.broken.clear()
    assert uploader.finish() == ''


def test_training_goes_on_during_an_outage_and_each_overtaken_checkpoint_is_a_miss(uploader, storage):
    storage.broken.set()
    for batch in (4, 8, 12):
        submit(uploader, batch)
        time.sleep(0.05)
    wait(lambda: uploader.misses.in_a_row == 2)
    assert 'the storage is away' in uploader.misses.cause
    storage.broken.clear()
    assert uploader.finish() == ''
    assert (uploader.safe, uploader.misses.in_a_row, uploader.misses.total) == ([12], 0, 2)


def test_a_wedge_blocks_nobody(uploader, storage):
    storage.wedged.set()
    start = time.monotonic()
    for batch in (4, 8, 12, 16):
        submit(uploader, batch)
    assert time.monotonic() - start < 10
    wait(lambda: uploader.misses.in_a_row >= 2)
    assert 'ba00000016.pt could not be uploaded within 0 s' in uploader.finish(0.05)
    assert uploader.finish(0.05) == ''  # said once; nothing is tried any more
    storage.wedged.clear()


def test_what_is_refused_is_said_at_once_and_not_tried_again(uploader, storage, capsys):
    storage.refused.set()
    start = time.monotonic()
    submit(uploader, 4)
    said = uploader.finish(60)
    assert time.monotonic() - start < 30
    assert said.endswith('/ba00000004.pt: the storage refused it: ba00000004.pt: AccessDenied')
    assert (storage.attempts, uploader.misses.in_a_row, uploader.safe) == (['ba00000004.pt'], 1, [])
    assert said in capsys.readouterr().err
    submit(uploader, 8)
    wait(lambda: uploader.misses.in_a_row == 2)
    assert 'AccessDenied' in uploader.misses.cause
    storage.refused.clear()
    submit(uploader, 12)
    assert uploader.finish() == ''
    assert (uploader.safe, uploader.misses.in_a_row, uploader.refused) == ([12], 0, '')


def test_a_half_upload_is_not_believed(uploader, storage):
    storage.torn.append(10)
    submit(uploader, 4)
    assert uploader.finish() == ''
    assert storage.order == ['ba00000004.pt', 'ba00000004.pt', 'ba00000004.json', 'latest.json']
