"""One shard of a download: fetched, checked, mended, its failed rows tried again. All of this runs in worker processes.

A shard is what img2dataset writes: `NNNNN.tar`, `NNNNN.parquet` with a line for every URL, `NNNNN_stats.json`. The part of img2dataset
that asks the servers and writes the files is used as it is. The other part, which cuts the list into shards and manages processes,
is not: here a killed worker is noticed, a killed job leaves no process behind, and no shard counts before it has been checked.
"""

from __future__ import annotations

import json
import os
import re
import signal
import tarfile
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from data_prep.crawling import safe_fetch
from diffusion.common.processes import end_with_parent
from diffusion.common.storage import Folder
from diffusion.common.text import counted, one_line

SUFFIXES = ('.tar', '.parquet', '_stats.json')
"""The files of a shard in the order in which they are put to their places: a shard without stats is not there."""
NAME_DIGITS = 5
ADDED = ('key', 'status', 'error_message', 'width', 'height', 'original_width', 'original_height', 'sha256')
"""Columns of the parquet file that the list does not have."""
SUCCESS, NOT_FETCHED = 'success', 'failed_to_download'
OPT_OUTS = ['noai', 'noimageai', 'noindex', 'noimageindex']

FAILED = 'failed to download: '
PRIVATE = 'private address'
FINAL = {'opted out by X-Robots-Tag', 'bad URL', 'not http or https', 'too many redirects'}
"""Reasons that another try must not change, or cannot; so are HTTP statuses below 500 but for these."""
TRANSIENT_STATUSES = {408, 421, 425, 429}
# img2dataset records the text of an exception, and servers have a hand in some. Each becomes one of a few: the first that matches.
REASONS = [
    (r'disallowed by X-Robots-Tag', 'opted out by X-Robots-Tag'),
    (r'^(private address|not http or https|host not found|over [\d.]+ MB|took over [\d.]+ s|not a JPEG, PNG or WebP)$', r'\1'),
    (r'too many redirects', 'too many redirects'),
    (r'Redirection to url', 'not http or https'),
    (r'HTTP Error ([1-5]\d\d)\b', r'HTTP \1'),
    (r'IncompleteRead', 'cut short'),
    (r'timed out', 'timed out'),
    (r'SSL|CERTIFICATE', 'TLS error'),
    (r'Errno|onnection|getresponse', 'connection failed'),
    (r"unknown url type|no host given|codec can't encode|URL can't contain|nonnumeric port|NoneType|Invalid IPv6|label", 'bad URL'),
]


class ShardError(RuntimeError):
    """The files of a shard do not fit together."""


@dataclass(frozen=True)
class Fetching:
    """How pictures are asked for.

    Attributes:
        threads: pictures at a time, in each process.
        timeout: seconds for one picture, in all.
        retries: more tries, at once.
        user_agent: token that User-Agent headers give, and that X-Robots-Tag headers may name.
        limits: what is refused.
    """

    threads: int = 64
    timeout: int = 20
    retries: int = 0
    user_agent: str | None = None
    limits: safe_fetch.Limits = field(default_factory=safe_fetch.Limits)


@dataclass
class Again:
    """Which failed rows of a shard are asked for again: those that wider limits no longer refuse, and on request what may have been a
    passing trouble.

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
        limits = self.fetching.limits
        if reason == f'{FAILED}{PRIVATE}':
            return not set(names_of(limits)) <= set(self.networks)
        if size := too_large(reason):
            return size < limits.max_mb
        return self.transient and may_pass(reason)


@dataclass
class Outcome:
    """What a worker hands back; unless there is a problem, the files of the shard are where it was told to put them."""

    number: int
    stats: dict[str, Any] = field(default_factory=dict)
    num_tried: int = 0
    problem: str = ''


def shard_name(number: int) -> str:
    return f'{number:0{NAME_DIGITS}d}'


def begin_worker(parent: int, log: Path, limits: safe_fetch.Limits) -> None:
    """Prepare this process: it ends with its parent, what img2dataset prints goes to `log`, `urlopen` is guarded."""
    end_with_parent()
    if os.getppid() != parent:  # it died while this process started
        os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent too, which ends this one
    os.environ['NO_ALBUMENTATIONS_UPDATE'] = '1'  # a library that img2dataset imports asks for news at every start
    with log.open('a') as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    safe_fetch.install(limits)


def attempt(task: Callable[..., Outcome], number: int, *args: Any) -> Outcome:
    """`fetch_shard` or `mend_shard`; what goes wrong becomes the outcome's problem, so that other shards can go on."""
    try:
        return task(number, *args)
    except Exception as error:
        traceback.print_exc()
        return Outcome(number, problem=f'shard {shard_name(number)}: {one_line(error)}')


def fetch_shard(number: int, rows: Path, rows_per_shard: int, out: Path, fetching: Fetching) -> Outcome:
    """Download the rows that `write_rows` wrote, and remove them; the files of the shard are then in `out`."""
    with pa.OSFile(str(rows)) as file:
        table = pa.ipc.open_file(file).read_all()
    _download(number, rows, table.column_names, rows_per_shard, out, fetching)
    return Outcome(number, _check(number, table.num_rows, out, names_of(fetching.limits)), table.num_rows)


def mend_shard(number: int, folder: Folder, rows_per_shard: int, out: Path, networks: list[str], again: Again | None) -> Outcome:
    """Write the files of a shard of `folder` anew, in `out`, so that they fit together even if only some of the last writing got through.

    Rows that are due `again` are asked for again. All keys stay as they are.

    Args:
        networks: that were allowed when the shard was written.
    """
    name = shard_name(number)
    with tempfile.TemporaryDirectory(dir=out) as temporary:
        scratch, new_shard = Path(temporary), Path(temporary) / 'again'
        table = _read(folder.fetch(f'{name}.parquet', scratch))
        fetched = table.filter(pc.equal(table['status'], SUCCESS))['key'].to_pylist()
        tars = [(folder.fetch(f'{name}.tar', scratch), dict(zip(fetched, fetched, strict=True)))]
        chosen = pa.array([again is not None and again.due(reason) for reason in reasons(table)], pa.bool_())
        failed = table.filter(chosen)
        if again is not None and failed.num_rows:
            new_shard.mkdir()
            rows = failed.drop_columns(list(ADDED))
            write_rows(rows, scratch / 'rows')
            _download(number, scratch / 'rows', rows.column_names, rows_per_shard, new_shard, again.fetching)
            _check(number, failed.num_rows, new_shard, [])
            new = _read(new_shard / f'{name}.parquet').sort_by('key')  # the order in which the rows were asked for
            tars.append((new_shard / f'{name}.tar', dict(zip(new['key'].to_pylist(), failed['key'].to_pylist(), strict=True))))
            new = new.set_column(new.column_names.index('key'), 'key', failed['key'])
            table = pa.concat_tables([table.filter(pc.invert(chosen)), new.select(table.column_names).cast(table.schema)]).sort_by('key')
        _copy_samples(tars, out / f'{name}.tar')
        pq.write_table(table, out / f'{name}.parquet')
    if again is not None:
        networks = names_of(again.fetching.limits)
    return Outcome(number, _check(number, table.num_rows, out, networks), failed.num_rows)


def write_rows(rows: pa.Table, path: Path) -> None:
    """Write rows for `fetch_shard`: columns `url`, `caption` and any others."""
    with pa.ipc.new_file(str(path), rows.schema) as writer:
        writer.write_table(rows)


def names_of(limits: safe_fetch.Limits) -> list[str]:
    """The networks that are allowed besides the public internet, as a shard's stats remember them."""
    return sorted(map(str, limits.networks))


def too_large(reason: str) -> float | None:
    """The limit in MB, if it was that which refused a row."""
    match = re.fullmatch(rf'{FAILED}over ([\d.]+) MB', reason)
    return float(match[1]) if match else None


def may_pass(reason: str) -> bool:
    """Whether a row that failed for this reason may succeed another time under the same limits."""
    short = reason.removeprefix(FAILED)
    if not reason.startswith(FAILED) or short in {*FINAL, PRIVATE} or too_large(reason):
        return False
    status = re.fullmatch(r'HTTP (\d+)', short)
    return status is None or int(status[1]) >= 500 or int(status[1]) in TRANSIENT_STATUSES


def reasons(table: pa.Table) -> list[str]:
    """For each row of a shard's parquet file, `success` or why there is no picture."""
    rows = zip(table['status'].to_pylist(), table['error_message'].to_pylist(), strict=True)
    shown = {SUCCESS: lambda message: SUCCESS, NOT_FETCHED: lambda message: f'{FAILED}{short_reason(message)}'}
    return [shown.get(status, short_reason)(message) for status, message in rows]


def short_reason(message: str | None) -> str:
    """The text of an exception as one of a few reasons."""
    text = (message or '').removeprefix('<urlopen error ').removesuffix('>')
    return next((match.expand(reason) for pattern, reason in REASONS if (match := re.search(pattern, text))), 'other')


def _download(number: int, rows: Path, columns: list[str], rows_per_shard: int, out: Path, fetching: Fetching) -> None:
    from img2dataset.downloader import Downloader  # seconds, and an extra that most do not have
    from img2dataset.writer import WebDatasetSampleWriter

    Downloader(
        sample_writer_class=WebDatasetSampleWriter,
        resizer=_as_it_came,
        thread_count=fetching.threads,
        save_caption=True,
        extract_exif=False,  # it stays in the picture
        output_folder=str(out),
        column_list=columns,
        timeout=fetching.timeout,
        number_sample_per_shard=rows_per_shard,
        oom_shard_count=NAME_DIGITS,
        compute_hash='sha256',
        verify_hash_type=None,
        encode_format='jpg',
        retries=fetching.retries,
        user_agent_token=fetching.user_agent,
        disallowed_header_directives=OPT_OUTS,
    ).download_shard((number, str(rows)))


def _as_it_came(stream: BytesIO, _: Any) -> tuple[bytes | None, None, None, None, None, str | None]:
    """In place of img2dataset's resizer: the bytes unchanged, unless their beginning shows that they are no picture, such as a web page."""
    content = stream.read()
    if content.startswith((b'\xff\xd8\xff', b'\x89PNG\r\n\x1a\n')) or (content[:4] == b'RIFF' and content[8:12] == b'WEBP'):
        return content, None, None, None, None, None
    return None, None, None, None, None, 'not a JPEG, PNG or WebP'


def _check(number: int, num_rows: int, folder: Path, networks: list[str]) -> dict[str, Any]:
    """Write and return the stats of a shard whose files are all there and agree."""
    tar_path, parquet, stats_path = (folder / f'{shard_name(number)}{suffix}' for suffix in SUFFIXES)
    table = _read(parquet)
    found = len(set(table['key'].to_pylist()))
    if not num_rows == table.num_rows == found:
        raise ShardError(f'asked for {counted(num_rows, "row")}, img2dataset recorded {found}')
    fetched = table.filter(pc.equal(table['status'], SUCCESS))['key'].to_pylist()
    with tarfile.open(tar_path, 'r:') as tar:
        in_tar = [name.removesuffix('.jpg') for name in tar.getnames() if name.endswith('.jpg')]
    if sorted(in_tar) != sorted(fetched):
        raise ShardError(f'recorded: {counted(len(fetched), "picture")}; in the tar: {len(in_tar)}')
    statuses = Counter(table['status'].to_pylist())
    stats = {
        'count': num_rows,
        'successes': statuses[SUCCESS],
        'failed_to_download': statuses[NOT_FETCHED],
        'failed_to_resize': statuses['failed_to_resize'],
        'status_dict': Counter(reasons(table)),
        'networks': networks,
        'bytes': {'.tar': tar_path.stat().st_size, '.parquet': parquet.stat().st_size},
    }
    stats_path.write_text(json.dumps(stats, indent=1))
    return stats


def _read(path: Path) -> pa.Table:
    with pq.ParquetFile(path) as file:
        return file.read()


def _copy_samples(tars: list[tuple[Path, dict[str, str]]], out: Path) -> None:
    """A tar of the samples with these keys, under their new keys."""
    with tarfile.open(out, 'w') as target:
        for path, new_keys in tars:
            with tarfile.open(path, 'r:') as source:
                for member in source:
                    key, _, suffix = member.name.partition('.')
                    file = source.extractfile(member)
                    if key not in new_keys or file is None:
                        continue
                    content = file.read()
                    if suffix == 'json' and new_keys[key] != key:
                        content = json.dumps({**json.loads(content), 'key': new_keys[key]}, indent=4).encode()
                    member.name, member.size = f'{new_keys[key]}.{suffix}', len(content)
                    target.addfile(member, BytesIO(content))
