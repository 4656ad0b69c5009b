"""An epoch is exact, or an error says why: with 0, 1 and 2 loader processes. A twin of each shows what Streaming alone does."""

import errno
import os
import random
import re
import shutil
import signal
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from diffusion.contracts.errors import DataError, DataUnavailable
from diffusion.datasets.verified import VerifiedStream
from tests.conftest import run_python
from tests.datasets.streams import NUM_SAMPLES, contents, cut, edit_index, flip, ours, rows, shard, stock, use_tmpdir, write_data
from tests.faults.children import CONTEXT
from tests.faults.driver import Process, upstream_mended_it

WORKERS = pytest.mark.parametrize('workers', [0, 1, 2])
SILENT = 3  # exit code
TWIN_SEC = 8  # after which a twin counts as hung


@pytest.fixture(scope='module')
def pristine(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp('pristine') / 'data')


@pytest.fixture
def remote(pristine, tmp_path):
    shutil.copytree(pristine, tmp_path / 'remote')
    return tmp_path / 'remote'


@pytest.fixture(scope='module')
def expected(pristine):
    return contents(ours(None, pristine))


def error_of(loader):
    begun = time.monotonic()
    with pytest.raises((DataError, DataUnavailable)) as caught:
        contents(loader)
    assert time.monotonic() - begun < 40
    return caught.value


def is_loud(remote: Path, local: Path, workers: int) -> bool:
    """Whether Streaming alone says that something is wrong, rather than to give less, or to hang."""
    child = CONTEXT.Process(target=stock_epoch, args=(remote, local, workers, local.parent))
    child.start()
    child.join(TWIN_SEC)
    hangs = child.is_alive()
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.join()
    return not hangs and child.exitcode not in (0, SILENT)


def stock_epoch(remote: Path, local: Path, workers: int, tmpdir: Path) -> None:
    os.setsid()
    use_tmpdir(tmpdir)
    num_samples = len(contents(stock(remote, local, workers=workers)))
    os._exit(SILENT if num_samples < NUM_SAMPLES else 0)


@WORKERS
def test_healthy_epochs_are_exact(remote, expected, tmp_path, workers):
    loader = ours(remote, tmp_path / 'cache', workers=workers)
    for _ in range(2):
        assert contents(loader) == expected
    assert len(expected) == NUM_SAMPLES


@WORKERS
@pytest.mark.parametrize('damage', [flip, cut, os.remove], ids=['flipped', 'cut', 'missing'])
def test_a_bad_remote_shard_is_named(remote, tmp_path, workers, damage):
    bad = shard(remote)
    damage(bad)
    error = error_of(ours(remote, tmp_path / 'cache', workers=workers))
    assert type(error) is DataError
    assert str(error).startswith(f'stream numbers: {bad}')
    assert f'python -m data_prep.audit {remote}' in str(error)
    if damage is flip:
        hashes = re.findall('[0-9a-f]{64}', str(error))
        assert len(set(hashes)) == 2
    assert not (tmp_path / f'cache/{bad.name}').exists()


@pytest.mark.long
def test_twin_streaming_ends_the_epoch_early_or_hangs(remote, tmp_path):
    shard(remote).unlink()
    if is_loud(remote, tmp_path / 'cache', 0):
        upstream_mended_it()


@pytest.mark.parametrize('workers', [1, pytest.param(2, marks=pytest.mark.long)])
def test_twin_streaming_ends_the_epoch_early_or_hangs_with_loader_processes(remote, tmp_path, workers):
    flip(shard(remote))
    if is_loud(remote, tmp_path / 'cache', workers):
        upstream_mended_it()


@WORKERS
@pytest.mark.parametrize('damage', [flip, cut, os.remove], ids=['flipped', 'cut', 'missing'])
def test_a_bad_shard_in_the_cache_is_fetched_again(remote, expected, tmp_path, workers, damage, capfd):
    cache = tmp_path / 'cache'
    contents(ours(remote, cache))
    damage(shard(cache))
    assert contents(ours(remote, cache, workers=workers)) == expected
    assert shard(cache).read_bytes() == shard(remote).read_bytes()
    if damage is not os.remove:
        assert 'fetched again' in capfd.readouterr().err


def test_twin_streaming_serves_a_bad_shard_of_its_cache(remote, expected, tmp_path):
    contents(stock(remote, tmp_path / 'cache'))
    flip(shard(tmp_path / 'cache'))
    if contents(stock(remote, tmp_path / 'cache')) == expected:
        upstream_mended_it()


def test_each_cached_shard_is_hashed_once_and_downloads_while_they_come(remote, tmp_path, monkeypatch):
    from diffusion.datasets import verified

    hashed = []
    monkeypatch.setattr(verified, 'get_hash', lambda algorithm, data, get=verified.get_hash: hashed.append(len(data)) or get(algorithm, data))
    for _ in range(2):  # at first they are downloaded, then they are in the cache
        loader = ours(remote, tmp_path / 'cache')
        contents(loader)
        contents(loader)
        assert len(hashed) == 8
        hashed.clear()
    contents(ours(remote, tmp_path / 'cache', verify='size'))
    assert not hashed


def test_a_retry_leaves_the_random_state_alone(remote, tmp_path, monkeypatch):
    """In this process, without loader processes, it is what a checkpoint holds."""
    from diffusion.datasets import verified

    pauses, attempts = [], []

    def download(url, path, timeout):
        attempts.append(url)
        if len(attempts) < 4:
            raise TimeoutError

    monkeypatch.setattr(verified, 'time', SimpleNamespace(monotonic=time.monotonic, sleep=pauses.append))
    stream = VerifiedStream(name='a', index=b'', verify='hash', patience_sec=60, remote=str(remote), local=str(tmp_path / 'cache'))
    stream.download_timeout = 60
    stream._downloader = SimpleNamespace(download=download, clean_up=lambda: None)
    before = random.getstate()
    stream._download('x', tmp_path / 'x')
    assert len(set(pauses)) == 3  # with jitter
    assert random.getstate() == before


@pytest.mark.parametrize('verify', ['hash', 'size'])
def test_a_cache_of_other_data_is_not_trusted(remote, tmp_path, verify, capsys):
    """The same names and sizes, as when latents are made anew."""
    cache = tmp_path / 'cache'
    contents(ours(remote, cache, verify=verify))
    shutil.rmtree(remote)
    write_data(remote, seed=1)
    fresh = contents(ours(None, remote))
    assert contents(ours(remote, cache, verify=verify)) == fresh
    assert '8 shards' in capsys.readouterr().err
    assert contents(ours(remote, cache, verify=verify)) == fresh
    (cache / 'index.json').unlink()
    assert contents(ours(remote, cache, verify=verify)) == fresh


def test_twin_streaming_trusts_a_cache_of_other_data(remote, tmp_path):
    contents(stock(remote, tmp_path / 'cache'))
    shutil.rmtree(remote)
    write_data(remote, seed=1)
    if contents(stock(remote, tmp_path / 'cache')) == contents(ours(None, remote)):
        upstream_mended_it()


@pytest.mark.parametrize('damage', [flip, cut, os.remove], ids=['flipped', 'cut', 'missing'])
def test_the_only_copy_is_named_and_never_removed(remote, damage):
    damage(shard(remote))
    before = {path: path.read_bytes() for path in remote.iterdir()}
    with pytest.raises(DataError, match=rf'stream numbers: {shard(remote)}: (has|is missing).*only copy'):
        contents(ours(None, remote))
    with pytest.raises(DataError, match='only copy'):
        contents(ours(remote, remote))  # a cache that is its own remote
    assert {path: path.read_bytes() for path in remote.iterdir()} == before


@pytest.mark.parametrize('basename', ['../evil.mds', '/tmp/evil.mds', 'a/../../evil.mds', 'out/evil.mds', ''])
def test_a_hostile_index_writes_nowhere_else(remote, tmp_path, basename):
    (tmp_path / 'cache').mkdir()
    (tmp_path / 'outside').mkdir()
    (tmp_path / 'cache/out').symlink_to(tmp_path / 'outside')
    shutil.copy(shard(remote, 0), tmp_path / 'evil.mds')
    before = sorted(tmp_path.rglob('*.mds'))
    edit_index(remote, lambda index: index['shards'][0]['raw_data'].update(basename=basename))
    with pytest.raises(DataError, match='lies outside of the dataset'):
        ours(remote, tmp_path / 'cache')
    assert sorted(tmp_path.rglob('*.mds')) == before


def test_twin_streaming_follows_a_hostile_index(remote, tmp_path):
    (tmp_path / 'deep').mkdir()
    (tmp_path / 'deep/data').symlink_to(remote)
    shutil.move(shard(remote, 0), tmp_path / 'evil.mds')
    edit_index(remote, lambda index: index['shards'][0]['raw_data'].update(basename='../evil.mds'))
    contents(stock(remote, tmp_path / 'a/cache'))
    if not (tmp_path / 'a/evil.mds').exists():
        upstream_mended_it()


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        (lambda index: index['shards'][0]['raw_data'].update(hashes={}), 'has no sha256 of shard shard.00000.mds'),
        (lambda index: index.update(version=1), 'version 1, not 2'),
        (lambda index: index['shards'][0].pop('raw_data'), 'not an index'),
        (lambda index: index['shards'][0].update(column_encodings=['int', 'pkl']), 'not an index of shards that can be trusted.*pkl'),
        (lambda index: index['shards'][0].update(compression='zstd', zip_data=index['shards'][0]['raw_data']), 'only plain MDS is read'),
    ],
)
def test_an_index_that_cannot_be_trusted_is_refused(remote, tmp_path, change, message):
    edit_index(remote, change)
    with pytest.raises(DataError, match=message):
        ours(remote, tmp_path / 'cache')


def test_twin_streaming_gives_nothing_without_hashes(tmp_path):
    write_data(tmp_path / 'data', hashes=[])
    if is_loud(tmp_path / 'data', tmp_path / 'cache', 0):
        upstream_mended_it()


@WORKERS
def test_a_full_disk_is_said(remote, tmp_path, workers, monkeypatch):
    monkeypatch.setenv('DIFFUSION_FAILPOINT', ','.join(f'data.fetch@{number}:enospc' for number in range(2, 50)))
    monkeypatch.setattr('diffusion.common.processes._passed', Counter())
    error = error_of(ours(remote, tmp_path / 'cache', workers=workers))
    assert type(error) is DataUnavailable
    assert os.strerror(errno.ENOSPC) in str(error)
    assert 'data.cache_limit' in str(error)


def test_a_transient_error_is_outlived(remote, expected, tmp_path, monkeypatch):
    monkeypatch.setenv('DIFFUSION_FAILPOINT', 'data.fetch@2:crash')
    monkeypatch.setattr('diffusion.common.processes._passed', Counter())
    assert contents(ours(remote, tmp_path / 'cache', timeout_sec=12)) == expected


def test_a_limited_cache_stays_within_its_limit(remote, expected, tmp_path):
    limit = 5 * shard(remote).stat().st_size
    loader = ours(remote, tmp_path / 'cache', workers=2, cache_limit=limit)
    for _ in range(2):
        assert contents(loader) == expected
        assert sum(path.stat().st_size for path in (tmp_path / 'cache').iterdir()) <= limit
    again = ours(remote, tmp_path / 'cache', cache_limit=limit)
    assert contents(again) == expected


def test_a_hung_process_is_an_error_in_time(remote, tmp_path):
    loader = ours(remote, tmp_path / 'cache', workers=2, timeout_sec=3)
    loader.dataset.timeout_sec = 60  # or, on a busy machine, the worker that waits for the stopped one's shard would be first to say so
    samples = rows(loader)
    next(samples)
    os.kill(loader._iterator._workers[0].pid, signal.SIGSTOP)
    workers = list(loader._iterator._workers)
    with pytest.raises(DataUnavailable, match='timed out after 3 seconds'):
        list(samples)
    deadline = time.monotonic() + 30
    while any(worker.is_alive() for worker in workers):
        assert time.monotonic() < deadline


ENDS_WHILE_FETCHING_AHEAD = """
import os, sys, threading, time
from pathlib import Path
from diffusion.datasets.verified import VerifiedStream
from tests.datasets.streams import ours, rows

fetching, prepare_shard = threading.Event(), VerifiedStream.prepare_shard

def slowly(stream, shard):
    os.write(1, b'begun\\n')  # one write: print makes two, and lines of two threads mix
    fetching.set()
    time.sleep(0.5)
    found = prepare_shard(stream, shard)
    fetching.clear()
    os.write(1, b'ended\\n')
    return found

VerifiedStream.prepare_shard = slowly
samples = rows(ours(sys.argv[1], Path(sys.argv[2])))
next(samples)
fetching.wait()
"""


def test_the_end_of_a_process_waits_for_what_is_fetched_ahead(remote, tmp_path):
    """Streaming unmaps at exit the shared memory that the fetching thread writes to when it has the shard."""
    words = run_python('-c', ENDS_WHILE_FETCHING_AHEAD, remote, tmp_path / 'cache').stdout.split()
    assert words[-1] == 'ended'
    assert words.count('begun') == words.count('ended') >= 2


def test_a_killed_process_is_an_error_at_once(remote, tmp_path):
    loader = ours(remote, tmp_path / 'cache', workers=2, timeout_sec=60)
    samples = rows(loader)
    next(samples)
    begun = time.monotonic()
    with pytest.raises(DataUnavailable, match='DataLoader worker .*lower data.workers'):  # noqa: PT012
        os.kill(loader._iterator._workers[0].pid, signal.SIGKILL)  # torch raises wherever this process is when it hears of it
        list(samples)
    assert time.monotonic() - begun < 30


@pytest.mark.parametrize('workers', [pytest.param(0, marks=pytest.mark.long), pytest.param(1, marks=pytest.mark.long), 2])
def test_after_an_error_the_process_ends(remote, tmp_path, workers):
    shard(remote).unlink()
    with Process(['-m', 'tests.datasets.streams', 'ours', remote, tmp_path / 'cache', workers]) as process:
        output = process.wait(1)
    assert 'does not exist, although index.json names it' in output
    assert time.monotonic() - float(re.search('over: (.*)', output)[1]) < 10


def test_between_epochs_the_state_names_the_coming_one(remote, tmp_path):
    dataset = ours(remote, tmp_path / 'cache')
    assert dataset.dataset.state_dict(0, True)['epoch'] == 0
    contents(dataset)
    assert dataset.dataset.state_dict(0, True)['epoch'] == 1
    again = ours(remote, tmp_path / 'other')
    again.dataset.load_state_dict(dataset.dataset.state_dict(0, True))
    assert again.dataset.state_dict(0, True)['epoch'] == 1
    second = [row['number'] for row in rows(dataset)]
    assert [row['number'] for row in rows(again)] == second


def test_twin_streaming_names_the_finished_epoch(remote, tmp_path):
    loader = stock(remote, tmp_path / 'cache')
    contents(loader)
    if loader.dataset.state_dict(0, True)['epoch'] == 1:
        upstream_mended_it()
