"""One shard of a crawl: fetched, checked, repaired, its failed rows tried again. All of this runs in worker processes.

A shard has the layout of img2dataset's `webdataset`: `NNNNN.tar` with `.jpg`, `.json` and `.txt` for each image, `NNNNN.parquet` with a line for
every URL, `NNNNN_stats.json`, which is there only for files that have been checked.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import signal
import tarfile
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from data_prep.crawling.fetch import BAD_SCHEME, BAD_URL, OPTED_OUT, PRIVATE, FetchError, Fetching, fetch, open_session
from diffusion.common.processes import end_with_parent
from diffusion.common.storage import Folder, StorageError
from diffusion.common.text import counted, one_line

SUFFIXES = ('.tar', '.parquet', '_stats.json')
"""The files of a shard in the order in which they are put to their places: a shard without stats is not there."""
NAME_DIGITS = 5
ADDED = dict.fromkeys(('key', 'status', 'error_message', 'width', 'height', 'original_width', 'original_height', 'sha256'), pa.string())
ADDED |= dict.fromkeys(('width', 'height', 'original_width', 'original_height'), pa.int32())
"""Columns of the parquet file that the list does not have. Sides are null: nothing is decoded here."""
SUCCESS, NOT_FETCHED, NOT_KEPT = 'success', 'failed_to_download', 'failed_to_resize'  # img2dataset's words

FAILED = 'failed to download: '
FINAL = {OPTED_OUT, BAD_URL, BAD_SCHEME, PRIVATE, 'too many redirects'}
"""Reasons that another try must not change, or cannot; so are HTTP statuses below 500 but for these."""
TRANSIENT_STATUSES = {408, 421, 425, 429}


class ShardError(RuntimeError):
    """The files of a shard do not fit together."""


@dataclass
class Again:
    """Which failed rows of a shard are asked for again: those that wider limits no longer refuse, and on request what may have been transient.

    Attributes:
        fetching: how they are asked for now.
        networks: that were allowed when the shard was written.
        transient: whether to try again what may succeed another time.
    """

    fetching: Fetching
    networks: list[str]
    transient: bool

    def due(self, reason: str) -> bool:
        """Whether a row that failed for this reason is asked for again."""
        if reason == f'{FAILED}{PRIVATE}':
            return not set(names_of(self.fetching)) <= set(self.networks)
        if size := too_large(reason):
            return size < self.fetching.max_mb
        return self.transient and may_pass(reason)


@dataclass
class Outcome:
    """A worker's answer; unless there is a problem, the files of the shard are where it was told to put them."""

    number: int
    stats: dict[str, Any] = field(default_factory=dict)
    num_tried: int = 0
    problem: str = ''


def shard_name(number: int) -> str:
    return f'{number:0{NAME_DIGITS}d}'


def begin_worker(parent: int) -> None:
    """Prepare this process to end with its parent."""
    end_with_parent()
    if os.getppid() != parent:  # it died while this process started
        os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent too, which ends this one


def attempt(task: Callable[..., Outcome], number: int, *args: Any) -> Outcome:
    """`fetch_shard` or `repair_shard`; an error becomes the outcome's problem, so that other shards can continue."""
    try:
        return task(number, *args)
    except Exception as error:
        if not isinstance(error, OSError | ShardError | StorageError):
            traceback.print_exc()
        return Outcome(number, problem=f'shard {shard_name(number)}: {one_line(error)}')


def write_rows(number: int, rows: pa.Table, rows_per_shard: int, path: Path) -> None:
    """Write rows of a list for `fetch_shard`: columns `url`, `caption` and any others, with keys that count through all shards."""
    digits = len(str(rows_per_shard - 1))
    keys = [f'{shard_name(number)}{i:0{digits}d}' for i in range(rows.num_rows)]
    for name, kind in ADDED.items():
        rows = rows.append_column(name, pa.array(keys) if name == 'key' else pa.nulls(rows.num_rows, kind))
    pq.write_table(rows, path)


def fetch_shard(number: int, rows: Path, out: Path, fetching: Fetching) -> Outcome:
    """Download the rows that `write_rows` wrote, and remove them; the files of the shard are then in `out`."""
    table = _read(rows)
    rows.unlink()
    with _new_tar(out / f'{shard_name(number)}.tar') as tar:
        table = _fetch_rows(table, [True] * table.num_rows, tar, fetching)
    pq.write_table(table, out / f'{shard_name(number)}.parquet')
    return Outcome(number, check(number, table.num_rows, out, names_of(fetching)), table.num_rows)


def repair_shard(number: int, folder: Folder, out: Path, networks: list[str], again: Again | None) -> Outcome:
    """Write the files of a shard of `folder` to `out` so that they fit together even if only some of the last writing got through.

    Rows that are due `again` are asked for again. All keys stay.

    Args:
        networks: that were allowed when the shard was written.
    """
    name = shard_name(number)
    with tempfile.TemporaryDirectory(dir=out) as temporary:
        table = _read(folder.fetch(f'{name}.parquet', Path(temporary)))
        fetched = set(table.filter(pc.equal(table['status'], SUCCESS))['key'].to_pylist())
        due = [again is not None and again.due(reason) for reason in reasons(table)]
        with _new_tar(out / f'{name}.tar') as tar:
            with tarfile.open(folder.fetch(f'{name}.tar', Path(temporary)), 'r:') as before:
                for member in before:
                    if member.name.partition('.')[0] in fetched:
                        tar.addfile(member, before.extractfile(member))
            if again is not None and any(due):
                table, networks = _fetch_rows(table, due, tar, again.fetching), names_of(again.fetching)
        pq.write_table(table, out / f'{name}.parquet')
    return Outcome(number, check(number, table.num_rows, out, networks), sum(due))


def names_of(fetching: Fetching) -> list[str]:
    """The networks that are allowed next to the public internet, as a shard's stats remember them."""
    return sorted(map(str, fetching.networks))


def too_large(reason: str) -> float | None:
    """The limit in MB, if it was that which refused a row."""
    match = re.fullmatch(rf'{FAILED}over ([\d.]+) MB', reason)
    return float(match[1]) if match else None


def may_pass(reason: str) -> bool:
    """Whether a row that failed for this reason may succeed another time under the same limits."""
    short = reason.removeprefix(FAILED)
    if not reason.startswith(FAILED) or short in FINAL or too_large(reason):
        return False
    status = re.fullmatch(r'HTTP (\d+)', short)
    return status is None or int(status[1]) >= 500 or int(status[1]) in TRANSIENT_STATUSES


def reasons(table: pa.Table) -> list[str]:
    """For each row of a shard's parquet file, `success` or why there is no image."""
    rows = zip(table['status'].to_pylist(), table['error_message'].to_pylist(), strict=True)
    return [SUCCESS if status == SUCCESS else f'{FAILED}{message}' if status == NOT_FETCHED else message for status, message in rows]


def _fetch_rows(table: pa.Table, due: Iterable[bool], tar: tarfile.TarFile, fetching: Fetching) -> pa.Table:
    """Ask for the rows that are due and add their images to the tar as they come; returns the table with what became of them."""
    rows = table.to_pylist()
    waiting = iter([row for row, is_due in zip(rows, due, strict=True) if is_due])

    async def work_through(session: Any) -> None:
        for row in waiting:  # each of the workers takes the next
            content = b''
            try:
                content = await _tried(session, row['url'], fetching)
                row |= {'status': SUCCESS if _is_image(content) else NOT_KEPT}
                row |= {'error_message': None if _is_image(content) else 'not a JPEG, PNG or WebP'}
            except FetchError as error:
                row |= {'status': NOT_FETCHED, 'error_message': str(error)}
            if row['status'] == SUCCESS:
                row['sha256'] = hashlib.sha256(content).hexdigest()
                _add_sample(tar, row, content)

    async def work() -> None:
        async with open_session(fetching) as session, asyncio.TaskGroup() as group:
            for _ in range(fetching.concurrency):
                group.create_task(work_through(session))

    asyncio.run(work())
    for name in ('status', 'error_message', 'sha256'):
        table = table.set_column(table.column_names.index(name), name, pa.array([row[name] for row in rows], pa.string()))
    return table


async def _tried(session: Any, url: str | None, fetching: Fetching) -> bytes:
    for _ in range(fetching.retries):
        try:
            return await fetch(session, url, fetching)
        except FetchError as error:
            if not may_pass(f'{FAILED}{error}'):
                raise
    return await fetch(session, url, fetching)


def _is_image(content: bytes) -> bool:
    """Whether it begins like one, unlike a web page; `convert` decodes it."""
    return content.startswith((b'\xff\xd8\xff', b'\x89PNG\r\n\x1a\n')) or (content[:4] == b'RIFF' and content[8:12] == b'WEBP')


def _add_sample(tar: tarfile.TarFile, row: dict[str, Any], content: bytes) -> None:
    files = {'jpg': content, 'json': json.dumps(row, indent=4).encode(), 'txt': (row['caption'] or '').encode()}
    for suffix, data in files.items():
        member = tarfile.TarInfo(f'{row["key"]}.{suffix}')
        member.size = len(data)
        tar.addfile(member, BytesIO(data))


def check(number: int, num_rows: int, folder: Path, networks: list[str]) -> dict[str, Any]:
    """Write and return the stats of a shard whose files are all there and agree.

    Raises:
        ShardError: they do not.
    """
    tar_path, parquet, stats_path = (folder / f'{shard_name(number)}{suffix}' for suffix in SUFFIXES)
    table = _read(parquet)
    statuses = Counter(table['status'].to_pylist())
    found = len(set(table['key'].to_pylist()))
    if not num_rows == table.num_rows == found or None in statuses:
        raise ShardError(f'{counted(num_rows, "row")} asked for, {found} recorded')
    fetched = table.filter(pc.equal(table['status'], SUCCESS))['key'].to_pylist()
    with tarfile.open(tar_path, 'r:') as tar:
        in_tar = [name.removesuffix('.jpg') for name in tar.getnames() if name.endswith('.jpg')]
    if sorted(in_tar) != sorted(fetched):
        raise ShardError(f'{counted(len(fetched), "image")} recorded, {len(in_tar)} in the tar')
    stats = {
        'count': num_rows,
        'successes': statuses[SUCCESS],
        'failed_to_download': statuses[NOT_FETCHED],
        'failed_to_resize': statuses[NOT_KEPT],
        'status_dict': Counter(reasons(table)),
        'networks': networks,
        'bytes': {'.tar': tar_path.stat().st_size, '.parquet': parquet.stat().st_size},
    }
    stats_path.write_text(json.dumps(stats, indent=1))
    return stats


@contextmanager
def _new_tar(path: Path) -> Iterator[tarfile.TarFile]:
    """A tar to write. It ends without padding to 10 kB, so that one more sample always changes its size, by which a torn shard is noticed."""
    with tarfile.open(path, 'w') as tar:
        yield tar
        end = tar.offset + 2 * tarfile.BLOCKSIZE
    os.truncate(path, end)


def _read(path: Path) -> pa.Table:
    with pq.ParquetFile(path) as file:
        return file.read()
