"""Folders of files, on a local disk or in object storage, behind one small interface.

URLs and credentials are Streaming's: `s3://bucket/path` (`S3_ENDPOINT_URL` names another server than AWS), `gs://bucket/path` (`GCS_KEY`
and `GCS_SECRET`, or Google's default credentials), `oci://bucket@namespace/path` (`~/.oci/config`). Retries with growing
pauses are the storage clients' own. Nothing here imports torch.
"""

import errno
import hashlib
import os
import re
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from diffusion.common.files import lock, scratch_in, sweep_scratch, sync
from diffusion.common.object_storage import CLIENTS, Client, Stat, client_of, is_missing, status_of
from diffusion.common.text import carries_credentials, redacted

NUM_REQUESTS = 16  # at a time, of those who ask for many files
DISK_REMEDY = 'ask the owner of that file or folder for access (ls -l and id show what is missing), or name another'
SWAPS = 10  # attempts; each that fails lets another writer through


class StorageError(RuntimeError):
    """A file could not be read or written although it was tried again and again; run the same command again later."""


class StorageRefusal(StorageError):
    """The storage does not let us: wrong or no credentials, no such bucket, or no permission on a disk. Trying again does not help."""


@dataclass(frozen=True)
class LocalFolder:
    """A folder of files named by their path below it, with `/`, on a disk that all processes of a job share.

    Everything raises StorageError, or FileNotFoundError for a file that is not there.
    """

    url: str

    def files(self, under: str = '') -> dict[str, Stat]:
        """Return all files in the folder `under`, in all its folders, sorted by name. Names that begin with a dot are not shown."""
        root, found, seen = Path(self.url), {}, set()
        for folder, folders, names in os.walk(root / under, onerror=self._unless_absent, followlinks=True):
            here = os.stat(folder)
            if (here.st_dev, here.st_ino) in seen:  # a link to a folder that it lies in
                folders.clear()
                continue
            seen.add((here.st_dev, here.st_ino))
            folders[:] = sorted(name for name in folders if not name.startswith('.'))
            inside = Path(folder).relative_to(root)
            for name in names:
                if not name.startswith('.'):
                    path = os.path.join(folder, name)
                    found[(inside / name).as_posix()] = _local_stat(path)
        return dict(sorted(found.items()))

    @staticmethod
    def _unless_absent(error: OSError) -> None:
        """os.walk would pass over a folder that it may not read."""
        if not isinstance(error, FileNotFoundError | NotADirectoryError) and error.errno != errno.ELOOP:  # a link to itself
            with translate_errors(error.filename, 'listed'):
                raise error

    def read(self, name: str) -> bytes:
        """Return the content of a small file."""
        with translate_errors(f'{self.url}/{name}', 'read'):
            return self.fetch(name, Path()).read_bytes()

    def fetch(self, name: str, scratch: Path) -> Path:
        """Return a local file with this content: the file itself, or a copy in `scratch`."""
        path = Path(self.url) / name
        with translate_errors(str(path), 'read'):
            is_there = path.exists()
        if not is_there:
            raise FileNotFoundError(f'{path}: no such file')
        if not path.is_file():
            raise StorageRefusal(f'{path}: is not a regular file, and reading it might never end')
        return path

    def put(self, path: Path, name: str) -> None:
        """Move a local file into the folder: there whole, or not at all. `path` should come from `scratch_for` this folder."""
        target = Path(self.url) / name
        with translate_errors(str(target), 'written'):
            target.parent.mkdir(parents=True, exist_ok=True)
            sync(path)  # on disk before its name says so
            os.replace(path, target)

    def delete(self, name: str) -> None:
        """Remove a file if it is there."""
        (Path(self.url) / name).unlink(missing_ok=True)

    def swap(self, name: str, old: bytes | None, new: bytes) -> bool:
        """Put a small file in the place of `old` (None: if there is none); of several processes that try at the same time one succeeds.

        Returns:
            Whether the file now holds `new`, also if it did before: content that tells its writers apart tells them who won.
        """
        target = Path(self.url) / name
        with translate_errors(str(target), 'written'), scratch_for(self) as scratch:
            path = scratch / 'content'
            path.write_bytes(new)
            if old is None:
                target.parent.mkdir(parents=True, exist_ok=True)
                sync(path)
                with suppress(FileExistsError):
                    os.link(path, target)
            while True:
                try:
                    with target.open('r+b') as there:  # to write, because NFS locks nothing else
                        lock(there)
                        if not os.path.samestat(os.fstat(there.fileno()), os.stat(target)):
                            continue  # replaced by the one that had the lock
                        content = there.read()
                        if content == old:
                            self.put(path, name)
                        return content in (old, new)
                except FileNotFoundError:
                    return False


def _local_stat(path: str) -> Stat:
    try:
        found = os.stat(path)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ELOOP):  # a link that leads nowhere, or to itself
            raise
        return Stat(0, '')
    return Stat(found.st_size, str(found.st_mtime_ns))


@dataclass(frozen=True)
class RemoteFolder:
    """A folder in object storage, with the methods of `LocalFolder`. Putting an object is atomic there; a process makes its client when first used.

    Raises:
        StorageRefusal: the URL has a query or a fragment, which clients pass over: another object than the one named.
    """

    url: str

    def __post_init__(self) -> None:
        if extra := re.search(r'[?#].*', self.url):
            raise StorageRefusal(f'{self.url}: {extra[0]} would be passed over: URLs of folders have no query and no fragment; leave it out')

    def files(self, under: str = '') -> dict[str, Stat]:
        root = self._key('')
        with translate_errors(self.url, 'listed'):
            prefix = self._key(under).rstrip('/')
            listed = self._client.list(f'{prefix}/' if prefix else '')
            names = {key.removeprefix(root): stat for key, stat in listed if not key.endswith('/')}
        return {name: stat for name, stat in sorted(names.items()) if not any(part.startswith('.') for part in name.split('/'))}

    def read(self, name: str) -> bytes:
        with tempfile.TemporaryDirectory(prefix='read-') as temporary:
            return self.fetch(name, Path(temporary)).read_bytes()

    def fetch(self, name: str, scratch: Path) -> Path:
        path = scratch / f'{hashlib.sha256(name.encode()).hexdigest()[:8]}-{Path(name).name[-50:]}'  # 255 bytes at most, a key has up to 1,024
        if not path.exists():
            partial = path.with_name(f'.{path.name}.part')
            with translate_errors(f'{self.url}/{name}', 'read'):
                self._client.download(self._key(name), partial)
                partial.rename(path)
        return path

    def put(self, path: Path, name: str) -> None:
        self.copy(path, name)
        path.unlink()

    def copy(self, path: Path, name: str) -> None:
        """Put a file that stays where it is."""
        with translate_errors(f'{self.url}/{name}', 'written'):
            self._client.upload(path, self._key(name))

    def delete(self, name: str) -> None:
        with suppress(FileNotFoundError), translate_errors(f'{self.url}/{name}', 'deleted'):
            self._client.delete(self._key(name))

    def swap(self, name: str, old: bytes | None, new: bytes) -> bool:
        for attempt in range(SWAPS):
            time.sleep(0.1 * attempt)
            with translate_errors(f'{self.url}/{name}', 'written'):
                there: bytes | None = None
                version: str | None = None
                try:
                    there, version = self._client.read(self._key(name))
                except Exception as error:
                    if status_of(error)[0] == 412:  # replaced while it was read
                        continue
                    if not is_missing(error):
                        raise
                if there == new:
                    return True
                if there != old:
                    return False
                if self._client.put_if(self._key(name), new, version):
                    return True  # else another was faster, or this was the second attempt of a request whose answer was lost
        raise StorageError(f'{self.url}/{name}: could not be written: {SWAPS} attempts met others')

    def _key(self, name: str) -> str:
        path = urlsplit(self.url).path.strip('/')
        return f'{path}/{name}' if path else name

    @property
    def _client(self) -> Client:
        url = urlsplit(self.url)
        return client_of(url.scheme, url.netloc)


Folder = LocalFolder | RemoteFolder
SCHEMES = tuple(CLIENTS)
_sweep_once = cache(sweep_scratch)


def misspelt_url(where: str) -> str:
    """Return the URL that was meant by a place with a slash missing or too many, such as `s3:/bucket`; '' for any other place."""
    found = re.match(rf'({"|".join(SCHEMES)}):(/*)(.*)', where)
    return f'{found[1]}://{found[3]}' if found and found[2] != '//' else ''


def open_folder(where: str | Path) -> Folder:
    """The folder at a local path or URL; nothing is read yet.

    Raises:
        StorageRefusal: the kind of URL is not known, it names no bucket, or it holds credentials.
    """
    scheme, separator, rest = str(where).partition('://')
    if separator and carries_credentials(str(where)):
        raise StorageRefusal(f'{redacted(str(where))}: holds credentials, which would end in logs; leave them out and set them in the environment')
    if meant := misspelt_url(str(where)):
        raise StorageRefusal(f'{where}: is neither a URL nor a folder; did you mean {meant}?')
    if not separator:
        return LocalFolder(str(where))
    if scheme not in SCHEMES:
        raise StorageRefusal(f'{where}: {scheme}:// is not known; use a local path or {", ".join(f"{name}://" for name in SCHEMES)}')
    if not rest.strip('/'):
        raise StorageRefusal(f'{where}: names no bucket; write {scheme}://BUCKET/FOLDER')
    return RemoteFolder(str(where).rstrip('/'))


def write(folder: Folder, name: str, content: bytes) -> None:
    """Put a small file."""
    with scratch_for(folder) as scratch:
        path = scratch / 'content'
        path.write_bytes(content)
        folder.put(path, name)


@contextmanager
def scratch_for(folder: Folder | None = None) -> Iterator[Path]:
    """Yield an empty local folder on the file system of `folder` if that is local, or else in TMPDIR; removed at the end, or by a later process."""
    parent = Path(folder.url) if isinstance(folder, LocalFolder) else Path(tempfile.gettempdir())
    with ExitStack() as stack:
        with translate_errors(str(parent), 'written'):
            _sweep_once(parent)
            scratch = stack.enter_context(scratch_in(parent))
        yield scratch


def sweep(folder: Folder) -> None:
    """Remove what killed processes of this host left in a local folder."""
    if isinstance(folder, LocalFolder):
        sweep_scratch(Path(folder.url))


def fingerprint(folder: Folder, files: Mapping[str, Stat], detail: Any = None) -> dict[str, Any]:
    """Return what changes when an input file changes: names, sizes and versions, on a disk as they are now, and `detail`, whatever it is.

    A copy on another disk has the same one if it keeps the times of the files (cp -p, rsync -t).
    """
    if isinstance(folder, LocalFolder):
        files = {name: stat if stat.refused else _local_stat(os.path.join(folder.url, name)) for name, stat in files.items()}
    return {
        'files': _summary(list(files)),
        'bytes': _summary([stat.num_bytes for stat in files.values()]),
        'versions': _summary([stat.version for stat in files.values()]),
        'detail': None if detail is None else hashlib.sha256(repr(detail).encode()).hexdigest()[:16],
    }


def _summary(values: list[Any]) -> list[Any] | str:
    """A few values as they are, many as their digest."""
    return values if len(values) <= 4 else f'{len(values)} with digest {hashlib.sha256(repr(values).encode()).hexdigest()[:16]}'


@contextmanager
def translate_errors(where: str, what: str) -> Iterator[None]:
    """Turn what a client or a disk raises into a StorageError that names the file; a missing file stays a FileNotFoundError."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError) as error:
        raise FileNotFoundError(f'{where}: no such file') from error
    except StorageError:
        raise
    except Exception as error:  # each client has exceptions of its own
        if what in ('read', 'deleted') and is_missing(error):
            raise FileNotFoundError(f'{where}: no such file') from error
        message = redacted(' '.join(str(error).split())) or type(error).__name__
        if _is_refusal(error):
            of_disk = '://' not in where or _is_closed(error)
            remedy = DISK_REMEDY if of_disk else 'check the credentials and the name of the bucket'
            raise StorageRefusal(f'{where}: could not be {what}: {message}; {remedy}') from error
        raise StorageError(f'{where}: could not be {what}: {message}; nothing is lost, run the same command again') from error


def _is_closed(error: BaseException) -> bool:
    """Whether a disk refuses; no storage client raises such an error of its own."""
    return isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EPERM, errno.EROFS)


def _is_refusal(error: BaseException) -> bool:
    if isinstance(error.__context__, Exception) and _is_refusal(error.__context__):  # boto3 wraps what an upload meets
        return True
    status, word = status_of(error)
    no_bucket = any(name in f'{word} {error}' for name in ('NoSuchBucket', 'BucketNotFound'))
    return no_bucket or 'Credentials' in type(error).__name__ or _is_closed(error) or status in (401, 403)
