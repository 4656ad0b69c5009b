"""Killed runs leave nothing for long, and living ones are left alone."""

import json
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from streaming.base.util import clean_stale_shared_memory

from diffusion.datasets import leftovers
from diffusion.datasets.leftovers import SHARED_MEMORY, Leftovers
from tests.datasets.streams import contents, ours, rows, stock, use_tmpdir, write_data
from tests.faults.children import CONTEXT
from tests.faults.driver import upstream_mended_it

pytestmark = pytest.mark.skipif(not SHARED_MEMORY.exists(), reason='shared memory is a folder on Linux only')


@pytest.fixture
def data(tmp_path, monkeypatch):
    monkeypatch.setattr(leftovers.tempfile, 'tempdir', str(tmp_path / 'tmp'))
    (tmp_path / 'tmp').mkdir()
    return write_data(tmp_path / 'data')


def live(data: Path, folder: Path, workers: int, tmpdir: Path, make: Callable, ready: Connection) -> None:
    """A run that has begun an epoch and waits there."""
    os.setsid()
    use_tmpdir(tmpdir)
    Leftovers(folder).remove()
    loader = make(data, folder / 'cache', workers=workers)
    number = loader.dataset._shm_prefix_int
    Leftovers(folder).note([number])
    samples = rows(loader)
    next(samples)
    ready.send(number)
    time.sleep(60)


class Run:
    """That in a process group of its own, killed at the end of the block."""

    def __init__(self, data: Path, folder: Path, workers: int = 0, tmpdir: Path | None = None, make: Callable = ours):
        self.number: int | None = None
        self.ready, theirs = CONTEXT.Pipe()
        self.process = CONTEXT.Process(
            target=live, args=(data, folder, workers, tmpdir or Path(leftovers.tempfile.gettempdir()), make, theirs), daemon=False
        )
        self.process.start()

    def __enter__(self):
        if not self.ready.poll(30):
            self.__exit__()
            raise AssertionError('it did not begin')
        self.number = self.ready.recv()
        self.made = self._now()
        return self

    def segments(self) -> list[Path]:
        """Those that it made and that are still there: once they are gone, a test beside this one may take its number."""
        return [path for path, inode in self.made if path.exists() and path.stat().st_ino == inode]

    def __exit__(self, *_):
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.join()
        if self.number is not None:
            self.made = self._now()  # with those that came later; as long as they are there, the number is nobody else's

    def _now(self) -> list[tuple[Path, int]]:
        return [(path, path.stat().st_ino) for path in sorted(SHARED_MEMORY.glob(f'{self.number:06}_*'))]


@pytest.mark.parametrize('workers', [0, 2])
def test_a_killed_run_leaves_nothing_to_the_next(data, tmp_path, workers):
    with Run(data, tmp_path / 'run', workers) as run:
        pass
    assert len(run.segments()) >= 6  # or there was nothing to remove
    assert list((tmp_path / 'tmp').glob(f'{run.number:06}_*'))
    assert Leftovers(tmp_path / 'run').remove() >= 8
    assert not run.segments()
    assert not list((tmp_path / 'tmp').glob(f'{run.number:06}_*'))
    assert json.loads(next((tmp_path / 'run').glob('streaming-*.json')).read_text())['noted'] == []
    assert Leftovers(tmp_path / 'run').remove() == 0


def test_only_what_is_dead_and_our_own_is_removed(data, tmp_path, monkeypatch):
    monkeypatch.setattr(leftovers, 'PATIENCE_SEC', 0.1)
    with Run(data, tmp_path / 'living') as living, Run(data, tmp_path / 'mine') as mine:
        with Run(data, tmp_path / 'other') as other:
            pass
        assert len({living.number, mine.number, other.number}) == 3
        assert Leftovers(tmp_path / 'mine').remove() == 0  # it lives, so it stays, and stays noted
        assert len(mine.segments()) >= 6
    assert Leftovers(tmp_path / 'mine').remove() >= 8
    assert not mine.segments()
    assert len(living.segments()) >= 6
    Leftovers(tmp_path / 'living').remove()
    assert len(other.segments()) >= 6
    Leftovers(tmp_path / 'other').remove()
    assert not other.segments()


def test_a_number_that_another_run_has_by_now_is_not_ours(tmp_path, data):
    with Run(data, tmp_path / 'run') as run:
        pass
    first = SHARED_MEMORY / f'{run.number:06}_locals'
    content = first.read_bytes()
    Leftovers(tmp_path / 'run').remove()
    (SHARED_MEMORY / 'placeholder').write_bytes(b'')  # or the inode may be given out again
    first.write_bytes(content)
    try:
        noted = {'boot': leftovers.BOOT_ID.read_text(), 'noted': [{str(first): first.stat().st_ino + 1}]}
        (tmp_path / 'run' / f'streaming-{leftovers.platform.node()}.json').write_text(json.dumps(noted))
        assert Leftovers(tmp_path / 'run').remove() == 0
        assert first.exists()
    finally:
        first.unlink()
        (SHARED_MEMORY / 'placeholder').unlink()


def test_twin_streaming_cleans_away_what_others_use(data, tmp_path):
    """In a process that sees segments of its own alone: `clean_stale_shared_memory` must not be let loose on this host."""
    from unittest.mock import patch

    with Run(data, tmp_path / 'living') as living:
        numbers = [living.number]
        with patch('streaming.base.util.range', lambda _: numbers, create=True):
            clean_stale_shared_memory()
        mended = len(living.segments()) >= 6
    Leftovers(tmp_path / 'living').remove()
    if mended:
        upstream_mended_it()


def test_a_start_with_another_tmpdir_is_not_refused_its_cache(data, tmp_path):
    """As under Slurm, which gives each job its own: Streaming takes the cache for that of a living run."""
    with Run(data, tmp_path / 'run', tmpdir=tmp_path / 'tmp'):
        pass
    (tmp_path / 'other').mkdir()
    with Run(data, tmp_path / 'run', tmpdir=tmp_path / 'other') as second:
        assert second.segments()
    Leftovers(tmp_path / 'run').remove()


def test_twin_streaming_refuses_the_cache_of_a_killed_run(data, tmp_path, monkeypatch):
    with Run(data, tmp_path / 'run', make=stock):
        pass
    monkeypatch.setattr(leftovers.tempfile, 'tempdir', str(tmp_path))
    with suppress(ValueError):  # 'Reused local directory ...'
        contents(stock(data, tmp_path / 'run/cache'))
        upstream_mended_it()
    monkeypatch.setattr(leftovers.tempfile, 'tempdir', str(tmp_path / 'tmp'))
    Leftovers(tmp_path / 'run').remove()


def test_twenty_kills_leave_what_one_leaves(data, tmp_path):
    runs = []
    for _ in range(20):
        with Run(data, tmp_path / 'run') as run:
            runs.append(run)
    Leftovers(tmp_path / 'run').remove()
    assert not [path for run in runs for path in run.segments()]
    assert not [path for path in (tmp_path / 'tmp').iterdir() if path.name[:6].isdigit()]
    assert not list((tmp_path / 'run/cache').glob('.tmp-*'))


def test_many_runs_may_begin_at_once(data, tmp_path):
    runs = [Run(data, tmp_path / f'run{number}') for number in range(4)]
    numbers = []
    for run in runs:
        with run:
            numbers.append(run.number)
    for number in range(4):
        Leftovers(tmp_path / f'run{number}').remove()
    assert len(set(numbers)) == 4


def files_opened_by(data: Path, folders: list[Path]) -> list[int]:
    """By each of several data sets, one after the other and all alive."""
    use_tmpdir(folders[0].parent / 'tmp')
    held, opened = [], []
    for folder in folders:
        before = len(os.listdir('/proc/self/fd'))
        held.append(ours(data, folder))
        opened.append(len(os.listdir('/proc/self/fd')) - before)
    return opened


def test_looking_for_a_number_leaves_nothing_open(data, tmp_path):
    """Streaming keeps a file open for every segment of every number in use: the square of what follows.

    In a process of its own: in one with tests behind it, garbage is collected in between and files close.
    """
    with ProcessPoolExecutor(1, CONTEXT) as alone:
        opened = alone.submit(files_opened_by, data, [tmp_path / str(index) for index in range(4)]).result()
    assert opened[1] == opened[2] == opened[3] > 0
