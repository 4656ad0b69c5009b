"""A folder of photos as one archive, byte for byte the same wherever and whenever it is packed: its digest is its name in the bucket."""

from __future__ import annotations

import hashlib
import os
import tarfile
from dataclasses import dataclass
from pathlib import Path

from diffusion.common.text import counted
from diffusion.contracts.errors import InputError
from diffusion.fleet.jobs.spec import LARGEST_INPUT_BYTES

MAX_FILES = 20_000  # that a worker unpacks
CHUNK_BYTES = 1 << 20
ARCHIVES = ('.tar', '.tar.gz', '.tgz', '.zip')


@dataclass(frozen=True)
class Packed:
    """An archive on this machine.

    Attributes:
        source: what was packed; it may be the archive itself.
        is_temporary: made by `pack`, for this upload alone.
    """

    source: Path
    path: Path
    sha256: str
    num_bytes: int
    is_temporary: bool


def pack(source: Path, scratch: Path) -> Packed:
    """Make one archive of a folder; an archive or another file is taken unchanged.

    Links are followed; hidden files and folders (those that begin with a dot) are left out. Names are sorted, times, users and rights are constant.

    Args:
        scratch: folder for the archive.

    Raises:
        InputError: nothing is there, or too much.
    """
    if source.is_file():
        num_bytes = source.stat().st_size
        _check_size(source, num_bytes)
        return Packed(source, source, _sha256(source), num_bytes, is_temporary=False)
    if not source.is_dir():
        raise InputError(f'{source}: there is no such folder or file')
    files = sorted(_files(source), key=lambda path: path.relative_to(source).as_posix())
    if not files:
        raise InputError(f'{source}: the folder is empty')
    if len(files) > MAX_FILES:
        raise InputError(f'{source}: {counted(len(files), "file")}, a worker unpacks {MAX_FILES:,} at most')
    _check_size(source, sum(path.stat().st_size for path in files))
    scratch.mkdir(parents=True, exist_ok=True)
    archive = scratch / f'{hashlib.sha256(str(source.absolute()).encode()).hexdigest()[:16]}.tar'
    with tarfile.open(archive, 'w', format=tarfile.PAX_FORMAT) as tar:
        for path in files:
            entry = tarfile.TarInfo(path.relative_to(source).as_posix())
            with path.open('rb') as file:
                entry.size = os.fstat(file.fileno()).st_size
                entry.mode = 0o644
                tar.addfile(entry, file)
    num_bytes = archive.stat().st_size
    _check_size(source, num_bytes)
    return Packed(source, archive, _sha256(archive), num_bytes, is_temporary=True)


def _files(folder: Path) -> list[Path]:
    found = []
    for name, folders, files in os.walk(folder, followlinks=False):
        folders[:] = [inner for inner in folders if not inner.startswith('.')]
        found += [Path(name) / file for file in files if not file.startswith('.') and (Path(name) / file).is_file()]
    return found


def _check_size(source: Path, num_bytes: int) -> None:
    if num_bytes > LARGEST_INPUT_BYTES:
        raise InputError(f'{source}: {num_bytes / (1 << 30):.1f} GB, an input may have {LARGEST_INPUT_BYTES >> 30} GB at most')


def _sha256(path: Path) -> str:
    with path.open('rb') as file:
        return hashlib.file_digest(file, 'sha256').hexdigest()
