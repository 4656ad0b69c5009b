"""An MDS dataset while it is being written by any number of processes on any number of hosts.

    DEST/job.json                               what the result depends on; written first, the same for all processes that write here
    DEST/[STREAM/]PART/shard.00000.mds          the samples of one piece of the input
    DEST/parts/PART.json, PART.failures.parquet that part's marker, written last, with a digest of job.json; the rows it left out
    DEST/[STREAM/]index.json, failures.parquet  merged from the markers once all parts are there
    DEST/[STREAM/]manifest.json                 last of all

Run the same command again after any stop: finished parts are kept, the unfinished ones are done again. The shards of a part go to their places
first and its marker last, so a part is there when its marker is. A part written twice is the same twice.
"""

import hashlib
import json
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from data_prep.mds.job import ALONE, Job, Share, Tally, compare
from data_prep.mds.oddities import IDENTICAL, REPEATED, Repeats
from diffusion import __version__
from diffusion.common.files import parse_json
from diffusion.common.processes import quick_imports
from diffusion.common.storage import NUM_REQUESTS, Folder, Stat, scratch_for, sweep, write
from diffusion.contracts.errors import DataError, IncompleteError
from diffusion.contracts.manifest import INDEX_NAME, MANIFEST_NAME, Manifest
from diffusion.datasets.shards import in_stream

Item = TypeVar('Item')
HASHES = ['sha256']
FAILURES_SCHEMA = pa.schema([(name, pa.string()) for name in ('key', 'url', 'reason')])
PARTS = 'parts'
MAX_PART_BYTES = 200  # with .failures.parquet and what temporary files add
ROWS_PER_GROUP = 1 << 16  # of failures.parquet; each group costs memory until the file is closed
Columns = Mapping[str, tuple[str, str]]
"""MDS encoding and meaning of each column."""


class PartWriter:
    """Collects the samples and failures of one part in a scratch folder, until it is closed; `commit` makes them a part of DEST.

    Args:
        job: the dataset, and what it depends on.
        name: of the part.
        columns: of each stream; a dataset that is one stream has the name ''.
        shard_bytes: size at which a shard is closed.

    Attributes:
        scratch: the local folder, on DEST's file system if DEST is local; also for copies of what the part is read from.
    """

    def __init__(self, job: Job, name: str, columns: Mapping[str, Columns], shard_bytes: int):
        self.job, self.dest, self.name, self.columns, self.shard_bytes = job, job.dest, name, columns, shard_bytes
        self._open = ExitStack()
        self.scratch = self._open.enter_context(scratch_for(job.dest))
        self.tally = Tally()
        self.failures: list[dict[str, str]] = []
        self.hashes: list[bytes] = []
        self._writers: dict[str, Any] = {}

    def close(self) -> None:
        """Remove the scratch folder."""
        self._open.close()

    def keep(self, sample: dict[str, Any], stream: str = '', side_px: int | None = None, hashes: bytes = b'') -> None:
        """Write a sample; `side_px` is the shorter side of its image, `hashes` are its `content_hashes` if repeats are to be counted."""
        if stream not in self._writers:
            with quick_imports():
                from streaming import MDSWriter  # imports torch; the process that only shares out the work does not need it

            encodings = {column: encoding for column, (encoding, _) in self.columns[stream].items()}
            out = str(self.scratch / 'streams' / stream)
            self._writers[stream] = MDSWriter(out=out, columns=encodings, hashes=HASHES, size_limit=self.shard_bytes, progress_bar=False)
        self._writers[stream].write(sample)
        self.tally.keep(stream, side_px)
        self.hashes.append(hashes)

    def drop(self, key: str, url: str, reason: str) -> None:
        """Count a row that is left out, and remember which."""
        self.tally.dropped[reason] += 1
        self.failures.append({'key': key, 'url': url, 'reason': reason})

    def commit(self, identity: dict[str, Any]) -> Tally:
        """Move everything to DEST; `identity` is what the part's input was. Raises DataError: DEST belongs to a job with other settings by now."""
        self.job.claim()
        streams = {}
        for stream, writer in self._writers.items():
            writer.finish()
            folder = self.scratch / 'streams' / stream
            written = parse_json((folder / 'index.json').read_text())['shards']
            entries = [entry for entry in written if entry['samples']]  # a first sample larger than a shard leaves an empty one
            for entry in entries:
                raw = entry['raw_data']
                source, raw['basename'] = folder / raw['basename'], f'{self.name}/{raw["basename"]}'
                self.tally.num_bytes += raw['bytes']
                self.dest.put(source, in_stream(stream, raw['basename']))
            streams[stream] = entries
        schema = FAILURES_SCHEMA.with_metadata({'hashes': b''.join(self.hashes)})
        pq.write_table(pa.Table.from_pylist(self.failures, schema=schema), self.scratch / 'failures.parquet')
        self.dest.put(self.scratch / 'failures.parquet', f'{PARTS}/{self.name}.failures.parquet')
        marker = {'settings': self.job.digest, 'input': identity, 'streams': streams, 'tally': self.tally.to_json()}
        write(self.dest, f'{PARTS}/{self.name}.json', json.dumps(marker).encode())
        self.tally.attempted_now = self.tally.attempted
        return self.tally


@dataclass
class Dataset(Generic[Item]):
    """DEST and all that its manifest will say."""

    dest: Folder  # where it is
    parts: Mapping[str, Item]  # what each part is made from, by the names of all parts, in the order of the data
    identify: Callable[[Item], dict[str, Any]]  # what the input of a part is now
    columns: Mapping[str, Columns]  # of each stream
    settings: dict[str, Any]  # what the result depends on apart from the input; they must stay the same from the first process to the last
    described: dict[str, Any]  # what the manifest says of all streams: kind, source, transform ...
    described_by_stream: Mapping[str, dict[str, Any]] = field(default_factory=dict)  # what it says of one: resolution, bucket ...

    def __post_init__(self) -> None:
        self.job = Job(self.dest, self.settings)
        if too_long := next((part for part in self.parts if len(part.encode()) > MAX_PART_BYTES), None):
            what = f'part {too_long[:40]} ... is named after a file of the source, with {len(too_long.encode())} bytes'
            raise DataError(
                f'{self.dest.url}: {what}; names of files end at 255, of parts at {MAX_PART_BYTES}: shorten the names of files and folders'
            )

    def complete(self, write: Callable[[list[Item]], Iterable[Tally]], share: Share) -> Tally:
        """Write the parts of this share that are missing, and merge when all parts are there; returns what became of the rows.

        Args:
            write: makes the parts of these items, each by a PartWriter, in any order; yields their tallies. The same part is the same
                whenever, wherever and however often it is written.

        Raises:
            DataError, IncompleteError: as `missing` and `finish`.
        """
        now = Tally()
        for tally in () if share.merge_only else write([self.parts[part] for part in self.missing(share)]):
            now.add(tally)
        if share.launched and share.rank > 0:
            return now
        if share.launched:
            self.wait()
        return self.finish(ALONE if share.merge_only or share.launched else share, now)

    def missing(self, share: Share) -> list[str]:
        """The parts of this share that are not there yet. Those that are there are checked to be of this input, and whole.

        Raises:
            DataError: a part was made from another input.
        """
        files = self.dest.files()
        present = _parts_in(files)
        for part in sorted(present - set(self.parts)):
            if self._marker(part)['settings'] == self.job.digest:
                raise DataError(
                    f'{self.dest.url}: has the part {part}, which the source does not have; was it made from another source? Name another DEST'
                )
            self.dest.delete(f'{PARTS}/{part}.json')  # of a job that kept nothing, and that this one has replaced
        mine = share.of(list(self.parts))
        there = [part for part in mine if part in present]
        with ThreadPoolExecutor(NUM_REQUESTS) as threads:
            faults = {part: fault for part, fault in zip(there, threads.map(partial(self._fault, files=files), there), strict=True) if fault}
        for part, fault in faults.items():
            print(f'{self.dest.url}: part {part} {fault} and is written again', file=sys.stderr)
            self.dest.delete(f'{PARTS}/{part}.json')
        return [part for part in mine if part not in present or part in faults]

    def _fault(self, part: str, files: Mapping[str, Stat]) -> str:
        """Return why a part does not count although its marker is there: other settings, or a file that is missing or has another size."""
        try:
            marker = self._marker(part)
        except ValueError:
            return 'has a damaged marker'
        if marker['settings'] != self.job.digest:
            return 'was written with other settings'
        compare(marker['input'], self.identify(self.parts[part]), f'{self.dest.url}: part {part} was written with input', 'name another DEST')
        sizes = {
            in_stream(stream, entry['raw_data']['basename']): entry['raw_data']['bytes']
            for stream, entries in marker['streams'].items()
            for entry in entries
        }
        whole = all(name in files and files[name].num_bytes == num_bytes for name, num_bytes in sizes.items())
        return '' if whole and f'{PARTS}/{part}.failures.parquet' in files else 'has lost a file'

    def wait(self, patience_sec: float = 1800, poll_sec: float = 5) -> None:
        """Wait until other ranks have written their parts, or none of them has for `patience_sec`."""
        present, since = set[str](), time.monotonic()
        while time.monotonic() - since < patience_sec:
            before, present = present, _parts_in(self.dest.files(PARTS))
            if present >= set(self.parts):
                return
            since = time.monotonic() if present != before else since
            threading.Event().wait(poll_sec)

    def finish(self, share: Share, now: Tally) -> Tally:
        """Merge if all parts are there; the tally of all parts that are, with what was done `now`.

        Raises:
            IncompleteError: parts are missing that no other host is there for, or were written by a job with other settings.
            DataError: DEST belongs to another job by now.
        """
        self.job.claim()
        present = _parts_in(self.dest.files(PARTS))
        lacking = [part for part in self.parts if part not in present]
        total = Tally(attempted_now=now.attempted_now)
        if not lacking:
            self._merge(total)
            return total
        mine = share.of(list(self.parts))
        if set(lacking) & set(mine):
            raise IncompleteError(f'{self.dest.url}: {len(lacking)} of {len(self.parts)} parts are not written, {lacking[0]} for one; run again')
        for part in mine:
            if part in present:
                total.add(Tally.from_json(self._own_marker(part)['tally']))
        total.remarks.append(
            f'  The counts are of rank {share.rank}. {len(lacking)} of {len(self.parts)} parts belong to other ranks and are not there yet; '
            'the last one to finish merges.'
        )
        return total

    def _merge(self, total: Tally) -> None:
        """Write index, failures and manifest. Memory holds the index, as it does wherever the dataset is read, but not the failures."""
        sweep(self.dest)  # a process that was dying when this one began
        entries_of = {stream: list[str]() for stream in self.columns}
        repeats = {IDENTICAL: Repeats(), REPEATED: Repeats()}
        inputs = hashlib.sha256()
        with scratch_for(self.dest) as scratch:
            waiting: list[pa.Table] = []
            with pq.ParquetWriter(scratch / 'failures.parquet', FAILURES_SCHEMA) as failures:
                for part, marker, failed, hashes in self._markers(scratch):
                    total.add(Tally.from_json(marker['tally']))
                    inputs.update(f'{part} {json.dumps(marker["input"], sort_keys=True)}\n'.encode())
                    for stream, entries in marker['streams'].items():
                        entries_of[stream] += map(json.dumps, entries)
                    for seen, its in zip(repeats.values(), hashes, strict=True):
                        seen.add(its, np.zeros_like(its))
                    waiting.append(failed)
                    if sum(map(len, waiting)) >= ROWS_PER_GROUP or len(waiting) >= ROWS_PER_GROUP:
                        failures.write_table(pa.concat_tables(waiting))
                        waiting.clear()
                if waiting:
                    failures.write_table(pa.concat_tables(waiting))
            for stream, lines in entries_of.items():
                index = ',\n'.join(lines)
                write(self.dest, in_stream(stream, INDEX_NAME), f'{{"version": 2, "shards": [{index}]}}'.encode())
            self.dest.put(scratch / 'failures.parquet', 'failures.parquet')
        total.notes.update({oddity: count for oddity, seen in repeats.items() if (count := seen.count()[0])})
        source = {**self.described['source'], 'parts': len(self.parts), 'fingerprint': inputs.hexdigest()}
        whole = Manifest(
            **{**self.described, 'source': source},
            columns={},
            num_samples=total.kept,
            attempted=total.attempted,
            dropped=dict(total.dropped),
            notes=dict(total.notes),
            hashes=HASHES,
            code_version=__version__,
        )
        for stream in sorted(self.columns, reverse=True):  # the one of the whole dataset last
            described = {
                **self.described_by_stream.get(stream, {}),
                'columns': {name: {'encoding': encoding, 'meaning': meaning} for name, (encoding, meaning) in self.columns[stream].items()},
                'min_side_px': total.min_side_px.get(stream),
            }
            if stream:
                kept = total.kept_in[stream]
                described |= {'num_samples': kept, 'attempted': kept, 'dropped': {}, 'notes': {}}
            write(self.dest, in_stream(stream, MANIFEST_NAME), replace(whole, **described).to_json().encode())
        if '' not in self.columns:
            write(self.dest, MANIFEST_NAME, replace(whole, streams=sorted(self.columns)).to_json().encode())

    def _markers(self, scratch: Path) -> Iterator[tuple[str, dict[str, Any], Any, np.ndarray]]:
        def read(part: str) -> tuple[str, dict[str, Any], Any, np.ndarray]:
            path = self.dest.fetch(f'{PARTS}/{part}.failures.parquet', scratch)
            failed = pq.read_table(path, schema=FAILURES_SCHEMA)
            hashes = np.frombuffer((pq.read_metadata(path).metadata or {}).get(b'hashes', b''), np.uint64)
            if path.parent == scratch:
                path.unlink()
            return part, self._own_marker(part), failed, hashes.reshape(-1, 2).T

        with ThreadPoolExecutor(NUM_REQUESTS) as threads:
            parts = list(self.parts)
            for start in range(0, len(parts), 4 * NUM_REQUESTS):
                yield from threads.map(read, parts[start : start + 4 * NUM_REQUESTS])

    def _own_marker(self, part: str) -> dict[str, Any]:
        marker = self._marker(part)
        if marker['settings'] != self.job.digest:
            raise IncompleteError(
                f'{self.dest.url}: part {part} was written with other settings, by a process that was still at work when this job began; '
                'stop that process, and run the same command again (on all hosts): it writes the part again'
            )
        return marker

    def _marker(self, part: str) -> dict[str, Any]:
        return parse_json(self.dest.read(f'{PARTS}/{part}.json'))


def _parts_in(files: Iterable[str]) -> set[str]:
    """Names of the parts whose markers are among the files."""
    return {name.removeprefix(f'{PARTS}/').removesuffix('.json') for name in files if name.startswith(f'{PARTS}/') and name.endswith('.json')}
