"""Files over HTTP to and from addresses that are secrets: no message names one."""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

import requests

from diffusion.checkpoints.manifest import CHUNK_BYTES, Content
from diffusion.fleet.attempts.desk import DeskOutage, HandedFile

TIMEOUT_SEC = (10.0, 60.0)  # to connect; between two pieces


class AddressExpired(DeskOutage):
    """The storage refuses an address (403): it is too old. A new one may help."""


class WrongContent(Exception):
    """What arrived is not what was announced."""


def no_auth(request: requests.PreparedRequest) -> requests.PreparedRequest:
    """Keep requests from taking a password out of ~/.netrc, which would also spoil a signature."""
    return request


def download(url: str, path: Path, content: Content, given_up: Callable[[], bool]) -> None:
    """Fetch a file; what an earlier attempt left of it is kept and continued.

    Raises:
        DeskOutage: it did not arrive, or is given up.
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
                            raise DeskOutage('given up')
                        if file.tell() > content.bytes:
                            break
        except requests.RequestException as error:
            raise DeskOutage(f'the storage did not answer: {type(error).__name__}') from None  # its message has the address
    take_over(partial, path, content)


def take_over(partial: Path, path: Path, content: Content) -> None:
    """Give a fetched file its name if it is the right one.

    Raises:
        DeskOutage: a part is missing.
        WrongContent: it is another file, which is deleted.
    """
    found = partial.stat().st_size
    if found < content.bytes:
        raise DeskOutage(f'{found:,} of {content.bytes:,} bytes arrived')
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
        DeskOutage: it was not taken, or is given up.
        AddressExpired.
    """
    try:
        with file.path.open('rb') as opened:
            body = _Watched(opened, file.content.bytes, given_up) if file.content.bytes else b''
            answer = requests.put(url, data=body, headers=dict(headers), auth=no_auth, timeout=TIMEOUT_SEC, allow_redirects=False)
    except requests.RequestException as error:
        raise DeskOutage(f'the storage did not answer: {type(error).__name__}') from None
    if answer.status_code == 412:
        return False
    _raise_for(answer.status_code)
    return True


def _raise_for(status: int) -> None:
    if status == 403:
        raise AddressExpired('the storage refuses the address (403)')
    if not 200 <= status < 300:
        raise DeskOutage(f'the storage answered with status {status}')


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
            raise DeskOutage('given up')
        return self._file.read(max(size, 1 << 16) if size >= 0 else size)
