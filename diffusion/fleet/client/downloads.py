"""Results of a job on this machine, each file whole or not at all."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import requests

from diffusion.common.files import replacing
from diffusion.common.text import counted
from diffusion.contracts.errors import IncompleteError, InputError
from diffusion.fleet.client.http import PAUSES_SEC, FleetClient, quoted, sleep

CHUNK_BYTES = 1 << 20
TIMEOUT_SEC = (10, 60)


def fetch_results(client: FleetClient, job: str, out: Path, say: Callable[[str], None]) -> None:
    """Download all files of a finished job.

    Raises:
        InputError: it has no results, or the folder holds something else than an earlier fetch of this job.
        IncompleteError: the storage does not answer, or a file arrives damaged; the same command resumes.
    """
    files = client.get(f'/jobs/{quoted(job)}/results')['files']
    others = sorted(
        path for path in out.rglob('*') if path.is_file() and not path.name.startswith('.') and path.relative_to(out).as_posix() not in files
    )
    if others:
        raise InputError(
            f'{out}: holds {counted(len(others), "file")} of something else, such as {others[0].name}; name an empty folder or a new one'
        )
    for number, name in enumerate(sorted(files), 1):
        path = out / name
        if not path.resolve().is_relative_to(out.resolve()):
            raise InputError(f'{name[:80]}: the name leads out of {out}')
        if path.exists():
            if _sha256(path) != files[name]['sha256']:
                raise InputError(f'{path}: another file is there; name another folder')
            continue
        _download(client, job, name, path)
        say(f'{name}: {files[name]["bytes"]:,} bytes, {number} of {counted(len(files), "file")}')


def _download(client: FleetClient, job: str, name: str, path: Path) -> None:
    reason = ''
    for pause in (*PAUSES_SEC, None):
        content: dict[str, Any] = client.get(f'/jobs/{quoted(job)}/results')['files'][name]  # signed again: a URL lives for a quarter of an hour
        try:
            with requests.get(content['url'], stream=True, timeout=TIMEOUT_SEC, allow_redirects=False) as answer:
                if answer.status_code == 200:
                    reason = _receive(answer, content, path)
                    if not reason:
                        return
                else:
                    reason = f'HTTP {answer.status_code}'
        except requests.RequestException as error:
            reason = type(error).__name__
        if pause is not None:
            sleep(pause)
    raise IncompleteError(f'{name}: {reason}; run the same command again')


class _Damaged(Exception):
    pass


def _receive(answer: requests.Response, content: dict[str, Any], path: Path) -> str:
    """Write the body; returns why it was not kept, '' if it was."""
    digest, num_bytes = hashlib.sha256(), 0
    try:
        with replacing(path) as temporary, temporary.open('wb') as file:
            for chunk in answer.iter_content(CHUNK_BYTES):
                num_bytes += len(chunk)
                if num_bytes > content['bytes']:
                    raise _Damaged('more bytes arrive than the job has published')
                digest.update(chunk)
                file.write(chunk)
            if digest.hexdigest() != content['sha256']:
                raise _Damaged('its digest is not the one that the job has published')
            file.flush()
    except _Damaged as error:
        return str(error)
    return ''


def _sha256(path: Path) -> str:
    with path.open('rb') as file:
        return hashlib.file_digest(file, 'sha256').hexdigest()
