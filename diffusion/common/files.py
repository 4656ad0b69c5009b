"""Files that are there whole, or not at all, and JSON out of files that anybody may have written."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a temporary name beside `path` (same suffix) and puts what was written there in its place, in one step.

    A reader sees the old file or the new one, also after a loss of power; a writer that is killed or fails leaves the old one.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f'.tmp-{os.getpid()}-{path.name}')
    try:
        yield temporary
        sync(temporary)  # on the disk before its name says so
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync(path.parent)


@contextmanager
def replacing_folder(folder: Path) -> Iterator[Path]:
    """The same for a folder: yields an empty one beside it, which takes its place when the block ends without an error."""
    temporary = folder.with_name(f'.{folder.name}.tmp')
    shutil.rmtree(temporary, ignore_errors=True)  # of a process that was killed
    temporary.mkdir(parents=True)
    yield temporary
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(temporary, folder)


def sync(path: Path) -> None:
    """Wait until a file is on the disk; of a folder, the names in it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def keep_private() -> None:
    """From now on, what this process and its children write is closed to users outside the group; the group's access stays as the umask has it.

    Run folders hold recipes, logs and checkpoints, which name buckets, machines and people; on a cluster a team shares them by its group.
    """
    os.umask(os.umask(0o077) | 0o007)


def parse_json(text: str | bytes) -> Any:
    """As json.loads, with one kind of error for all that it cannot read.

    Raises:
        ValueError: damaged, nested too deeply (json: RecursionError), or with a number of more than 4,300 digits.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError('JSON nested too deeply') from None


def parse_json_object(text: str | bytes) -> dict[str, Any]:
    """As `parse_json`, if it is an object.

    Raises:
        ValueError: it is not.
    """
    content = parse_json(text)
    if not isinstance(content, dict):
        raise ValueError(f'a JSON object is wanted, this is a {type(content).__name__}')
    return content
