"""One shard of a crawl: fetched, checked, repaired, its failed rows tried again. All of this runs in worker processes.

A shard has the layout of img2dataset's `webdataset`: `NNNNN.tar` with `.jpg`, `.json` and `.txt` for each image, `NNNNN.parquet` with a line for
every URL, `NNNNN_stats.json`, which is there only for files that have been checked.
"""

import asyncio
import hashlib
import json
import os
import re
import tarfile
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from data_prep.crawling.fetch import BAD_SCHEME, BAD_URL, OPTED_OUT, PRIVATE, FetchError, Fetching, fetch, open_session
from diffusion.common.storage import Folder, StorageError
from diffusion.common.text import counted, one_line

SUFFIXES = ('.tar', '.parquet', '_stats.json')
"""The files of a shard in the order in which they are put to their places: a shard without stats is not there."""
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


class CrawlTask(NamedTuple):
    """A shard to write."""

    number: int  # in its list
    rows: Path | None = None  # what `write_rows` wrote, for a shard that is to be downloaded; None for one that is there and is to be written again
    networks: Sequence[str] = ()  # that were allowed when the one that is there was written
    asks_again: bool = False  # whether failed rows of that one are asked for again (`ShardWriter.is_due`)


@dataclass
class Outcome:
    """A worker's answer; unless there is a problem, the files of the shard are where it was told to put them."""

    number: int
    stats: dict[str, Any] = field(default_factory=dict)
    num_tried: int = 0
    problem: str = ''


@dataclass(frozen=True)
class ShardWriter:
    """Writes shards; goes to the worker processes."""

    folder: Folder  # where shards are that are written again
    out: Path  # local, for the files of the shards
    fetching: Fetching
    retry_failed: bool  # whether to ask again for what may succeed another time

    def __call__(self, task: CrawlTask) -> Outcome:
        """Write a shard; an error becomes the outcome's problem, so that other shards can continue."""
        try:
            return self._write(task)
        except Exception as error:
            if not isinstance(error, OSError | ShardError | StorageError):
                traceback.print_exc()
            return Outcome(task.number, problem=f'shard {shard_name(task.number)}: {one_line(error)}')

    def is_due(self, reason: str, networks: Sequence[str]) -> bool:
        """Whether a row that failed for this reason, when these networks were allowed, is asked again: wider limits let it pass, or it may now."""
        if reason == f'{FAILED}{PRIVATE}':
            return not set(self.fetching.network_names) <= set(networks)
        if size := too_large(reason):
            return size < self.fetching.max_mb
        return self.retry_failed and may_pass(reason)

    def _write(self, task: CrawlTask) -> Outcome:
        """Write files that fit together, also if only some of the last writing got through. All keys stay."""
        name, networks = shard_name(task.number), task.networks
        with TemporaryDirectory(dir=self.out) as temporary, _new_tar(self.out / f'{name}.tar') as tar:
            if task.rows is not None:
                table = _read(task.rows)
                task.rows.unlink()
                due = [True] * table.num_rows
            else:
                table = _read(self.folder.fetch(f'{name}.parquet', Path(temporary)))
                fetched = set(table.filter(pc.equal(table['status'], SUCCESS))['key'].to_pylist())
                due = [task.asks_again and self.is_due(reason, networks) for reason in reasons(table)]
                with tarfile.open(self.folder.fetch(f'{name}.tar', Path(temporary)), 'r:') as before:
                    for member in before:
                        if member.name.partition('.')[0] in fetched:
                            tar.addfile(member, before.extractfile(member))
            if any(due):
                table, networks = _fetch_rows(table, due, tar, self.fetching), self.fetching.network_names
        pq.write_table(table, self.out / f'{name}.parquet')
        return Outcome(task.number, check(task.number, table.num_rows, self.out, networks), sum(due))


def shard_name(number: int) -> str:
    return f'{number:05d}'


def write_rows(number: int, rows: pa.Table, rows_per_shard: int, folder: Path) -> Path:
    """Write rows of a list for a worker: columns `url`, `caption` and any others, with keys that count through all shards."""
    digits = len(str(rows_per_shard - 1))
    keys = [f'{shard_name(number)}{i:0{digits}d}' for i in range(rows.num_rows)]
    for name, kind in ADDED.items():
        rows = rows.append_column(name, pa.array(keys) if name == 'key' else pa.nulls(rows.num_rows, kind))
    pq.write_table(rows, folder / f'{shard_name(number)}.rows')
    return folder / f'{shard_name(number)}.rows'


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
    """`success`, or why there is no image, for each row of a shard's parquet file."""
    rows = zip(table['status'].to_pylist(), table['error_message'].to_pylist(), strict=True)
    return [SUCCESS if status == SUCCESS else f'{FAILED}{message}' if status == NOT_FETCHED else message for status, message in rows]


def _fetch_rows(table: pa.Table, due: Iterable[bool], tar: tarfile.TarFile, fetching: Fetching) -> pa.Table:
    """Ask for the rows that are due and add their images to the tar as they come; returns the table with what became of them."""
    rows = table.to_pylist()
    waiting = iter([row for row, is_due in zip(rows, due, strict=True) if is_due])

    async def tried(session: Any, url: str | None) -> bytes:
        for _ in range(fetching.retries):
            try:
                return await fetch(session, url, fetching)
            except FetchError as error:
                if not may_pass(f'{FAILED}{error}'):
                    raise
        return await fetch(session, url, fetching)

    async def work_through(session: Any) -> None:
        for row in waiting:  # each of the workers takes the next
            try:
                content = await tried(session, row['url'])
            except FetchError as error:
                row |= {'status': NOT_FETCHED, 'error_message': str(error)}
                continue
            begins_like_an_image = content.startswith((b'\xff\xd8\xff', b'\x89PNG\r\n\x1a\n')) or (content[:4], content[8:12]) == (b'RIFF', b'WEBP')
            if not begins_like_an_image:  # but like a web page; `convert` decodes what is kept
                row |= {'status': NOT_KEPT, 'error_message': 'not a JPEG, PNG or WebP'}
                continue
            row |= {'status': SUCCESS, 'error_message': None, 'sha256': hashlib.sha256(content).hexdigest()}
            for suffix, data in {'jpg': content, 'json': json.dumps(row, indent=4).encode(), 'txt': (row['caption'] or '').encode()}.items():
                member = tarfile.TarInfo(f'{row["key"]}.{suffix}')
                member.size = len(data)
                tar.addfile(member, BytesIO(data))

    async def work() -> None:
        async with open_session(fetching) as session, asyncio.TaskGroup() as group:
            for _ in range(fetching.concurrency):
                group.create_task(work_through(session))

    asyncio.run(work())
    for name in ('status', 'error_message', 'sha256'):
        table = table.set_column(table.column_names.index(name), name, pa.array([row[name] for row in rows], pa.string()))
    return table


def check(number: int, num_rows: int, folder: Path, networks: Sequence[str]) -> dict[str, Any]:
    """Write and return the stats of a shard whose files are all there and agree. Raises ShardError: they do not."""
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
        'networks': list(networks),
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
