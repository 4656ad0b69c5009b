"""A checkpoint onto a local disk: hashed on its way, on the platter before it has its name."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch

from diffusion.checkpoints.manifest import Content
from diffusion.common.failpoints import failpoint
from diffusion.common.files import sync

TEMPORARY = '.tmp-'  # what has this prefix and one of our names is what a killed process left
HALF_BYTES = 1 << 16  # where the failpoint in the middle of a file is


class HashedFile:
    """Hashes and counts what is written. It never raises: torch.save's writer reports another error than the disk's, or ends the process."""

    def __init__(self, file: BinaryIO):
        self.file = file
        self.sha = hashlib.sha256()
        self.num_bytes = 0
        self.error: Exception | None = None

    def write(self, data: bytes | memoryview) -> int:
        size = memoryview(data).nbytes
        if self.error is None:
            try:
                if self.num_bytes < HALF_BYTES <= self.num_bytes + size:
                    failpoint('save.half')
                self.file.write(data)
                self.sha.update(data)
            except Exception as error:  # raised in `content` below
                self.error = error
        self.num_bytes += size
        return size

    def flush(self) -> None:
        """At the end, by write_file."""

    def content(self) -> Content:
        if self.error is not None:
            raise self.error
        return Content(self.sha.hexdigest(), self.num_bytes)


@contextmanager
def replacing_durably(path: Path) -> Iterator[BinaryIO]:
    """A file that takes the place of `path` when the block ends, and survives a loss of power after it; nothing is left if the block raises.

    Raises:
        OSError: the disk is full or broken.
    """
    temporary = path.with_name(f'{TEMPORARY}{path.name}')
    try:
        with temporary.open('wb') as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if path.suffix == '.pt':
            failpoint('save.written')
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync(path.parent)


def write_tensors(path: Path, value: dict[str, Any], confirm: Callable[[], None] = lambda: None) -> Content:
    """torch.save, durably and hashed.

    Args:
        confirm: called when everything is written, just before it takes the place of `path`; it may raise.

    Raises:
        OSError: the disk is full or broken; `path` is as it was.
    """
    with replacing_durably(path) as file:
        hashed = HashedFile(file)
        torch.save(value, hashed)  # type: ignore[arg-type]  # it asks for no more than write and flush
        written = hashed.content()
        confirm()
        return written


def write_text(path: Path, text: str) -> None:
    with replacing_durably(path) as file:
        file.write(text.encode())
