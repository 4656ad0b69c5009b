"""Write an MDS data set in parts: one folder an input shard, whole or absent, so that a killed job goes on where it was.

    DEST/00000/shard.00000.mds, index.json, failures.parquet, part.json    one part; renamed into place when complete
    DEST/index.json, failures.parquet, manifest.json                       merged at the end; the manifest last

Run the same command again after any stop: finished parts are kept, the unfinished one is done again.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from streaming import MDSWriter
from tqdm import tqdm

from diffusion.datasets.manifest import Manifest
from diffusion.files import replacing

HASHES = ['sha256']
SHARD_BYTES = 1 << 26
FAILURES_SCHEMA = pa.schema([(name, pa.string()) for name in ('key', 'url', 'reason')])


class DataError(ValueError):
    """The source or DEST cannot be used; the message says which file and what to do."""


@dataclass
class Tally:
    """What became of the rows of a part, or of all parts."""

    attempted: int = 0
    kept: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    min_side_px: int | None = None
    attempted_now: int = 0
    """Rows of parts that this process wrote; the others were there already."""

    def add(self, other: Tally) -> None:
        self.attempted += other.attempted
        self.attempted_now += other.attempted_now
        self.kept += other.kept
        self.dropped.update(other.dropped)
        if other.min_side_px is not None:
            self.min_side_px = min(other.min_side_px, self.min_side_px or other.min_side_px)


class PartTally(Tally):
    """The tally of one part while it is written; keeps the rows left out by name."""

    def __init__(self) -> None:
        super().__init__()
        self.failures: list[dict[str, str]] = []

    def drop(self, key: str, url: str, reason: str) -> None:
        self.attempted += 1
        self.dropped[reason] += 1
        self.failures.append({'key': key, 'url': url, 'reason': reason})

    def keep(self, side_px: int | None = None) -> None:
        self.attempted += 1
        self.kept += 1
        if side_px is not None:
            self.min_side_px = min(side_px, self.min_side_px or side_px)


@dataclass(frozen=True)
class Part:
    """A piece of the input: its name, what identifies it, how many rows it has, and how to read them."""

    name: str
    fingerprint: dict[str, Any]
    num_rows: int
    rows: Callable[[], Iterable[Any]]


Samples = Callable[[Iterable[Any], PartTally], Iterator[dict[str, Any]]]


def write_dataset(
    dest: Path,
    parts: list[Part],
    columns: dict[str, tuple[str, str]],
    settings: dict[str, Any],
    samples: Samples,
    source: dict[str, Any],
    **described: Any,
) -> Tally:
    """Write all parts that are not there yet, then the merged index, failures and manifest; returns the tally of all parts.

    Args:
        columns: MDS encoding and meaning of each column.
        settings: what the result depends on besides the input; a part written with others is refused.
        samples: rows of a part -> samples to write; it tells the tally about each row.
        source: where the data comes from, for the manifest.
        described: what else the manifest says: kind, resolution, encoder ...

    Raises:
        DataError: DEST holds something else, was begun with other settings or input, or is being written by another process.
    """
    code_version = version('diffusion')  # before hours of work: it fails where the package is not installed
    encodings = {name: encoding for name, (encoding, _) in columns.items()}
    refuse_strangers(dest)
    dest.mkdir(parents=True, exist_ok=True)
    with _locked(dest):
        for leftover in dest.glob('.*.tmp'):  # of a process that was killed
            shutil.rmtree(leftover)
        identities = {part.name: {'input': part.fingerprint, 'settings': settings} for part in parts}
        finished = _finished(dest, identities)  # all of them are checked before the first new one is written
        total = Tally()
        with tqdm(total=sum(part.num_rows for part in parts), unit='rows', unit_scale=True, desc=dest.name) as progress:
            for part in parts:
                if part.name in finished:
                    total.add(finished[part.name])
                    progress.update(part.num_rows)
                else:
                    total.add(_write_part(dest / part.name, identities[part.name], part, encodings, samples, progress))
        _merge(dest, [part.name for part in parts])
        fingerprint = hashlib.sha256('\n'.join(repr(part.fingerprint) for part in parts).encode()).hexdigest()
        Manifest(
            columns={name: {'encoding': encoding, 'meaning': meaning} for name, (encoding, meaning) in columns.items()},
            num_samples=total.kept,
            attempted=total.attempted,
            dropped=dict(total.dropped),
            source={**source, 'shards': len(parts), 'fingerprint': fingerprint},
            hashes=HASHES,
            code_version=code_version,
            min_side_px=total.min_side_px,
            **described,
        ).write(dest)
    return total


def refuse_strangers(dest: Path) -> None:
    """Raise DataError unless DEST is a local path that is new, empty, or ours."""
    if ':/' in str(dest):
        raise DataError(f'{dest}: write to a local folder and copy it to object storage with its own tool (aws s3 sync, gsutil rsync)')
    ours = {'index.json', 'manifest.json', 'failures.parquet'}
    present = list(dest.iterdir()) if dest.is_dir() else []
    strangers = sorted(path.name for path in present if path.name not in ours and path.name[0] != '.' and not (path / 'part.json').exists())
    if strangers or (dest.exists() and not dest.is_dir()):
        raise DataError(f'{dest}: holds something else already ({", ".join(strangers[:3]) or "it is a file"}); name a new or empty folder')


@contextmanager
def _locked(dest: Path) -> Iterator[None]:
    """Hold DEST for this process; the lock goes with the process, however it ends."""
    with (dest / '.lock').open('w') as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataError(f'{dest}: another process is writing here; wait for it or stop it') from None
        yield


def _finished(dest: Path, identities: dict[str, dict[str, Any]]) -> dict[str, Tally]:
    """The tallies of the parts that are there, each checked to be of this input and these settings, and whole."""
    finished = {}
    for folder in sorted(path for path in dest.iterdir() if (path / 'part.json').exists()):
        if folder.name not in identities:
            raise DataError(f'{folder}: is a part that the source does not have; was DEST made from another source? Name another DEST')
        content = json.loads((folder / 'part.json').read_text())
        for what, now in json.loads(json.dumps(identities[folder.name])).items():
            then = content[what]
            for key in {**then, **now}:
                if then.get(key) != now.get(key):
                    raise DataError(
                        f'{folder}: was written with {what} {key}={then.get(key)}, now it is {now.get(key)}; delete {dest} or name another DEST'
                    )
        for shard in json.loads((folder / 'index.json').read_text())['shards']:
            file, num_bytes = folder / shard['raw_data']['basename'], shard['raw_data']['bytes']
            if not file.exists() or file.stat().st_size != num_bytes:
                raise DataError(f'{file}: should have {num_bytes} bytes and is missing or has not; delete {folder} and run again')
        finished[folder.name] = Tally(**{**content['tally'], 'dropped': Counter(content['tally']['dropped'])})
    return finished


def _write_part(folder: Path, identity: dict[str, Any], part: Part, encodings: dict[str, str], samples: Samples, progress: tqdm) -> Tally:
    temporary = folder.with_name(f'.{folder.name}.tmp')
    tally = PartTally()

    def counted() -> Iterator[Any]:
        for row in part.rows():
            yield row
            progress.update()

    with MDSWriter(out=str(temporary), columns=encodings, hashes=HASHES, size_limit=SHARD_BYTES, progress_bar=False) as writer:
        for sample in samples(counted(), tally):
            writer.write(sample)
    if tally.attempted != part.num_rows:
        raise DataError(f'{part.name}: {part.num_rows} rows are listed, {tally.attempted} were found; rows share a key, or the shard is damaged')
    pq.write_table(pa.Table.from_pylist(tally.failures, schema=FAILURES_SCHEMA), temporary / 'failures.parquet')
    counts: dict[str, Any] = {'attempted': tally.attempted, 'kept': tally.kept, 'dropped': tally.dropped, 'min_side_px': tally.min_side_px}
    (temporary / 'part.json').write_text(json.dumps({**identity, 'tally': counts}))
    for path in [*temporary.iterdir(), temporary]:  # on disk before the rename says so
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    temporary.rename(folder)
    return Tally(**counts, attempted_now=tally.attempted)


def _merge(dest: Path, names: list[str]) -> None:
    """DEST/index.json, which names the shards of all parts, and DEST/failures.parquet."""
    shards = []
    for name in names:
        for shard in json.loads((dest / name / 'index.json').read_text())['shards']:
            shard['raw_data']['basename'] = f'{name}/{shard["raw_data"]["basename"]}'
            shards.append(shard)
    with replacing(dest / 'index.json') as temporary:
        temporary.write_text(json.dumps({'version': 2, 'shards': shards}))
    with replacing(dest / 'failures.parquet') as temporary, pq.ParquetWriter(temporary, FAILURES_SCHEMA) as writer:
        for name in names:
            writer.write_table(pq.read_table(dest / name / 'failures.parquet', schema=FAILURES_SCHEMA))
