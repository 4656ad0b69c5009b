"""Inputs that are paths of the owner's machine: what `submit` uploads, and `fleet run` takes as they are."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def path_of_input(given: object, folder: Path) -> Path | None:
    """The path that an input names, alone or as `{path: ...}`; None: it is said otherwise.

    Args:
        given: what the job says of the input.
        folder: of the job's file, from which paths count.
    """
    path = given.get('path') if isinstance(given, Mapping) and set(given) == {'path'} else given
    return folder / Path(path).expanduser() if isinstance(path, str) else None


def located_inputs(inputs: Mapping[Any, Any], folder: Path, errors: list[str]) -> dict[Any, Any]:
    """The inputs of a job for this machine: paths, also as `url`, become whole ones, with the digest of what is there. Of a folder it is that of its
    files' names and sizes.

    Args:
        folder: of the job's file.
        errors: gets a line for each path that cannot be used.
    """
    located = dict(inputs)
    for name, given in inputs.items():
        path = path_of_input(given, folder)
        url = given.get('url') if isinstance(given, Mapping) else None
        if path is None and isinstance(url, str) and '://' not in url:
            path = path_of_input(url, folder)
        if path is None:
            continue
        path = path.absolute()
        digests = [key for key in ('sha256', 'bytes') if isinstance(given, Mapping) and key in given]
        if path.is_dir() and digests:
            errors.append(f'inputs.{name}: {path} is a folder, and {" and ".join(digests)} belong to one file; leave them out, or name an archive')
        elif digests:
            located[name] = {**given, 'url': str(path)}
        elif path.is_dir():
            located[name] = {'url': str(path), 'sha256': _digest_of_names(path), 'bytes': 0}
        elif path.is_file():
            with path.open('rb') as file:
                located[name] = {'url': str(path), 'sha256': hashlib.file_digest(file, 'sha256').hexdigest(), 'bytes': path.stat().st_size}
        else:
            errors.append(f"inputs.{name}: {path} is not there; paths count from the folder of the job's file")
    return located


def _digest_of_names(folder: Path) -> str:
    files = sorted((path.relative_to(folder).as_posix(), path.stat().st_size) for path in folder.rglob('*') if path.is_file())
    return hashlib.sha256(json.dumps(files).encode()).hexdigest()
