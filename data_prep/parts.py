"""Write an MDS data set in parts: one folder an input shard, whole or absent, so that a killed job goes on where it was.

    DEST/00000/shard.00000.mds, index.json, part.json    one part; renamed into place when complete
    DEST/index.json, manifest.json, failures.parquet     merged at the end; the manifest last

Run the same command again after any stop: finished parts are kept, the unfinished one is done again.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from streaming import MDSWriter
from streaming.base.util import merge_index
from tqdm import tqdm

HASHES = ['sha256']
SHARD_BYTES = 1 << 26


class PartsError(ValueError):
    """DEST cannot be continued."""


@dataclass
class Tally:
    """What became of the rows of a part, or of all parts."""

    attempted: int = 0
    kept: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    failures: list[dict[str, str]] = field(default_factory=list)
    min_side_px: int | None = None

    def drop(self, key: str, url: str, reason: str) -> None:
        self.attempted += 1
        self.dropped[reason] += 1
        self.failures.append({'key': key, 'url': url, 'reason': reason})

    def keep(self, side_px: int | None = None) -> None:
        self.attempted += 1
        self.kept += 1
        if side_px is not None:
            self.min_side_px = min(side_px, self.min_side_px or side_px)

    def add(self, other: Tally) -> None:
        self.attempted += other.attempted
        self.kept += other.kept
        self.dropped.update(other.dropped)
        self.failures += other.failures
        if other.min_side_px is not None:
            self.min_side_px = min(other.min_side_px, self.min_side_px or other.min_side_px)


@dataclass(frozen=True)
class Part:
    """One input shard: its name, what identifies it, how many rows it has, and how to read them."""

    name: str
    fingerprint: dict[str, Any]
    num_rows: int
    rows: Callable[[], Iterable[Any]]


def write_parts(
    dest: Path,
    parts: list[Part],
    columns: dict[str, str],
    settings: dict[str, Any],
    samples: Callable[[Iterable[Any], Tally], Iterator[dict[str, Any]]],
    unit: str = 'rows',
) -> Tally:
    """Write all parts that are not there yet, then the merged index and `failures.parquet`; returns the tally of all parts.

    Args:
        columns: MDS encodings.
        settings: what the result depends on besides the input; a part written with others is refused.
        samples: rows of a part -> samples to write; it tells the Tally about each row.

    Raises:
        PartsError: DEST holds something else, was begun with other settings, or its input has changed since.
    """
    refuse_strangers(dest)
    dest.mkdir(parents=True, exist_ok=True)
    total = Tally()
    with tqdm(total=sum(part.num_rows for part in parts), unit=unit, unit_scale=True, desc=dest.name) as progress:
        for part in parts:
            folder = dest / part.name
            identity = {'input': part.fingerprint, 'settings': settings}
            if not folder.exists():
                _write_part(folder, identity, part, columns, samples, progress)
            else:
                progress.update(part.num_rows)
            total.add(_read_part(folder, identity))
    unknown = sorted(
        path.name for path in dest.iterdir() if path.is_dir() and not path.name.startswith('.') and path.name not in {part.name for part in parts}
    )
    if unknown:
        raise PartsError(f'{dest}: holds parts that the source no longer has: {", ".join(unknown[:5])}; use another DEST')
    _merge_indexes(dest, parts)
    rows = pa.Table.from_pylist(total.failures, schema=pa.schema([(name, pa.string()) for name in ('key', 'url', 'reason')]))
    pq.write_table(rows, dest / 'failures.parquet')
    return total


def _merge_indexes(dest: Path, parts: list[Part]) -> None:
    """Write DEST/index.json, which names the shards of all parts; the old one is replaced in one step."""
    with tempfile.TemporaryDirectory(dir=dest, prefix='.merge-') as temporary:
        # merge_index writes into an empty folder only.
        merge_index([str(dest / part.name / 'index.json') for part in parts], out=temporary)
        os.replace(Path(temporary, 'index.json'), dest / 'index.json')


def refuse_strangers(dest: Path) -> None:
    """Raise PartsError unless DEST is a local path that is new, empty, or ours."""
    if '://' in str(dest) or ':/' in str(dest):
        raise PartsError(f'{dest}: write to a local folder and copy it to object storage with its own tool (aws s3 sync, gsutil rsync)')
    ours = {'index.json', 'manifest.json', 'failures.parquet'}
    strangers = [
        path.name
        for path in (dest.iterdir() if dest.is_dir() else [])
        if not (path.name in ours or path.name.startswith('.') or (path / 'part.json').exists())
    ]
    if strangers or (dest.exists() and not dest.is_dir()):
        raise PartsError(f'{dest}: holds something else already ({", ".join(sorted(strangers)[:3]) or "a file"}); name a new or empty folder')


def _write_part(folder: Path, identity: dict[str, Any], part: Part, columns: dict[str, str], samples: Callable, progress: tqdm) -> None:
    temporary = folder.with_name(f'.{folder.name}.tmp')
    shutil.rmtree(temporary, ignore_errors=True)  # of a process that was killed
    tally = Tally()

    def counted() -> Iterator[Any]:
        for row in part.rows():
            yield row
            progress.update()

    with MDSWriter(out=str(temporary), columns=columns, hashes=HASHES, size_limit=SHARD_BYTES, progress_bar=False) as writer:
        for sample in samples(counted(), tally):
            writer.write(sample)
    (temporary / 'part.json').write_text(json.dumps({**identity, 'tally': vars(tally)}))
    temporary.rename(folder)


def _read_part(folder: Path, identity: dict[str, Any]) -> Tally:
    content = json.loads((folder / 'part.json').read_text())
    for what, value in json.loads(json.dumps(identity)).items():
        if content[what] != value:
            odd = next(key for key in {**content[what], **value} if content[what].get(key) != value.get(key))
            raise PartsError(
                f'{folder}: was written with {what} {odd}={content[what].get(odd)}, now it is {value.get(odd)}; '
                f'delete {folder.parent} or name another DEST'
            )
    tally = content['tally']
    return Tally(**{**tally, 'dropped': Counter(tally['dropped'])})


def closing_table(dest: Path, tally: Tally, num_bytes: int, seconds: float) -> str:
    """What a job ends with."""
    share = 100 / max(1, tally.attempted)
    lines = [('attempted', tally.attempted, ''), ('kept', tally.kept, f'{tally.kept * share:.1f} %')]
    lines += [(f'dropped: {reason}', count, f'{count * share:.1f} %') for reason, count in tally.dropped.most_common()]
    width = max(len(label) for label, *_ in lines)
    table = [f'  {label:<{width}}  {count:>12,}  {note:>7}' for label, count, note in lines]
    rate = tally.attempted / max(seconds, 1e-9)
    return '\n'.join([str(dest), *table, f'  {num_bytes / 1e6:,.1f} MB of shards, {seconds:.1f} s, {rate:,.0f} rows/s'])


def dataset_bytes(dest: Path) -> int:
    return sum(path.stat().st_size for path in dest.rglob('*.mds'))


class Stopwatch:
    """Seconds since it was made."""

    def __init__(self) -> None:
        self.start = time.monotonic()

    def seconds(self) -> float:
        return time.monotonic() - self.start
