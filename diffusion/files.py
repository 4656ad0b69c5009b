"""Files that are there whole, or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a temporary name beside `path` (same suffix) and puts what was written there in its place, in one step.

    A reader sees the old file or the new one; a writer that is killed or fails leaves the old one.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f'.tmp-{os.getpid()}-{path.name}')
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def replacing_folder(folder: Path) -> Iterator[Path]:
    """The same for a folder: yields an empty one beside it, which takes its place when the block ends without an error."""
    temporary = folder.with_name(f'.{folder.name}.tmp')
    shutil.rmtree(temporary, ignore_errors=True)  # of a process that was killed
    temporary.mkdir(parents=True)
    yield temporary
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(temporary, folder)
