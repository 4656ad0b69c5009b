"""The code that Inductor and Triton compiled, packed for the next machine: one that is rented by the hour starts bare, and compiling takes minutes.

The archive is in parts, small enough for transfers that limit the size of a file. It holds compiled code and pickles, which run when they are
read: unpack only what your own runs have packed.
"""

import io
import json
import tarfile
import tempfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from diffusion.common.files import parse_json_object, replacing, replacing_folder

FOLDERS = {'TORCHINDUCTOR_CACHE_DIR': 'inductor', 'TRITON_CACHE_DIR': 'triton'}
LABEL = 'made-with.json'
MADE_WITH = ('torch', 'gpu', 'cuda', 'commit')  # other machines cannot use it; another commit compiles other code, and can use the rest
PART_BYTES, MAX_PARTS = 15_000_000, 4


def variables(folder: Path) -> dict[str, str]:
    """Environment of processes that compile into `folder` and look there first."""
    paths = {name: str(folder / sub) for name, sub in FOLDERS.items()}
    return {**paths, 'TORCHINDUCTOR_FX_GRAPH_CACHE': '1', 'TORCHINDUCTOR_AUTOGRAD_CACHE': '1'}


def parts_of(archive: Path) -> list[Path]:
    """ARCHIVE.0, ARCHIVE.1 ... that are there."""
    return [path for path in (archive.with_name(f'{archive.name}.{i}') for i in range(MAX_PARTS)) if path.exists()]


def pack(folder: Path, archive: Path, environment: Mapping[str, Any]) -> str:
    """Write the parts of the archive, each whole or not at all; returns a line about it."""
    if not any((folder / sub).exists() for sub in FOLDERS.values()):
        return 'compile cache: nothing was compiled, nothing is packed'
    with tempfile.TemporaryFile() as whole:
        with tarfile.open(fileobj=whole, mode='w:gz', compresslevel=6) as tar:
            label = json.dumps({key: environment.get(key) for key in MADE_WITH}).encode()
            info = tarfile.TarInfo(LABEL)
            info.size = len(label)
            tar.addfile(info, io.BytesIO(label))
            for sub in FOLDERS.values():
                if (folder / sub).exists():
                    tar.add(folder / sub, sub)
        size = whole.tell()
        num_parts = -(-size // PART_BYTES)
        if num_parts > MAX_PARTS:
            return f'compile cache: {size / 1e6:.0f} MB packed, {MAX_PARTS * PART_BYTES / 1e6:.0f} MB is the limit; nothing is written, keep {folder}'
        whole.seek(0)
        for old in parts_of(archive):
            old.unlink()
        for i in range(num_parts):
            with replacing(archive.with_name(f'{archive.name}.{i}')) as temporary:
                temporary.write_bytes(whole.read(PART_BYTES))
    return f'compile cache: {size / 1e6:.1f} MB in {archive}.0{f" to .{num_parts - 1}" if num_parts > 1 else ""}'


def unpack(archive: Path, folder: Path, environment: Mapping[str, Any]) -> str:
    """Put the archive's content into `folder`, if it was made with this PyTorch and GPU and nothing is there yet; returns a line about it."""
    parts = parts_of(archive)
    if not parts:
        return f'compile cache: no {archive}.0; everything is compiled here'
    if folder.exists():
        return f'compile cache: {folder} is there already; {archive} is not unpacked'
    content = io.BytesIO(b''.join(path.read_bytes() for path in parts))
    try:
        with tarfile.open(fileobj=content, mode='r:gz') as tar:
            first = tar.next()
            label = tar.extractfile(first) if first is not None and first.name == LABEL else None
            made_with = parse_json_object(label.read()) if label is not None else {}
            for key in ('torch', 'gpu', 'cuda'):
                if made_with.get(key) != environment.get(key):
                    return f'compile cache: not used: made with {key} {made_with.get(key)}, this is {environment.get(key)}; remove {archive}.*'
            with replacing_folder(folder) as temporary:
                tar.extractall(temporary, filter='data')
    except (tarfile.TarError, zlib.error, OSError, EOFError, ValueError) as error:
        return f'compile cache: not used: {archive} is damaged ({error}); remove {archive}.*'
    return f'compile cache: unpacked, made with commit {made_with.get("commit")}'
