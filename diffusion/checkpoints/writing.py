"""Write a checkpoint to a local disk: hashed while it is written, flushed to the disk before it takes its name."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import torch

from diffusion.checkpoints.manifest import Content
from diffusion.common.files import replacing
from diffusion.common.processes import failpoint

HALF_BYTES = 1 << 16  # position of the failpoint in the middle of a file


class HashedFile:
    """A file that hashes and counts what is written.

    Writing never raises: torch.save's own writer would report another error than the disk's, or end the process. `content` raises instead.
    """

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
            except Exception as error:  # raised by `content`
                self.error = error
        self.num_bytes += size
        return size

    def flush(self) -> None:
        """Nothing: the file is flushed when it is closed."""

    def content(self) -> Content:
        """Return the digest and size of what was written, or raise the first error of writing."""
        if self.error is not None:
            raise self.error
        return Content(self.sha.hexdigest(), self.num_bytes)


def write_tensors(path: Path, value: dict[str, Any], confirm: Callable[[], None] = lambda: None) -> Content:
    """torch.save, durably and hashed.

    Args:
        confirm: called when everything is written, just before the file takes the place of `path`; it may raise.

    Raises:
        OSError: the disk is full or broken; `path` is unchanged.
    """
    with replacing(path) as temporary:
        with temporary.open('wb') as file:
            hashed = HashedFile(file)
            torch.save(value, hashed)  # type: ignore[arg-type]  # it asks for no more than write and flush
            written = hashed.content()
        failpoint('save.written')
        confirm()
    return written
