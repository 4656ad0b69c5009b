import fcntl
import os
import random
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
from streaming import Stream

from diffusion.common import files, object_storage, storage
from diffusion.common.object_storage import GoogleClient, keep_random_state
from diffusion.common.storage import Stat, StorageError, StorageRefusal, fingerprint, open_folder, scratch_for, write


@pytest.fixture(params=['local', 's3'])
def folder(request, tmp_path):
    if request.param == 's3':
        request.getfixturevalue('s3')
        return open_folder('s3://bucket/a/folder/')
    return open_folder(tmp_path / 'folder')


def test_a_folder_does_what_it_says_wherever_it_is(folder, tmp_path):
    assert folder.files() == {}
    with pytest.raises(FileNotFoundError, match='nothing'):
        folder.read('nothing')
    write(folder, 'b/two', b'22')
    write(folder, 'one', b'1')
    write(folder, 'one', b'one')  # replaced
    write(folder, 'other/.hidden/x', b'')
    write(folder, 'b2/three', b'333')
    assert {name: stat.num_bytes for name, stat in folder.files().items()} == {'b/two': 2, 'b2/three': 3, 'one': 3}
    assert list(folder.files()) == sorted(folder.files())
    assert list(folder.files('b')) == ['b/two']  # and not b2
    assert folder.read('one') == b'one'
    assert folder.fetch('b/two', tmp_path).read_bytes() == b'22'
    with pytest.raises(FileNotFoundError):
        folder.fetch('b/none', tmp_path)
    folder.delete('one')
    folder.delete('one')  # gone already
    assert 'one' not in folder.files()


def test_a_swap_replaces_what_it_knows_and_nothing_else(folder, tmp_path):
    assert folder.swap('in/owner', None, b'first')
    assert not folder.swap('in/owner', None, b'second')  # there is one already
    assert folder.read('in/owner') == b'first'
    assert folder.swap('in/owner', b'first', b'second')
    assert not folder.swap('in/owner', b'first', b'third')  # it changed
    assert folder.swap('in/owner', b'first', b'second')  # holds it already: the answer to an earlier request may have been lost
    assert folder.read('in/owner') == b'second'
    assert not folder.swap('other', b'something', b'new')  # there is none
    assert list(folder.files()) == ['in/owner']
    assert not list((tmp_path / 'folder').rglob('.*'))  # no lock files


def test_of_many_that_swap_at_once_one_succeeds(folder):
    for old in (None, b'0'):
        if old is not None:
            write(folder, 'owner', old)
        start = threading.Barrier(8)

        def attempt(number, old=old, start=start):
            start.wait()
            return number if folder.swap('owner', old, b'writer %d' % number) else None

        with ThreadPoolExecutor(8) as pool:
            winners = [number for number in pool.map(attempt, range(8)) if number is not None]
        assert len(winners) == 1
        assert folder.read('owner') == b'writer %d' % winners[0]
        folder.delete('owner')


def test_a_swap_whose_answer_is_lost_succeeds(s3):
    folder, lost = open_folder('s3://bucket/lost'), []

    def lose(method, path):
        return 'lose' if method == 'PUT' and not lost and not lost.append(path) else False

    s3.proxy.fails = lose
    assert folder.swap('owner', None, b'mine')
    assert lost
    assert folder.read('owner') == b'mine'


@pytest.mark.parametrize('status', [200, 501])
def test_a_store_without_conditional_writes_is_named(s3, status, capsys):
    object_storage.client_of.cache_clear()
    folder = open_folder('s3://bucket/simple')
    s3.proxy.ignores_conditions = status == 200
    s3.proxy.fails = lambda method, path: 501 if status == 501 and method == 'PUT' and s3.proxy.conditional else False
    try:
        assert folder.swap('owner', None, b'first')
        assert folder.swap('owner', b'first', b'second')
        assert not folder.swap('owner', b'first', b'third')  # read before it is written
    finally:
        s3.proxy.ignores_conditions = False
        object_storage.client_of.cache_clear()
    assert folder.read('owner') == b'second'
    assert capsys.readouterr().err.count('s3://bucket: no conditional writes here') == 1


def test_a_fingerprint_changes_with_the_files(folder):
    def now():
        return fingerprint(folder, folder.files())

    write(folder, 'one', b'a' * 200_000)
    write(folder, 'two', b'b')
    before = now()
    assert now() == before
    for changed in (b'a' * 100_000 + b'c' + b'a' * 99_999, b'a' * 200_001):  # in the middle; by its size
        write(folder, 'one', changed)
        assert now() != before
        before = now()
    assert fingerprint(folder, folder.files(), detail='captions') != before
    write(folder, 'three', b'')
    assert now() != before


def test_what_a_killed_process_left_is_swept_and_what_a_living_one_uses_is_not(tmp_path):
    program = 'import sys, time\nfrom diffusion.common.storage import *\nwith scratch_for(open_folder(sys.argv[1])) as s:\n  print(s, flush=True)\n  time.sleep(60)'
    with subprocess.Popen([sys.executable, '-c', program, str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        left = process.stdout.readline().strip()
        with scratch_for(open_folder(tmp_path)) as mine:
            assert {path.name for path in tmp_path.glob('.scratch-*/')} == {mine.name, left.rpartition('/')[2]}
        process.kill()
    (tmp_path / f'{files.SCRATCH_PREFIX}half-removed').mkdir()  # killed while it removed the folder: the lock went first
    (tmp_path / f'{files.NEW_PREFIX}{process.pid}-x').mkdir()  # killed before it could lock it
    (tmp_path / f'{files.NEW_PREFIX}{os.getpid()}-x').mkdir()  # just being made
    storage._sweep_once.cache_clear()  # as in a new process
    with scratch_for(open_folder(tmp_path)) as mine:
        assert [path.name for path in tmp_path.glob('.scratch-*/')] == [mine.name]
    assert [path.name for path in tmp_path.iterdir()] == [f'{files.NEW_PREFIX}{os.getpid()}-x']


@pytest.mark.parametrize(
    'page', [b'<html><body>Sign in</body></html>', b'<!DOCTYPE html><html><br>Sign in', b'{"message": "Sign in"}', b'Sign in', b'']
)
def test_a_server_that_is_no_storage_is_no_empty_folder(page, s3, tmp_path):
    folder = open_folder('s3://bucket/pages')
    (tmp_path / 'file').write_bytes(b'1')
    folder.copy(tmp_path / 'file', 'there')
    s3.proxy.fails = lambda method, path: page
    requests = {
        'list': folder.files,
        'read': lambda: folder.read('there'),
        'put': lambda: folder.copy(tmp_path / 'file', 'new'),
        'swap': lambda: folder.swap('new', None, b'2'),
    }
    for name, request in requests.items():
        with pytest.raises(StorageError) as caught:
            request()
        assert 's3://bucket/pages' in str(caught.value), name
        if name in ('list', 'put'):
            assert 'S3_ENDPOINT_URL' in str(caught.value)
            assert page.decode()[:20] in str(caught.value)
    s3.proxy.fails = lambda method, path: False
    assert list(folder.files()) == ['there']


@pytest.mark.parametrize('where', ['s3://bucket/x?versionId=1', 's3://bucket/x#y', 'gs://bucket/a?b/c', 'oci://bucket@space/x#'])
def test_a_url_means_all_of_itself(where):
    """Streaming's and our own clients would pass over a query or a fragment, and read or write another object than the one named."""
    with pytest.raises(StorageRefusal, match=r'(\?|#).* leave it out'):
        open_folder(where)


def test_keys_may_be_longer_than_names_of_files(s3, tmp_path):
    folder, name = open_folder('s3://bucket/long'), f'{"é" * 400}.mds'  # 800 bytes, the limit of S3 is 1,024
    write(folder, name, b'content')
    assert folder.files().keys() == {name}
    assert folder.read(name) == b'content'
    assert folder.fetch(name, tmp_path).suffix == '.mds'


def test_urls_that_lead_nowhere_are_refused():
    for where, message in (('ftp://x/y', 'ftp:// is not known; use a local path or s3://, gs://, oci://'), ('s3://', 'names no bucket')):
        with pytest.raises(StorageError, match=message):
            open_folder(where)


@pytest.mark.parametrize('where', ['s3:/bucket/x', 'gs:bucket/x', 's3:///bucket/x', Path('s3://bucket/x')])
def test_a_url_without_its_slashes_is_no_folder(where, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StorageRefusal, match=r'neither a URL nor a folder; did you mean (s3|gs)://bucket/x\?'):
        open_folder(where)


def test_a_link_to_itself_is_an_empty_folder(tmp_path):
    (tmp_path / 'x').symlink_to(tmp_path / 'x')
    assert open_folder(tmp_path / 'x').files() == {}


def test_a_missing_bucket_is_said_with_its_name(s3):
    with pytest.raises(StorageError, match='s3://nobucket/x: could not be listed: .*NoSuchBucket'):
        open_folder('s3://nobucket/x').files()


def failing(times, *methods):
    """Fails the first requests for each object by each of these methods."""
    seen = {}

    def fails(method, path):
        if method not in methods:
            return False
        seen[method, path] = seen.get((method, path), 0) + 1
        return seen[method, path] <= times

    return fails


def test_requests_that_fail_three_times_are_made_a_fourth(s3, tmp_path):
    s3.proxy.fails = failing(3, 'PUT', 'GET', 'HEAD')
    folder = open_folder('s3://bucket/retry')
    write(folder, 'x', b'content')
    assert folder.read('x') == b'content'
    assert folder.files()['x'].num_bytes == 7
    assert s3.proxy.num_failures >= 9


def test_retries_leave_the_random_state_alone(s3, tmp_path):
    """Checkpoints hold it, and a run that storage disturbed ends as one that it did not."""
    before = random.getstate()
    s3.proxy.fails = failing(2, 'PUT', 'GET', 'HEAD')
    folder = open_folder('s3://bucket/retry')
    write(folder, 'x', b'content')
    assert folder.read('x') == b'content'
    downloader = Stream(remote='s3://bucket/retry', local=str(tmp_path))._downloader  # Streaming has clients of its own
    keep_random_state('s3')
    s3.proxy.fails = failing(1, 'GET', 'HEAD')
    downloader.download('s3://bucket/retry/x', str(tmp_path / 'x'), 60)
    assert s3.proxy.num_failures >= 5
    assert random.getstate() == before


def test_a_refusal_is_known_through_what_the_client_makes_of_it(s3, tmp_path):
    (tmp_path / 'x').write_bytes(b'content')
    s3.proxy.fails = lambda method, path: 403 if method == 'PUT' else False
    with pytest.raises(StorageRefusal, match='could not be written: .*; check the credentials') as refused:
        open_folder('s3://bucket/refused').copy(tmp_path / 'x', 'x')
    assert s3.proxy.num_failures == 1
    assert 'AccessDenied' in str(refused.value)


def test_a_server_that_is_busy_for_a_while_is_waited_for(s3):
    again = time.monotonic() + 3
    s3.proxy.fails = lambda method, path: time.monotonic() < again
    write(open_folder('s3://bucket/busy'), 'x', b'content')
    assert time.monotonic() > again
    assert s3.client().get_object(Bucket='bucket', Key='busy/x')['Body'].read() == b'content'


def test_a_connection_cut_in_the_middle_loses_nothing(s3, tmp_path):
    folder = open_folder('s3://bucket/cut')
    content = bytes(range(256)) * 4000
    write(folder, 'x', content)
    seen = []
    s3.proxy.fails = lambda method, path: 'cut' if method == 'GET' and not seen.append(path) and len(seen) <= 2 else False
    assert folder.read('x') == content
    assert s3.proxy.num_failures == 2


def test_a_server_that_stays_away_is_an_error_that_says_so(s3, monkeypatch):
    monkeypatch.setattr(object_storage, 'ATTEMPTS', 2)
    object_storage.client_of.cache_clear()
    s3.proxy.fails = lambda method, path: True
    start = time.monotonic()
    with pytest.raises(StorageError, match='nothing is lost, run the same command again'):
        open_folder('s3://bucket/away').read('x')
    assert time.monotonic() - start < 60
    object_storage.client_of.cache_clear()


def test_locks_go_with_their_process(tmp_path):
    with scratch_for(open_folder(tmp_path)) as scratch, (scratch / '.lock').open() as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


# Google and Oracle have no server to run here: their own client classes, with every call checked against its signature, stand in.


def test_googles_client_is_called_as_it_wants_to_be(tmp_path, monkeypatch):
    google = pytest.importorskip('google.cloud.storage')
    from google.api_core.exceptions import NotFound, PreconditionFailed

    bucket = mock.create_autospec(google.Bucket, instance=True)
    blob = mock.create_autospec(google.Blob, instance=True)
    bucket.blob.return_value = blob
    monkeypatch.setattr(google, 'Client', lambda: SimpleNamespace(bucket=lambda name: bucket))
    monkeypatch.setitem(object_storage.CLIENTS, 'gs', GoogleClient)
    object_storage.client_of.cache_clear()
    folder = open_folder('gs://bucket/p')
    bucket.list_blobs.return_value = [SimpleNamespace(name='p/x', size=3, etag='e')]
    assert folder.files() == {'x': Stat(3, 'e')}
    assert bucket.list_blobs.call_args.kwargs['prefix'] == 'p/'
    (tmp_path / 'f').touch()
    folder.copy(tmp_path / 'f', 'x')
    assert blob.upload_from_filename.call_args.args == (str(tmp_path / 'f'),)
    blob.download_to_filename.side_effect = lambda path, **_: Path(path).write_bytes(b'content')
    assert folder.fetch('x', tmp_path).read_bytes() == b'content'
    blob.generation = 7
    for old, generation in ((None, 0), (b'content', 7)):
        blob.reload.side_effect = NotFound('x') if old is None else None
        blob.download_as_bytes.side_effect = [PreconditionFailed('replaced since'), b'content']
        assert folder.swap('x', old, b'new')
        assert blob.upload_from_string.call_args.args == (b'new',)
        assert blob.upload_from_string.call_args.kwargs['if_generation_match'] == generation
    blob.download_as_bytes.side_effect = [b'content', b'changed']
    blob.upload_from_string.side_effect = PreconditionFailed('x')
    assert not folder.swap('x', b'content', b'new')
    blob.download_to_filename.side_effect = blob.delete.side_effect = blob.reload.side_effect = NotFound('x')
    folder.delete('x')
    with pytest.raises(FileNotFoundError):
        folder.read('x')
    blob.upload_from_string.side_effect = blob.upload_from_filename.side_effect = NotFound('no such bucket')
    for write_there in (lambda: folder.swap('x', None, b'new'), lambda: folder.copy(tmp_path / 'f', 'x')):
        with pytest.raises(StorageError, match='no such bucket'):
            write_there()
    object_storage.client_of.cache_clear()


def test_googles_keys_go_through_its_s3_interface(monkeypatch):
    monkeypatch.setenv('GCS_KEY', 'key')
    monkeypatch.setenv('GCS_SECRET', 'secret')
    monkeypatch.setenv('S3_ENDPOINT_URL', 'http://127.0.0.1:1')  # of another storage
    client = object_storage._google('bucket')
    assert client.s3.meta.endpoint_url == 'https://storage.googleapis.com'
    assert client.s3.meta.config.request_checksum_calculation == 'when_required'


def test_oracles_client_is_called_as_it_wants_to_be(tmp_path, monkeypatch):
    oci = pytest.importorskip('oci')
    real = mock.create_autospec(oci.object_storage.ObjectStorageClient, instance=True)
    monkeypatch.setattr(oci.config, 'from_file', dict)
    monkeypatch.setattr(oci.object_storage, 'ObjectStorageClient', lambda config, retry_strategy: real)
    object_storage.client_of.cache_clear()
    folder = open_folder('oci://bucket@space/')
    where = {'namespace_name': 'space', 'bucket_name': 'bucket'}
    pages = [
        SimpleNamespace(objects=[SimpleNamespace(name=name, size=1, etag='e')], next_start_with=after) for name, after in (('a', 'b'), ('b', None))
    ]
    real.list_objects.side_effect = [SimpleNamespace(data=page) for page in pages]
    assert list(folder.files()) == ['a', 'b']
    assert real.list_objects.call_args.kwargs['start'] == 'b'

    def answer(length):
        return SimpleNamespace(
            data=SimpleNamespace(raw=SimpleNamespace(stream=lambda *_, **__: [b'con', b'tent'])), headers={'content-length': str(length)}
        )

    real.get_object.return_value = answer(7)
    assert folder.read('x') == b'content'
    real.get_object.return_value = answer(9)
    with pytest.raises(StorageError, match='cut'):
        folder.read('x')
    gone = oci.exceptions.ServiceError(404, 'ObjectNotFound', {}, 'gone')
    there = SimpleNamespace(data=SimpleNamespace(content=b'content'), headers={'etag': 'e'})
    for old, found, condition in ((None, gone, {'if_none_match': '*'}), (b'content', there, {'if_match': 'e'})):
        real.get_object.side_effect = [found]
        assert folder.swap('x', old, b'new')
        assert real.put_object.call_args.kwargs == {**where, 'object_name': 'x', 'put_object_body': b'new', **condition}
    real.get_object.side_effect = [gone, there]
    real.put_object.side_effect = oci.exceptions.ServiceError(412, 'IfNoneMatchFailed', {}, 'there')
    assert not folder.swap('x', None, b'new')
    real.get_object.side_effect = real.delete_object.side_effect = gone
    folder.delete('x')
    with pytest.raises(FileNotFoundError):
        folder.read('x')
    real.get_object.side_effect = oci.exceptions.ServiceError(404, 'BucketNotFound', {}, 'no bucket')
    with pytest.raises(StorageRefusal, match='no bucket'):
        folder.read('x')
    object_storage.client_of.cache_clear()


def test_a_refusal_by_a_disk_has_a_remedy_for_disks(tmp_path, monkeypatch):
    folder = open_folder(tmp_path)
    (tmp_path / 'in').mkdir()
    (tmp_path / 'in/a').touch()

    def refuse(path, *_, **__):
        raise PermissionError(13, 'Permission denied', str(path))

    for owner, name, ask in (
        (Path, 'read_bytes', lambda: folder.read('in/a')),
        (Path, 'exists', lambda: folder.fetch('in/a', tmp_path)),
        (os, 'scandir', folder.files),
        (Path, 'mkdir', lambda: write(folder, 'a', b'')),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, refuse)
            with pytest.raises(
                StorageRefusal, match='could not be .*Permission denied.*; ask the owner of that file or folder for access'
            ) as refused:
                ask()
        assert 'bucket' not in str(refused.value)
