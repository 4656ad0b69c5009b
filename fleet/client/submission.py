"""Jobs from files to the queue, with the folders of photos that they name.

A folder becomes one archive, byte for byte the same wherever and whenever it is packed: its digest is its name in the bucket.
"""

import hashlib
import json
import os
import re
import tarfile
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import requests
import yaml

from diffusion.checkpoints.manifest import sha256_of
from diffusion.common.files import MAX_JSON_BYTES, parse_json_object, read_regular
from diffusion.common.text import counted
from diffusion.contracts.errors import IncompleteError, InputError
from diffusion.recipe.reading import read_yaml, yaml_problem
from fleet.client.http import PAUSES_SEC, FleetClient, sleep
from fleet.jobs.checking import BASE, check_job, judgement_key, queue_mistakes
from fleet.jobs.spec import LARGEST_INPUT_BYTES, NAME_CHARS, JobError, path_of_input, spec_of

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
    """List what no machine could read in an input: said before it is uploaded and a machine is paid for.

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
        return Packed(source, source, sha256_of(source), num_bytes, is_temporary=False)
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
    return Packed(source, archive, sha256_of(archive), num_bytes, is_temporary=True)


def _files(folder: Path) -> list[Path]:
    found = []
    for name, folders, files in os.walk(folder, followlinks=False):
        folders[:] = [inner for inner in folders if not inner.startswith('.')]
        found += [Path(name) / file for file in files if not file.startswith('.') and (Path(name) / file).is_file()]
    return found


def _check_size(source: Path, num_bytes: int) -> None:
    if num_bytes > LARGEST_INPUT_BYTES:
        raise InputError(f'{source}: {num_bytes / (1 << 30):.1f} GB, an input may have {LARGEST_INPUT_BYTES >> 30} GB at most')


# Jobs from files to the queue: folders become uploaded inputs, and jobs go in parts, each of which arrives once however often it is sent.

JOBS_AT_A_TIME = 50  # a request of at most 1 MB and a second or two of checking
MAX_REQUEST_BYTES = 1_000_000
MAX_COMBINATIONS = 1000  # of a grid
UPLOAD_TIMEOUT_SEC = (10, 120)
SAMPLE_URL = 's3://bucket/input.tar'


@dataclass(frozen=True)
class JobDraft:
    """A job as its owner wrote it.

    Attributes:
        folders: inputs that are paths of this machine, by name.
    """

    source: str
    content: dict[str, Any]
    folders: dict[str, Path]


def read_drafts(files: Iterable[Path]) -> tuple[list[JobDraft], list[str]]:
    """The jobs of `.jsonl` files, one a line, and of `.yaml` files, one each; and what is wrong with lines and files that cannot be read.

    Paths of inputs count from the folder of the file that names them.
    """
    drafts, errors = [], list[str]()
    for file in files:
        try:
            text = read_regular(file, MAX_JSON_BYTES).decode()
        except (OSError, ValueError) as error:
            errors.append(f'{file}: {getattr(error, "strerror", None) or error}')
            continue
        is_lines = file.suffix in ('.jsonl', '.ndjson')
        parts = [(f'{file}:{number}', line) for number, line in enumerate(text.splitlines(), 1) if line.strip()] if is_lines else [(str(file), text)]
        if not parts:
            errors.append(f'{file}: there is no job in it')
        for source, part in parts:
            try:
                content = _json_line(part) if is_lines else read_yaml(part)
                if not isinstance(content, dict):
                    raise ValueError('a job is a mapping of keys; --keys prints them')
                drafts.append(draft_of(source, content, file.parent))
            except (ValueError, yaml.YAMLError) as error:
                errors.append(f'{source}: {" ".join(str(error).split())}')
    return drafts, errors


def combined(drafts: list[JobDraft], grid: Sequence[str]) -> list[JobDraft]:
    """Return for each job one for every combination of the values of a grid, named by them and in a group of its own; without a grid the same jobs.

    Args:
        grid: `key=a,b,c` each; values are YAML.

    Raises:
        InputError: one is not of this form, or there are too many combinations.
    """
    values: dict[str, list[Any]] = {}
    for text in grid:
        key, _, given = text.partition('=')
        try:
            values[key] = read_yaml(f'[{given}]')
        except yaml.YAMLError as error:
            raise InputError(f'--grid {text}: {yaml_problem(error).splitlines()[0]}') from error
        if not key or not values[key]:
            raise InputError(f'--grid {text}: write a key of the overrides and its values, such as optimizer.lr=1e-4,5e-5')
    if prod(map(len, values.values())) > MAX_COMBINATIONS:
        raise InputError(f'--grid: {prod(map(len, values.values())):,} combinations a job; at most {MAX_COMBINATIONS} may be')
    found = []
    for draft in drafts if values else []:
        name = str(draft.content.get('name') or Path(draft.source.partition(':')[0]).stem)
        for number, chosen in enumerate(product(*values.values()), 1):
            overrides = dict(zip(values, chosen, strict=True))
            said = '-'.join(f'{key.rpartition(".")[2]}{value}' for key, value in overrides.items())
            title = re.sub(r'[^A-Za-z0-9._-]', '', f'{name}-{said}')
            title = title if len(title) <= NAME_CHARS else f'{name[: NAME_CHARS - 5]}-{number}'
            overrides = {**(draft.content.get('overrides') or {}), **overrides}
            content = {**draft.content, 'name': title, 'group': name[:NAME_CHARS], 'overrides': overrides}
            found.append(replace(draft, source=f'{draft.source} ({said})', content=content))
    return found if values else drafts


def _json_line(text: str) -> dict[str, Any]:
    """Raises ValueError: it is no JSON object, or says a key twice, of which JSON takes the last."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        twice = [key for key, num in Counter(key for key, _ in pairs).items() if num > 1]
        if twice:
            raise ValueError(f"the key '{twice[0][:80]}' comes twice; leave one out")
        return dict(pairs)

    content = parse_json_object(text)
    json.loads(text, object_pairs_hook=unique)
    return content


def draft_of(source: str, content: dict[str, Any], folder: Path) -> JobDraft:
    """A job whose inputs may be paths, alone or as `{path: ...}`.

    Raises:
        ValueError: an input is neither a path nor a mapping.
    """
    inputs, folders = content.get('inputs'), {}
    if isinstance(inputs, dict):
        for name, given in inputs.items():
            path = path_of_input(given, folder)
            if path is not None:
                folders[name] = path
            elif not isinstance(given, dict):
                raise ValueError(f'inputs.{name}: a path, or a mapping with url, sha256 and bytes is wanted')
    return JobDraft(source, content, folders)


def input_errors(drafts: Iterable[JobDraft]) -> list[str]:
    """List what is wrong with paths of this machine that jobs name."""
    known: dict[tuple[bool, Path], list[str]] = {}
    errors = list[str]()
    for draft in drafts:
        for name, path in draft.folders.items():
            kind = (name == BASE, path)
            if kind not in known:
                known[kind] = input_mistakes(name, path)
            errors += [f'{draft.source}: inputs.{name}: {mistake}' for mistake in known[kind]]
    return errors


def check_drafts(drafts: Iterable[JobDraft], recipes: Path, errors: Sequence[str] = ()) -> None:
    """Judge jobs against the recipes of this machine, as the service would against its own.

    Args:
        errors: found until now.

    Raises:
        InputError: those, and every mistake of all jobs.
    """
    errors, seen = list(errors), set[str]()
    for draft in drafts:
        try:
            spec = spec_of(completed(draft, {name: {'url': SAMPLE_URL, 'sha256': '0' * 64, 'bytes': 0} for name in draft.folders}), draft.source)
            errors += [f'{draft.source}: {mistake}' for mistake in queue_mistakes(spec)]
            judged = judgement_key(spec)
            if judged not in seen:
                check_job(spec, draft.source, recipes)
                seen.add(judged)
        except JobError as error:
            errors += [f'{draft.source}: {mistake}' for mistake in error.errors]
    if errors:
        raise InputError('\n'.join([*errors, f'{counted(len(errors), "mistake")}; nothing was submitted']))


def completed(draft: JobDraft, inputs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The job with uploaded inputs in place of paths."""
    return {**draft.content, **({'inputs': {**draft.content['inputs'], **inputs}} if inputs else {})}


def upload_folders(client: FleetClient, drafts: Iterable[JobDraft], scratch: Path, say: Callable[[str], None]) -> dict[Path, dict[str, Any]]:
    """Upload each folder once, unless its very bytes are there already; returns what a job says of it: {url, sha256, bytes}.

    Raises:
        InputError: a folder is missing, empty or too large, or the service refuses it.
        IncompleteError: the storage does not answer.
    """
    folders = list(dict.fromkeys(path for draft in drafts for path in draft.folders.values()))
    inputs, num_new = {}, 0
    begin = time.monotonic()
    for number, path in enumerate(folders, 1):
        packed = pack(path, scratch)
        try:
            inputs[path], is_new = upload(client, packed)
        finally:
            if packed.is_temporary:
                packed.path.unlink(missing_ok=True)
        num_new += is_new
        if is_new:
            say(f'{number:,} of {counted(len(folders), "input")} uploaded{time_left(begin, number, len(folders))}')
    if folders and not num_new:
        say(f'nothing to upload: {counted(len(folders), "input")} of these jobs {"is" if len(folders) == 1 else "are"} there already')
    return inputs


def upload(client: FleetClient, packed: Packed) -> tuple[dict[str, Any], bool]:
    """Bring an archive to the bucket; returns {url, sha256, bytes}, and whether it had to be sent.

    Raises:
        InputError: the storage refuses it.
        IncompleteError: it does not answer.
    """
    reason = ''
    for pause in (*PAUSES_SEC, None):
        answer = client.post('/inputs', {'sha256': packed.sha256, 'bytes': packed.num_bytes})
        put = answer.get('put')
        if put is None:
            return answer['input'], bool(reason)
        try:
            with packed.path.open('rb') as file:
                # A file without bytes would be sent in chunks, without the length that is in the signature.
                response = requests.put(
                    put['url'], data=file if packed.num_bytes else b'', headers=put['headers'], timeout=UPLOAD_TIMEOUT_SEC, allow_redirects=False
                )
        except requests.RequestException as error:
            reason = type(error).__name__
        else:
            if response.status_code in (200, 201, 204, 412):  # 412: it is there, by a request whose answer was lost
                return answer['input'], True
            reason = f'HTTP {response.status_code}'
            if response.status_code < 500 and response.status_code not in (408, 409, 429):
                remedy = 'its bucket is missing; tell the operator' if response.status_code == 404 else 'is the clock of this machine right?'
                raise InputError(f'{packed.source}: the storage refuses it: {reason}; {remedy}')
        if pause is not None:
            sleep(pause)
    raise IncompleteError(f'{packed.source}: the storage does not answer: {reason}; run the same command again')


def submit_jobs(client: FleetClient, jobs: list[dict[str, Any]], key: str, say: Callable[[str], None]) -> list[str]:
    """Queue the jobs and return their ids, in order. The same jobs with the same `key` again are the same jobs.

    Raises:
        InputError: the service refuses a job; those of earlier parts are queued.
        IncompleteError: it does not answer; the same command resumes.
    """
    lines = [json.dumps(job, sort_keys=True, ensure_ascii=False) for job in jobs]
    ids = list[str]()
    begin = time.monotonic()
    for number, part in enumerate(parts_of(lines)):
        body = '\n'.join(part).encode()
        # The number, as a file may have the same fifty jobs twice.
        name = hashlib.sha256(b'\0'.join([key.encode(), str(number).encode(), body])).hexdigest()
        try:
            answer = client.ask('POST', '/jobs', data=body, headers={'Idempotency-Key': name, 'Content-Type': 'application/x-ndjson'})
        except InputError as error:
            before = f'\n{counted(len(ids), "job")} before these are queued; correct the others and run the command again: none is queued twice'
            raise InputError(f'jobs {len(ids) + 1:,} to {len(ids) + len(part):,}: {error}{before if ids else ""}') from error
        ids += answer['jobs']
        say(f'{len(ids):,} of {counted(len(lines), "job")} submitted{time_left(begin, len(ids), len(lines))}')
    return ids


def parts_of(lines: Iterable[str]) -> Iterator[list[str]]:
    """Lines in parts that one request may carry."""
    part, num_bytes = list[str](), 0
    for line in lines:
        size = len(line.encode()) + 1
        if part and (len(part) == JOBS_AT_A_TIME or num_bytes + size > MAX_REQUEST_BYTES):
            yield part
            part, num_bytes = [], 0
        part.append(line)
        num_bytes += size
    if part:
        yield part


def time_left(begin: float, done: int, num: int) -> str:
    """`, 3 min left` while something is."""
    sec = (time.monotonic() - begin) / done * (num - done)
    if sec < 2:
        return ''
    return f', {sec:.0f} s left' if sec < 100 else f', {sec / 60:.0f} min left'
