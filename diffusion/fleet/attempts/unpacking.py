"""Archives of strangers, unpacked: nothing lands outside of the folder, nothing but plain files and folders, and not without end."""

import os
import shutil
import stat
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO

from diffusion.fleet.attempts.desk import InputFault

MAX_FILES = 20_000
MAX_BYTES = 64 << 30
ZIP_START = (b'PK\x03\x04', b'PK\x05\x06')
NAME_BYTES = 255
DEPTH = 32
DAMAGE = (tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, ValueError)


def unpack(archive: Path, target: Path, scratch: Path, name: str) -> int:
    """Put an archive's files into the folder `target`, there whole or not at all; any other file becomes `target` itself.

    Where an archive holds one folder and nothing else, that folder's files are taken.

    Args:
        archive: tar (also compressed) or zip; it may be moved.
        target: not there yet.
        scratch: a folder on the same disk, emptied by whoever made it.
        name: for messages.

    Returns:
        Bytes on the disk.

    Raises:
        InputFault: a file would land elsewhere, is none (links, devices), or there is too much; or the archive is damaged.
        OSError: the disk is full.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with archive.open('rb') as file:
        is_zip = file.read(4) in ZIP_START
    if not is_zip and not tarfile.is_tarfile(archive):
        os.rename(archive, target)
        return target.stat().st_size
    folder = Path(tempfile.mkdtemp(prefix='unpacking-', dir=scratch))
    try:
        num_bytes = _unpack_zip(archive, folder, name) if is_zip else _unpack_tar(archive, folder, name)
    except DAMAGE as error:
        raise InputFault(f'inputs.{name}: cannot be unpacked: {type(error).__name__}: {str(error)[:200]}; pack it again') from error
    inside = list(folder.iterdir())
    os.rename(inside[0] if len(inside) == 1 and inside[0].is_dir() else folder, target)
    return num_bytes


def _unpack_tar(archive: Path, folder: Path, name: str) -> int:
    limits = _Limits(name)
    with tarfile.open(archive) as tar:
        for member in tar:
            said = member.name
            member = tarfile.data_filter(member, str(folder))  # refuses what leads out of the folder, and devices
            if member.issym() or member.islnk():
                raise InputFault(f'inputs.{name}: {member.name[:80]!r} is a link; pack the files themselves, with tar --dereference')
            path = limits.place(folder, said, member.size, member.isdir())
            if member.isdir():
                path.mkdir(parents=True, exist_ok=True)
                continue
            source = tar.extractfile(member)
            if source is None:
                raise InputFault(f'inputs.{name}: {member.name[:80]!r} is not a plain file')
            with source:
                _copy(source, path)
    return limits.num_bytes


def _unpack_zip(archive: Path, folder: Path, name: str) -> int:
    limits = _Limits(name)
    with zipfile.ZipFile(archive) as zipped:
        for entry in zipped.infolist():
            kind = stat.S_IFMT(entry.external_attr >> 16)
            if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
                raise InputFault(f'inputs.{name}: {entry.filename[:80]!r} is a link or a device; pack plain files')
            if entry.flag_bits & 1:
                raise InputFault(f'inputs.{name}: {entry.filename[:80]!r} is encrypted; pack it without a password')
            path = limits.place(folder, entry.filename, entry.file_size, entry.is_dir())
            if entry.is_dir():
                path.mkdir(parents=True, exist_ok=True)
                continue
            with zipped.open(entry) as source:  # reads no more than it says
                _copy(source, path)
    return limits.num_bytes


class _Limits:
    """Counts what an archive unpacks to."""

    def __init__(self, name: str):
        self.name, self.num_files, self.num_bytes = name, 0, 0

    def place(self, folder: Path, inside: str, num_bytes: int, is_folder: bool) -> Path:
        """Where a file of the archive goes.

        Raises:
            InputFault: not into the folder, or there is too much.
        """
        path = PurePosixPath(inside)
        parts = list(_plain(path))
        if path.is_absolute() or '\\' in inside or '\0' in inside or '..' in parts or len(parts) > DEPTH or (not parts and not is_folder) or any(
            len(os.fsencode(part)) > NAME_BYTES for part in parts
        ):  # fmt: skip
            raise InputFault(f'inputs.{self.name}: {inside[:80]!r} would not land in its folder; pack it with relative names')
        self.num_files += 1
        self.num_bytes += num_bytes
        if self.num_files > MAX_FILES:
            raise InputFault(f'inputs.{self.name}: more than {MAX_FILES:,} files')
        if self.num_bytes > MAX_BYTES:
            raise InputFault(f'inputs.{self.name}: unpacked more than {MAX_BYTES:,} bytes')
        return folder.joinpath(*parts)


def _plain(path: PurePosixPath) -> Iterator[str]:
    return (part for part in path.parts if part not in ('/', '.'))


def _copy(source: IO[bytes], path: Path) -> None:
    if path.exists():
        raise ValueError(f'{path.name} comes twice')
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open('xb') as file:
        shutil.copyfileobj(source, file, 1 << 20)
