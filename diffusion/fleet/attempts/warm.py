"""What stays on a machine between jobs: base models, unpacked, by digest; drawn images; the caches of libraries.

WARM/bases/SHA256        a base model in the diffusers layout
WARM/bases/SHA256.bytes  its size; the time of its last use is the time of this file
WARM/bases/SHA256.lock   held, shared, by each attempt that uses it
WARM/drawn, WARM/home    the cache of drawn images; the home of children
"""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from diffusion.common.files import lock, try_lock
from diffusion.fleet.attempts.unpacking import unpack

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
