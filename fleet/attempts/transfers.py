"""Files over HTTP to and from addresses that are secrets, so no message names one; and archives of strangers, unpacked."""

import hashlib
import os
import shutil
import stat
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import IO, BinaryIO

import requests

from diffusion.checkpoints.manifest import CHUNK_BYTES, Content
from fleet.attempts.backend import BackendUnavailable, HandedFile, JobInputError

TIMEOUT_SEC = (10.0, 60.0)  # to connect; between two pieces


class AddressExpired(BackendUnavailable):
    """The storage refuses an address (403): it is too old. A new one may help."""


class WrongContent(Exception):
    """Content that is not what was announced."""


def no_auth(request: requests.PreparedRequest) -> requests.PreparedRequest:
    """Keep requests from taking a password out of ~/.netrc, which would also spoil a signature."""
    return request


def download(url: str, path: Path, content: Content, given_up: Callable[[], bool]) -> None:
    """Fetch a file; what an earlier attempt left of it is kept and continued.

    Raises:
        BackendUnavailable: it did not arrive, or is given up.
        AddressExpired.
        WrongContent: it is another file.
        OSError: the disk is full.
    """
    partial = path.with_name(f'{path.name}.part')
    done = partial.stat().st_size if partial.exists() else 0
    if done > content.bytes:
        done = 0
    headers = {'Range': f'bytes={done}-'} if 0 < done < content.bytes else {}
    if done < content.bytes or not content.bytes:
        try:
            with requests.get(url, headers=headers, auth=no_auth, stream=True, timeout=TIMEOUT_SEC, allow_redirects=False) as answer:
                _raise_for(answer.status_code)
                with partial.open('ab' if answer.status_code == 206 else 'wb') as file:
                    for chunk in answer.iter_content(1 << 20):
                        file.write(chunk)
                        if given_up():
                            raise BackendUnavailable('given up')
                        if file.tell() > content.bytes:
                            break
        except requests.RequestException as error:
            raise BackendUnavailable(f'the storage did not answer: {type(error).__name__}') from None  # its message has the address
    take_over(partial, path, content)


def take_over(partial: Path, path: Path, content: Content) -> None:
    """Give a fetched file its name if it is the right one.

    Raises:
        BackendUnavailable: a part is missing.
        WrongContent: it is another file, which is deleted.
    """
    found = partial.stat().st_size
    if found < content.bytes:
        raise BackendUnavailable(f'{found:,} of {content.bytes:,} bytes arrived')
    sha = hashlib.sha256()
    with partial.open('rb') as file:
        while chunk := file.read(CHUNK_BYTES):
            sha.update(chunk)
    if found != content.bytes or sha.hexdigest() != content.sha256:
        partial.unlink()
        raise WrongContent(f'{found:,} bytes with SHA-256 {sha.hexdigest()}, expected {content.bytes:,} with {content.sha256}')
    partial.replace(path)


def upload(url: str, headers: Mapping[str, str], file: HandedFile, given_up: Callable[[], bool]) -> bool:
    """Put a file; return whether it was not there already.

    Raises:
        BackendUnavailable: it was not taken, or is given up.
        AddressExpired.
    """
    try:
        with file.path.open('rb') as opened:
            body = _Watched(opened, file.content.bytes, given_up) if file.content.bytes else b''
            answer = requests.put(url, data=body, headers=dict(headers), auth=no_auth, timeout=TIMEOUT_SEC, allow_redirects=False)
    except requests.RequestException as error:
        raise BackendUnavailable(f'the storage did not answer: {type(error).__name__}') from None
    if answer.status_code == 412:
        return False
    _raise_for(answer.status_code)
    return True


def _raise_for(status: int) -> None:
    if status == 403:
        raise AddressExpired('the storage refuses the address (403)')
    if not 200 <= status < 300:
        raise BackendUnavailable(f'the storage answered with status {status}')


class _Watched:
    """A file on its way, which may be given up.

    No subclass of io's: requests would ask it for its position and send it in chunks, which S3 refuses.
    """

    def __init__(self, file: BinaryIO, num_bytes: int, given_up: Callable[[], bool]):
        self._file, self._num_bytes, self._given_up = file, num_bytes, given_up

    def __len__(self) -> int:
        return self._num_bytes

    def __iter__(self) -> Iterator[bytes]:
        return iter(lambda: self.read(1 << 16), b'')

    def read(self, size: int = -1) -> bytes:
        if self._given_up():
            raise BackendUnavailable('given up')
        return self._file.read(max(size, 1 << 16) if size >= 0 else size)


# Archives of strangers, unpacked: nothing lands outside of the folder, nothing but plain files and folders, and not without end.

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
        JobInputError: a file would land elsewhere, is none (links, devices), or there is too much; or the archive is damaged.
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
        raise JobInputError(f'inputs.{name}: cannot be unpacked: {type(error).__name__}: {str(error)[:200]}; pack it again') from error
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
                raise JobInputError(f'inputs.{name}: {member.name[:80]!r} is a link; pack the files themselves, with tar --dereference')
            path = limits.place(folder, said, member.size, member.isdir())
            if member.isdir():
                path.mkdir(parents=True, exist_ok=True)
                continue
            source = tar.extractfile(member)
            if source is None:
                raise JobInputError(f'inputs.{name}: {member.name[:80]!r} is not a plain file')
            with source:
                _copy(source, path)
    return limits.num_bytes


def _unpack_zip(archive: Path, folder: Path, name: str) -> int:
    limits = _Limits(name)
    with zipfile.ZipFile(archive) as zipped:
        for entry in zipped.infolist():
            kind = stat.S_IFMT(entry.external_attr >> 16)
            if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
                raise JobInputError(f'inputs.{name}: {entry.filename[:80]!r} is a link or a device; pack plain files')
            if entry.flag_bits & 1:
                raise JobInputError(f'inputs.{name}: {entry.filename[:80]!r} is encrypted; pack it without a password')
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
        """Return the path that a file of the archive goes to.

        Raises:
            JobInputError: not into the folder, or there is too much.
        """
        path = PurePosixPath(inside)
        parts = list(_plain(path))
        if path.is_absolute() or '\\' in inside or '\0' in inside or '..' in parts or len(parts) > DEPTH or (not parts and not is_folder) or any(
            len(os.fsencode(part)) > NAME_BYTES for part in parts
        ):  # fmt: skip
            raise JobInputError(f'inputs.{self.name}: {inside[:80]!r} would not land in its folder; pack it with relative names')
        self.num_files += 1
        self.num_bytes += num_bytes
        if self.num_files > MAX_FILES:
            raise JobInputError(f'inputs.{self.name}: more than {MAX_FILES:,} files')
        if self.num_bytes > MAX_BYTES:
            raise JobInputError(f'inputs.{self.name}: unpacked more than {MAX_BYTES:,} bytes')
        return folder.joinpath(*parts)


def _plain(path: PurePosixPath) -> Iterator[str]:
    return (part for part in path.parts if part not in ('/', '.'))


def _copy(source: IO[bytes], path: Path) -> None:
    if path.exists():
        raise ValueError(f'{path.name} comes twice')
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open('xb') as file:
        shutil.copyfileobj(source, file, 1 << 20)
