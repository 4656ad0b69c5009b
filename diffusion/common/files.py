"""Atomic file writes, and JSON from files of any origin."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

TEMPORARY = '.tmp-'  # prefix of a file that is not complete yet


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary name next to `path` (same suffix), and move what was written there to `path` in one step.

    A reader sees the old file or the new one, also after a loss of power; a writer that is killed or fails leaves the old one.

    Raises:
        OSError: the disk is full or broken.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f'{TEMPORARY}{os.getpid()}-{path.name}')
    try:
        yield temporary
        sync(temporary)  # on the disk before its name says so
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync(path.parent)


def write_text(path: Path, text: str) -> None:
    """Write a whole file in one step, as `replacing` does."""
    with replacing(path) as temporary:
        temporary.write_text(text)


def name_of_temporary(name: str) -> str | None:
    """Return the name that a temporary file of `replacing` was to take; None for other files."""
    process, _, wanted = name.removeprefix(TEMPORARY).partition('-')
    return wanted if name.startswith(TEMPORARY) and process.isdigit() else None


@contextmanager
def replacing_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty folder next to `folder`, which takes its place when the block ends without an error."""
    temporary = folder.with_name(f'.{folder.name}.tmp')
    shutil.rmtree(temporary, ignore_errors=True)  # of a process that was killed
    temporary.mkdir(parents=True)
    yield temporary
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(temporary, folder)


def sync(path: Path) -> None:
    """Wait until a file, or the list of names in a folder, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def keep_private() -> None:
    """Close what this process and its children write from now on to users outside the group; the umask decides on the group's access.

    Run folders hold recipes, logs and checkpoints, which name buckets, machines and people; on a cluster a team shares them by its group.
    """
    os.umask(os.umask(0o077) | 0o007)


def parse_json(text: str | bytes) -> Any:
    """Parse JSON as json.loads does, with one type of error for all that it cannot read.

    Raises:
        ValueError: damaged, nested too deeply (json: RecursionError), or with a number of more than 4,300 digits.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError('JSON nested too deeply') from None


def parse_json_object(text: str | bytes) -> dict[str, Any]:
    """Parse a JSON object.

    Raises:
        ValueError: damaged, or not an object.
    """
    content = parse_json(text)
    if not isinstance(content, dict):
        raise ValueError(f'a JSON object is wanted, this is a {type(content).__name__}')
    return content
