"""What Streaming leaves on a host when a run is killed: removed by the next start of that run, and by nobody else.

A StreamingDataset has up to ten segments in /dev/shm and two lock files in TMPDIR, all beginning with a number of its own. After `kill -9` they
stay, and where TMPDIR is another one by then, Streaming takes the cache for that of a living run and refuses it for ever. Its
`clean_stale_shared_memory()` removes those of living runs too. So each run notes its own, by inode, and later removes what nobody uses any more.
"""

from __future__ import annotations

import atexit
import fcntl
import json
import os
import platform
import re
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TextIO

from composer.utils import dist
from streaming.base.constant import BARRIER_FILELOCK, CACHE_FILELOCK, LOCALS, SHM_TO_CLEAN
from streaming.base.shared import SharedMemory, prefix

from diffusion.files import replacing

SHARED_MEMORY = Path('/dev/shm')  # noqa: S108
BOOT_ID = Path('/proc/sys/kernel/random/boot_id')
TURN_SEC = 20
PATIENCE_SEC = 10  # loader processes of a killed run see within five seconds that it is gone


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """Data sets of one user on one host begin one after the other: two that look for a free number at once take the same, and one fails.

    All processes of a job enter together. After TURN_SEC they go on anyway: two jobs on the same two hosts may wait for each other.
    """
    folder = SHARED_MEMORY if SHARED_MEMORY.exists() else Path(tempfile.gettempdir())
    with (folder / f'diffusion-data-{os.getuid()}.lock').open('w') as file:
        if dist.get_local_rank() == 0:
            deadline = time.monotonic() + TURN_SEC
            while not _locked(file) and time.monotonic() < deadline:
                time.sleep(0.05)
        dist.barrier()
        before = prefix.SharedMemory
        prefix.SharedMemory = closed_after_a_look  # type: ignore[misc, assignment]
        try:
            yield
        finally:
            prefix.SharedMemory = before  # type: ignore[misc]


def closed_after_a_look(name: str, create: bool | None = None, size: int = 0) -> SharedMemory:
    """Streaming looks at the segments of every number in use and keeps them open: on a host with many, files run out."""
    return SharedMemory(name, create, size, auto_cleanup=create is not False)


def _locked(file: TextIO) -> bool:
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # other than flock's not inherited by forks, who would keep it when this process is killed
    except OSError:
        return False
    return True


class Leftovers:
    """Of one run on this host. For one process a host (local rank 0); elsewhere than on Linux it does nothing.

    Args:
        run_folder: where it keeps its list.
    """

    def __init__(self, run_folder: Path):
        self.path = run_folder / f'streaming-{platform.node()}.json'

    def remove(self) -> int:
        """Remove the files of earlier processes of this run that no process uses any more; their number.

        What is still in use stays in the list.
        """
        noted = self._read()
        deadline = time.monotonic() + PATIENCE_SEC
        while any(os.getpid() not in users for users in _mapped(noted).values()) and time.monotonic() < deadline:
            time.sleep(0.2)
        used = _mapped(noted)
        dead = [files for files in noted if not used.keys() & files.keys()]
        removed = sum(_unlink(path, inode) for files in dead for path, inode in _with_late_ones(files).items())
        if noted:
            self._write([files for files in noted if files not in dead])
        return removed

    def note(self, numbers: Iterable[int]) -> None:
        """Add the files of the data sets that have these numbers, and remove their lock files when this process exits in peace."""
        noted = self._read()
        for number in numbers:
            files = _files(number)
            noted.append(files)
            atexit.register(partial(_remove_locks, number, files))
        self._write(noted)

    def _read(self) -> list[dict[str, int]]:
        """Inodes by path, a dictionary for each data set; none after a reboot, which empties /dev/shm."""
        try:
            content = json.loads(self.path.read_text())
            return content['noted'] if content['boot'] == BOOT_ID.read_text() else []
        except (OSError, ValueError, KeyError, TypeError):
            return []

    def _write(self, noted: list[dict[str, int]]) -> None:
        if BOOT_ID.exists():
            with replacing(self.path) as temporary:
                temporary.write_text(json.dumps({'boot': BOOT_ID.read_text(), 'noted': noted}))


def _locks(number: int) -> list[Path]:
    return [Path(tempfile.gettempdir()) / f'{number:06}_{name}' for name in (BARRIER_FILELOCK, CACHE_FILELOCK)]


def _files(number: int) -> dict[str, int]:
    """Inodes of what a data set has now. Lock files begin when they are first needed, so they are made here."""
    for path in _locks(number):
        path.touch()
    paths = [SHARED_MEMORY / f'{number:06}_{name}' for name in SHM_TO_CLEAN] + _locks(number)
    return {str(path): path.stat().st_ino for path in paths if path.exists()}


def _with_late_ones(files: dict[str, int]) -> dict[str, int]:
    """And the segments that it made later on: theirs is the number as long as its first segment is."""
    first = next((Path(path) for path in files if path.endswith(f'_{LOCALS}')), None)
    if first is None or _inode(first) != files[str(first)]:
        return files
    number = first.name.partition('_')[0]
    late = [SHARED_MEMORY / f'{number}_{name}' for name in SHM_TO_CLEAN]
    return {**{str(path): path.stat().st_ino for path in late if path.exists()}, **files}


def _mapped(noted: list[dict[str, int]]) -> dict[str, set[int]]:
    """Those of the noted files that are still what was noted and lie in the memory of living processes, with the ids of these."""
    wanted = {
        (path, inode) for files in noted for path, inode in files.items() if path.startswith(str(SHARED_MEMORY)) and _inode(Path(path)) == inode
    }
    found: dict[str, set[int]] = {}
    for maps in Path('/proc').glob('[0-9]*/maps') if wanted else ():
        try:
            lines = re.findall(rf'^\S+ \S+ \S+ \S+ (\d+) +({SHARED_MEMORY}/\S+)$', maps.read_text(), re.MULTILINE)
        except OSError:  # it is gone, or another user's, who cannot use our segments
            continue
        for inode, path in lines:
            if (path, int(inode)) in wanted:
                found.setdefault(path, set()).add(int(maps.parent.name))
    return found


def _inode(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except OSError:
        return None


def _unlink(path: str, inode: int) -> bool:
    """Remove a file if it still is the one that was noted."""
    if _inode(Path(path)) != inode:
        return False
    Path(path).unlink(missing_ok=True)
    return True


def _remove_locks(number: int, files: dict[str, int]) -> None:
    for path in map(str, _locks(number)):
        _unlink(path, files.get(path, -1))
