"""Which checkpoint is chosen, on files of a few bytes; on S3 with moto."""

import os
import random
import shutil
from pathlib import Path

import pytest

from diffusion.checkpoints import resume
from diffusion.checkpoints.resume import FoundCheckpoint, find_newest, refuse_other_data
from diffusion.common import object_storage
from diffusion.common.storage import StorageRefusal, open_folder
from diffusion.contracts.errors import BAD_RECIPE, CheckpointError, StorageOutage, train_code
from tests.checkpoints.files import content_of, manifest, names, write_checkpoint

URL = 's3://bucket/run/checkpoints'


@pytest.fixture
def folder(tmp_path):
    for batch in (4, 8, 12):
        write_checkpoint(tmp_path / 'ckpt', batch)
    return tmp_path / 'ckpt'


def newest(folder, staging=Path('nowhere')):
    found = find_newest(str(folder), staging)
    return None if found is None else found.manifest.batch


def upload(folder):
    remote = open_folder(URL)
    for path in folder.iterdir():
        remote.copy(path, path.name)
    return remote


def test_the_newest_is_taken_by_number(folder):
    found = find_newest(str(folder), Path('nowhere'))
    assert found.path == folder / 'ba00000012.pt'
    assert found.manifest == manifest(12, content_of(12))
    assert newest(folder / 'none') is None


@pytest.mark.parametrize('keep', [0, 0.25, 0.5, 0.99])
def test_a_torn_file_is_set_aside_and_the_one_before_taken(folder, keep, capsys):
    data = content_of(12)
    (folder / 'ba00000012.pt').write_bytes(data[: int(keep * len(data))])
    assert newest(folder) == 8
    said = capsys.readouterr().err
    assert f'{folder}/ba00000012.pt is not whole' in said
    assert f'{int(keep * len(data)):,} bytes, expected {len(data):,}' in said
    assert {'ba00000012.pt.corrupt', 'ba00000012.json.corrupt'} <= set(names(folder))
    assert newest(folder) == 8


def test_no_flipped_bit_goes_unseen(folder):
    rng = random.Random(0)
    path, whole = folder / 'ba00000012.pt', content_of(12)
    for _ in range(20):
        data = bytearray(whole)
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
        assert newest(folder) == 8
        write_checkpoint(folder, 12)
        assert newest(folder) == 12


def test_without_manifest_it_does_not_exist(folder):
    (folder / 'ba00000012.json').unlink()
    (folder / 'latest.json').write_text(manifest(12).to_json())  # stale; nobody asks it
    assert newest(folder) == 8
    (folder / 'ba00000008.json').write_text('{"batch": 8')
    assert newest(folder) == 4
    assert 'ba00000012.pt' in names(folder)  # not ours to judge; the saver sweeps it


def test_a_hostile_manifest_is_passed_over(folder, capsys):
    (folder / 'ba00000012.json').write_text('[' * 100_000)
    assert newest(folder) == 8
    assert 'ba00000012.pt is not whole' in capsys.readouterr().err


def test_a_manifest_that_would_never_end_is_passed_over(folder, capsys):
    (folder / 'ba00000012.json').unlink()
    os.mkfifo(folder / 'ba00000012.json')
    assert newest(folder) == 8
    assert 'not a regular file' in capsys.readouterr().err


def test_a_missing_file_is_a_flaw(folder):
    (folder / 'ba00000012.pt').unlink()
    assert newest(folder) == 8


def test_step_0_is_never_taken_silently(folder):
    for path in folder.glob('*.pt'):
        path.write_bytes(b'rot')
    for _ in range(2):  # the second start must see it too
        with pytest.raises(CheckpointError, match='none of the 3 checkpoints is whole; restore one, or move the folder away'):
            newest(folder)


def test_checkpoints_of_an_earlier_version_are_not_passed_over(tmp_path):
    (tmp_path / 'ba400-rank0.pt').touch()
    (tmp_path / 'latest-rank0.pt').symlink_to('ba400-rank0.pt')
    with pytest.raises(CheckpointError, match='earlier version.*load_path'):
        newest(tmp_path)
    write_checkpoint(tmp_path, 500)
    assert newest(tmp_path) == 500


def test_other_data_is_refused_by_name():
    refuse_other_data(manifest(4, data={'train': 'abc'}), {'train': 'abc', 'new': 'x'})
    with pytest.raises(CheckpointError, match='ba00000004.pt was trained on other data: stream b: 2 then, 3 now'):
        refuse_other_data(manifest(4, data={'a': '1', 'b': '2'}), {'a': '1', 'b': '3'})


def test_the_newest_of_disk_and_storage(s3, folder, tmp_path):
    upload(folder)
    staging = tmp_path / 'run/checkpoints'
    assert newest(URL, staging) == 12
    assert names(staging) == ['ba00000012.json', 'ba00000012.pt']  # downloaded
    write_checkpoint(staging, 16)  # not yet uploaded when the process was killed
    assert newest(URL, staging) == 16
    s3.proxy.requests.clear()
    (staging / 'ba00000016.json').unlink()
    assert newest(URL, staging) == 12
    assert not [path for method, path in s3.proxy.requests if method == 'GET' and path.endswith('.pt')]  # a tie is for the disk


def test_damage_on_the_disk_is_mended_from_storage_and_damage_there_is_left(s3, folder, tmp_path, capsys):
    remote = upload(folder)
    staging = tmp_path / 'staging'
    shutil.copytree(folder, staging)
    (staging / 'ba00000012.pt').write_bytes(b'rot')
    assert newest(URL, staging) == 12
    assert (staging / 'ba00000012.pt').read_bytes() == content_of(12)
    assert 'ba00000012.pt.corrupt' in names(staging)
    rot = bytearray(content_of(16))
    write_checkpoint(folder, 16)
    rot[7] ^= 1
    (folder / 'ba00000016.pt').write_bytes(rot)
    upload(folder)
    assert newest(URL, staging) == 12
    assert f'{URL}/ba00000016.pt is not whole' in capsys.readouterr().err
    assert 'ba00000016.pt' in remote.files()
    assert not [name for name in names(staging) if '16' in name or name.startswith('.')]


def test_a_storage_that_does_not_answer_is_no_empty_one(s3, folder, tmp_path, monkeypatch):
    upload(folder)
    monkeypatch.setattr(object_storage, 'ATTEMPTS', 1)
    object_storage.client_of.cache_clear()
    s3.proxy.fails = lambda method, path: True
    with pytest.raises(StorageOutage, match='could not be listed'):
        newest(URL, tmp_path / 'staging')
    s3.proxy.fails = lambda method, path: method == 'GET' and path.endswith('.pt')
    with pytest.raises(StorageOutage, match=r'ba00000012.pt: could not be read'):  # an outage is no damage: not the one before
        newest(URL, tmp_path / 'staging')
    object_storage.client_of.cache_clear()
    s3.proxy.fails = lambda method, path: False
    with pytest.raises(StorageRefusal, match='checkpoint.folder: ftp://x/y: ftp:// is not known'):
        newest('ftp://x/y')
    with pytest.raises(StorageRefusal, match='check the credentials and the name of the bucket') as refusal:
        newest('s3://no-such-bucket/run', tmp_path / 'staging')
    assert train_code(refusal.value) == BAD_RECIPE


@pytest.mark.parametrize(('status', 'error'), [(403, StorageRefusal), (503, StorageOutage)])
def test_a_machine_without_the_file_tells_a_refusal_and_an_outage_from_a_wrong_checkpoint(s3, folder, tmp_path, monkeypatch, status, error):
    upload(folder)
    assert newest(URL, tmp_path / 'first') == 12
    monkeypatch.setattr(object_storage, 'ATTEMPTS', 1)
    object_storage.client_of.cache_clear()
    s3.proxy.fails = lambda method, path: status
    monkeypatch.setattr(resume, 'on_first_rank', lambda _: FoundCheckpoint(tmp_path / 'first/ba00000012.pt', manifest(12, content_of(12))))
    with pytest.raises(error, match='checkpoint.folder: .*ba00000012.json: could not be read'):
        newest(URL, tmp_path / 'other')
    object_storage.client_of.cache_clear()
