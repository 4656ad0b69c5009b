"""Killed runs leave nothing for long, and living ones and other programs are left alone."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import pytest
import torch
from composer.utils import dist, get_device
from streaming.base.constant import SHM_TO_CLEAN
from streaming.base.shared import memory
from streaming.base.util import clean_stale_shared_memory

from diffusion.common import belongings
from diffusion.common.belongings import SHARED_MEMORY
from diffusion.datasets import strict
from tests.conftest import REPOSITORY
from tests.datasets.streams import NUM_SAMPLES, contents, ours, rows, stock, use_tmpdir, write_data
from tests.faults.children import CONTEXT, ranks
from tests.faults.driver import Process, train, upstream_mended_it

pytestmark = pytest.mark.skipif(not SHARED_MEMORY.exists(), reason='shared memory is a folder on Linux only')


@pytest.fixture
def data(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, 'tempdir', str(tmp_path / 'tmp'))
    (tmp_path / 'tmp').mkdir()
    return write_data(tmp_path / 'data')


def live(data: Path, folder: Path, workers: int, tmpdir: Path, make: Callable, ready: Connection) -> None:
    """A run that has begun an epoch and waits there."""
    os.setsid()
    use_tmpdir(tmpdir)
    loader = make(data, folder / 'cache', workers=workers)
    samples = rows(loader)
    next(samples)
    ready.send(loader.dataset._shm_prefix_int)
    time.sleep(60)


class Run:
    """That in a process group of its own, killed at the end of the block."""

    def __init__(self, data: Path, folder: Path, workers: int = 0, tmpdir: Path | None = None, make: Callable = ours):
        self.number: int | None = None
        self.ready, theirs = CONTEXT.Pipe()
        self.process = CONTEXT.Process(target=live, args=(data, folder, workers, tmpdir or Path(tempfile.gettempdir()), make, theirs), daemon=False)
        self.process.start()

    def __enter__(self):
        if not self.ready.poll(180):
            self.__exit__()
            raise AssertionError('it did not begin')
        self.number = self.ready.recv()
        return self

    def segments(self) -> list[Path]:
        return sorted(SHARED_MEMORY.glob(f'{self.number:06}_*'))

    def __exit__(self, *_):
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.join()


def removed(run: Run) -> bool:
    """Whether a later process removes what it left: in seconds, as loader processes that are being killed are still processes."""
    deadline = time.monotonic() + 30
    while run.segments() and time.monotonic() < deadline:
        belongings.remove_dead()
        time.sleep(0.05)
    return not run.segments() and not (belongings.entries() / str(run.number)).exists()


@pytest.mark.parametrize('workers', [0, 2])
def test_a_killed_run_leaves_nothing_to_any_later_one(data, tmp_path, workers):
    """Of another run folder and another TMPDIR."""
    with Run(data, tmp_path / 'run', workers, tmpdir=tmp_path) as run:
        assert len(list((belongings.entries() / str(run.number)).glob('*_filelock'))) == 2
    assert len(run.segments()) >= 6  # or there was nothing to remove
    assert removed(run)
    assert not [path for folder in (tmp_path, tmp_path / 'tmp') for path in folder.iterdir() if path.name[:6].isdigit()]


def test_only_what_is_dead_and_our_own_is_removed(data, tmp_path):
    strangers = [SHARED_MEMORY / f'test-{os.getpid()}', SHARED_MEMORY / f'{os.getpid() % 90_000:06}_locals']
    with Run(data, tmp_path / 'living', workers=1) as living:
        for path in strangers:
            path.touch(exist_ok=False)
        try:
            with Run(data, tmp_path / 'dead') as dead:
                assert living.number != dead.number
            assert removed(dead)
            assert len(living.segments()) >= 6
            assert all(path.exists() for path in strangers)
        finally:
            for path in strangers:
                path.unlink()
        os.kill(living.process.pid, signal.SIGKILL)
        living.process.join()
        belongings.remove_dead()
        assert len(living.segments()) >= 6  # its loader process still uses them
    assert removed(living)


def test_entries_that_another_user_could_write_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(belongings, 'SHARED_MEMORY', tmp_path)
    (tmp_path / 'home').mkdir()
    (tmp_path / f'diffusion-{os.getuid()}').symlink_to(tmp_path / 'home')
    with pytest.raises(PermissionError, match='remove it'):
        belongings.remove_dead()


def test_an_orphan_under_any_of_the_names_is_passed_by(data, tmp_path, monkeypatch):
    """Streaming looks for a number that each name has free for itself, and takes their maximum."""
    taken = [*SHM_TO_CLEAN, 'doubted']
    numbers = [900_000 + os.getpid() % 1000 * 20 + index for index in range(len(taken) + 1)]
    orphans = [SHARED_MEMORY / f'{number:06}_{name}' for number, name in zip(numbers, taken, strict=False)]
    draws = iter(numbers)
    monkeypatch.setattr(strict._random, 'choice', lambda _: next(draws))
    for index, orphan in enumerate(orphans):
        orphan.write_bytes(b'x' * (index % 2))
    try:
        loader = ours(data, tmp_path / 'cache')
        assert len(contents(loader)) == NUM_SAMPLES
        assert loader.dataset._shm_prefix_int == numbers[-1]
        assert all(orphan.exists() for orphan in orphans)
        assert not [number for number in numbers[:-1] if (belongings.entries() / str(number)).exists()]
    finally:
        for orphan in orphans:
            orphan.unlink()


@pytest.mark.parametrize('what', ['a lone orphan of another size', 'orphans up to a number in use'])
def test_what_others_left_under_low_numbers_stops_no_start(data, tmp_path, what):
    """Streaming counts from 0; orphans that only our name has made it fail."""
    free = next(number for number in range(100_000) if not list(SHARED_MEMORY.glob(f'{number:06}_*')))
    if what == 'a lone orphan of another size':
        living = [f'{free:06}_{name}' for name in SHM_TO_CLEAN]  # of a job that has not our name
        orphans = [SHARED_MEMORY / name for name in (*living, f'{free + 1:06}_doubted')]
    else:
        names = [f'{number:06}_doubted' for number in range(free + 3)]
        orphans = [SHARED_MEMORY / name for name in (*names, f'{free + 3:06}_locals') if not (SHARED_MEMORY / name).exists()]
    for orphan in orphans:
        orphan.write_bytes(b'\x05\0\0\0' + b'0')
    try:
        assert len(contents(ours(data, tmp_path / 'cache'))) == NUM_SAMPLES
    finally:
        for orphan in orphans:
            orphan.unlink()


def test_streaming_cleans_away_what_it_uses_itself_and_nothing_of_ours(data, tmp_path):
    """In a process that sees the segments of one number alone: `clean_stale_shared_memory` must not be let loose on this host."""
    from unittest.mock import patch

    with Run(data, tmp_path / 'living') as living:
        assert living.number >= 100_000  # Streaming begins at 0 and ends at the first number that is free
        numbers = [living.number]
        with patch('streaming.base.util.range', lambda _: numbers, create=True):
            clean_stale_shared_memory()
        mended = len(living.segments()) >= 6
    belongings.remove_dead()
    if mended:
        upstream_mended_it()


def test_a_start_with_another_tmpdir_is_not_refused_its_cache(data, tmp_path):
    """As under Slurm, which gives each job its own: Streaming takes the cache for that of a living run."""
    with Run(data, tmp_path / 'run', tmpdir=tmp_path / 'tmp') as first:
        pass
    (tmp_path / 'other').mkdir()
    with Run(data, tmp_path / 'run', tmpdir=tmp_path / 'other') as second:
        assert second.segments()
        assert not first.segments()  # it has removed them
    assert removed(second)


def test_twin_streaming_refuses_the_cache_of_a_killed_run(data, tmp_path, monkeypatch):
    with Run(data, tmp_path / 'run', make=stock) as run:
        pass
    left = [*run.segments(), *(tmp_path / 'tmp').glob(f'{run.number:06}_*')]
    monkeypatch.setattr(tempfile, 'tempdir', str(tmp_path))
    try:
        with suppress(ValueError):  # 'Reused local directory ...'
            contents(stock(data, tmp_path / 'run/cache'))
            upstream_mended_it()
    finally:
        for path in left:
            path.unlink(missing_ok=True)


def test_twenty_kills_leave_what_one_leaves(data, tmp_path):
    runs = []
    for _ in range(20):
        with Run(data, tmp_path / 'run') as run:
            runs.append(run)
    belongings.remove_dead()
    assert not [path for run in runs for path in run.segments()]
    assert not [path for path in (tmp_path / 'tmp').iterdir() if path.name[:6].isdigit()]
    assert not list((tmp_path / 'run/cache').glob('.tmp-*'))


def test_kills_with_loader_processes_leave_no_temporary_folders(latents, overrides, tmp_path):
    """A real cold process, whose TMPDIR holds before Composer is imported: its import makes a folder, and each loader process a socket."""
    (tmp_path / 'tmp').mkdir()
    run = [*overrides, 'data.kind=latents', f'data.streams.train.local={latents}', 'data.workers=2', 'train.duration=100000ba']
    with train(run, TMPDIR=str(tmp_path / 'tmp')) as process:
        process.wait_until(lambda: (tmp_path / 'run/log.jsonl').exists())
        (made,) = (tmp_path / 'tmp').iterdir()  # one folder holds them all, or there is nothing to see
        assert made.name.startswith('run-')
        process.signal(signal.SIGKILL)
        process.wait(-signal.SIGKILL)
    later = 'from diffusion.common.belongings import use_own_temporary_folder; use_own_temporary_folder()'
    deadline = time.monotonic() + 30
    while list((tmp_path / 'tmp').iterdir()) and time.monotonic() < deadline:
        subprocess.run([sys.executable, '-c', later], cwd=REPOSITORY, check=True)
    assert list((tmp_path / 'tmp').iterdir()) == []


def test_a_process_removes_its_own_temporary_folder_at_its_end(tmp_path, monkeypatch):
    monkeypatch.delenv('TORCHINDUCTOR_CACHE_DIR', raising=False)  # torch sets it in a process that has compiled something, as another test may have
    script = (
        'import os, tempfile; from diffusion.common.belongings import use_own_temporary_folder; use_own_temporary_folder(); '
        'import multiprocessing.util as u; print(tempfile.mkdtemp(), os.environ["TMPDIR"], u.get_temp_dir(), os.environ["TORCHINDUCTOR_CACHE_DIR"])'
    )
    with Process(['-c', script], TMPDIR=str(tmp_path)) as process:
        made, tmpdir, sockets, kernels = process.wait().split()
    assert made.startswith(f'{tmpdir}/')
    assert tmpdir.startswith(f'{tmp_path}/run-')
    assert sockets.startswith(str(SHARED_MEMORY))  # their names must be short, however long TMPDIR is
    assert os.path.dirname(kernels) == str(tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert not os.path.exists(sockets)


def test_many_runs_may_begin_at_once(data, tmp_path):
    runs = [Run(data, tmp_path / f'run{number}') for number in range(4)]
    numbers = []
    for run in runs:
        with run:
            numbers.append(run.number)
    assert all(removed(run) for run in runs)
    assert len(set(numbers)) == 4


def one_of_two(make: Callable, data: Path, cache: Path, tmpdir: Path) -> str:
    """Start one dataset on two ranks whose barriers do not hold, and whose first rank is slow to make its first segment; the number and the samples."""
    use_tmpdir(tmpdir)
    dist.initialize_dist(get_device('cpu'))
    torch.distributed.barrier = lambda *_, **__: None
    built_in = memory.BuiltinSharedMemory

    def slow(name: str, create: bool, size: int) -> SharedMemory:
        if create and name.endswith('_locals'):
            time.sleep(1)
        return built_in(name, create, size)

    memory.BuiltinSharedMemory = slow
    try:
        loader, answer = make(data, cache), ''
    except Exception as error:
        loader, answer = None, f'{type(error).__name__}: {error}'
    others = dist.all_gather_object(answer)
    if loader is not None:
        answer = f'{loader.dataset._shm_prefix_int} {"" if any(others) else sorted(row["number"] for row in rows(loader))}'
    dist.all_gather_object(answer)  # neither ends before the other
    return answer


def test_ranks_do_not_race_for_a_number(data, tmp_path):
    """What Streaming's PR 966 waits longer for cannot be early: the others hear of a number when its segment is there."""
    first, second = ranks(one_of_two, [[ours, data, tmp_path / 'cache', tmp_path]] * 2, tmp_path)
    (number, numbers), (same, others) = first.split(' ', 1), second.split(' ', 1)
    assert number == same
    assert sorted(json.loads(numbers) + json.loads(others)) == list(range(NUM_SAMPLES))
    belongings.remove_dead()
    assert not list(SHARED_MEMORY.glob(f'{int(number):06}_*'))


def test_twin_streaming_races_for_a_number(data, tmp_path):
    first, second = ranks(one_of_two, [[stock, data, tmp_path / 'cache', tmp_path]] * 2, tmp_path)
    for path in SHARED_MEMORY.glob(f'{int(first.split()[0]):06}_*'):
        path.unlink()
    if 'was not registered by local leader' not in second:
        upstream_mended_it()


def claim(start: float, count: int) -> list[int]:
    """Entries that this process alone made, of names that all processes want."""
    time.sleep(max(0.0, start - time.time()))
    mine = []
    for name in range(count):
        belongings.remove_dead()
        with suppress(FileExistsError):
            belongings.make(f'test-{name}')
            mine.append(name)
    time.sleep(0.5)
    return mine


def test_an_entry_has_one_maker_however_many_clean_up_meanwhile(tmp_path, monkeypatch):
    monkeypatch.setattr(belongings, 'SHARED_MEMORY', tmp_path)
    with ProcessPoolExecutor(4, mp_context=__import__('multiprocessing').get_context('fork')) as pool:
        made = [pool.submit(claim, time.time() + 0.2, 100) for _ in range(4)]
        names = sorted(name for result in made for name in result.result())
    assert names == list(range(100))


def files_opened_by(data: Path, folders: list[Path]) -> list[int]:
    """By each of several datasets, one after the other and all alive."""
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
