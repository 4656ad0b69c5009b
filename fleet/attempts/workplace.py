"""Folder of a machine: a part of it for each attempt, and what stays between jobs; requests to stop, and pauses."""

import os
import select
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from diffusion.common.files import keep_private, lock, try_lock
from diffusion.common.object_storage import JITTER
from fleet.attempts.transfers import unpack

GB = 10**9


class WarmFolder:
    """Args:
    folder: on the same disk as the attempts' own folders.
    keep_gb: base models beyond it are deleted, the least recently used first, never one in use.
    """

    def __init__(self, folder: Path, keep_gb: float):
        self.folder, self.keep_gb = folder, keep_gb
        self.bases, self.drawn, self.home = folder / 'bases', folder / 'drawn', folder / 'home'
        for path in (self.bases, self.drawn, self.home):
            path.mkdir(parents=True, exist_ok=True)

    @contextmanager
    def holding(self, sha256: str) -> Iterator[None]:
        """Keep others from deleting a base within the context."""
        with (self.bases / f'{sha256}.lock').open('a') as file:
            lock(file, shared=True)
            yield

    def base(self, sha256: str, num_bytes: int, scratch: Path, fetch: Callable[[Path], None]) -> Path:
        """The unpacked base model; call it while `holding` it.

        Args:
            num_bytes: of its archive.
            scratch: on the same disk.
            fetch: writes the archive to a path.

        Raises:
            whatever `fetch` and `unpack` do.
        """
        target, size = self.bases / sha256, self.bases / f'{sha256}.bytes'
        if not target.exists():
            self._make_room(num_bytes, sha256)
            archive = scratch / 'base.archive'
            fetch(archive)
            with suppress(FileExistsError):
                unpacked = scratch / 'base.unpacked'
                there = unpack(archive, unpacked, scratch, 'base')
                archive.unlink(missing_ok=True)
                size.write_text(f'{there}\n')
                with suppress(OSError):  # another attempt was faster
                    os.rename(unpacked, target)
        with suppress(OSError):
            os.utime(size)
        return target

    def _make_room(self, num_bytes: int, sha256: str) -> None:
        """Delete what was not used for the longest time until there is room for another base."""
        sizes = sorted(self.bases.glob('*.bytes'), key=lambda path: path.stat().st_mtime)
        total = num_bytes + sum(_number(path) for path in sizes)
        for path in sizes:
            if total <= self.keep_gb * GB:
                return
            if path.stem == sha256:
                continue
            with (self.bases / f'{path.stem}.lock').open('a') as file:
                if not try_lock(file):
                    continue  # in use
                total -= _number(path)
                shutil.rmtree(self.bases / path.stem, ignore_errors=True)
                path.unlink(missing_ok=True)


def _number(path: Path) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return 0


# The folder of an attempt: below WORK, its own, and gone when the attempt has ended, also if that was by a kill.


@contextmanager
def attempt_folder(work: Path, name: str) -> Iterator[Path]:
    """A new folder for an attempt; what killed processes left next to it is deleted.

    Args:
        work: of the machine.
        name: of the attempt, different for each.

    Raises:
        OSError: the disk is full, or closed to this user.
    """
    parent = work / 'attempts'
    parent.mkdir(parents=True, exist_ok=True)
    for path in parent.glob('*.lock'):
        with path.open('a') as file:
            if try_lock(file):
                shutil.rmtree(path.with_suffix(''), ignore_errors=True)
                path.unlink(missing_ok=True)
    folder, held = parent / f'{name}.d', parent / f'{name}.d.lock'
    with held.open('a') as file:
        if not try_lock(file):
            raise FileExistsError(f'{folder}: another process uses it')
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            held.unlink(missing_ok=True)


def open_work(work: Path, keep_gb: float) -> WarmFolder:
    """Make the folder of a machine, closed to other users, and what stays in it between jobs.

    Raises:
        OSError: the disk is full, or closed to this user.
    """
    keep_private()
    work.mkdir(parents=True, exist_ok=True)
    return WarmFolder(work / 'warm', keep_gb)


# A request to stop, which a signal handler may make at any instant.


class StopRequest:
    """Whether this process was asked to stop. Not a threading.Event: a handler that sets one while its thread waits for it may wait for ever."""

    def __init__(self) -> None:
        self.asked = False
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)

    def __del__(self) -> None:
        os.close(self._read)
        os.close(self._write)

    def ask(self) -> None:
        self.asked = True
        with suppress(OSError):  # full: it will be read
            os.write(self._write, b'.')

    def wait(self, seconds: float) -> bool:
        """Sleep, but not after a request; return whether there was one."""
        if not self.asked:
            poll = select.poll()  # select() takes no descriptor above 1,023
            poll.register(self._read, select.POLLIN)
            poll.poll(max(0.0, 1000 * seconds))
        return self.asked

    @contextmanager
    def on_signals(self) -> Iterator[None]:
        """Let SIGTERM and Ctrl-C make the request within the context; a second Ctrl-C interrupts."""
        first_at = [0.0]

        def heard(number: int, _: FrameType | None) -> None:
            if number == signal.SIGINT and self.asked and time.monotonic() - first_at[0] > 0.5:
                raise KeyboardInterrupt
            first_at[0] = first_at[0] or time.monotonic()
            self.ask()

        before = {number: signal.signal(number, heard) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


# Pauses between attempts at what fails for reasons outside.

FIRST_PAUSE_SEC, LONGEST_PAUSE_SEC = 1.0, 60.0


def growing_pauses() -> Iterator[float]:
    """Seconds, without end, growing to LONGEST_PAUSE_SEC, never the same on two machines."""
    seconds = FIRST_PAUSE_SEC
    while True:
        yield seconds * JITTER.uniform(0.5, 1.5)
        seconds = min(2 * seconds, LONGEST_PAUSE_SEC)
