"""A folder of photos as one archive, byte for byte the same wherever and whenever it is packed: its digest is its name in the bucket."""

import hashlib
import os
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from diffusion.common.text import counted
from diffusion.contracts.errors import InputError
from diffusion.fleet.jobs.checking import BASE
from diffusion.fleet.jobs.spec import LARGEST_INPUT_BYTES

MAX_FILES = 20_000  # that a worker unpacks
MAX_NAMED = 20  # images in one message
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


def input_mistakes(name: str, source: Path) -> list[str]:
    """What no machine could read in an input: said before it is uploaded and a machine is paid for.

    Args:
        name: of the input; all but the base model are photos.
    """
    if not source.exists():
        return [f'{source} is not there']
    if source.is_file():
        is_archive = tarfile.is_tarfile(source) or zipfile.is_zipfile(source)
        return [] if is_archive else [f'{source}: {source.stat().st_size:,} bytes, neither a tar nor a zip archive; name a folder or an archive']
    if name == BASE or not source.is_dir():
        return []
    from data_prep.sources.image_folder import SUFFIXES
    from diffusion.datasets.decode import ImageError, verify

    photos = sorted(path for path in _files(source) if path.suffix.lower().removeprefix('.') in SUFFIXES)
    if not photos:
        return [f'{source}: there is no image in it; photos are JPEG, PNG or WebP files']
    wrong = []
    for path in photos:
        try:
            verify(path.read_bytes())
        except ImageError as error:
            wrong.append(f'{path}: {error}')
    more = [f'and {counted(len(wrong) - MAX_NAMED, "image")} more of {source}'] if len(wrong) > MAX_NAMED else []
    return [*wrong[:MAX_NAMED], *more]


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
