"""Which rows show an image that an earlier row of the dataset shows already, bit by bit or to the eye.

It takes a reading of the input before the one that converts it. First a digest of each image goes to `DEST/digests/SETTINGS/PART.parquet`; any
process may write those of any part. When all are there, each process finds the repeated ones by itself, in slices of the space of
digests, so that memory holds one slice and a bit a row. The first usable row, in the order of the data, is the one kept;
none is if a copy is on the skip-list.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from data_prep.converting.buckets import Buckets, OneStream
from data_prep.converting.digests import KINDS
from data_prep.converting.filters import SKIPPED, Filters, with_captions
from data_prep.mds.job import Job, Share, compare
from data_prep.mds.workers import count_rows, map_parts
from data_prep.sources import Part, Row, Source
from diffusion.common.storage import NUM_REQUESTS, scratch_for
from diffusion.datasets.decode import ImageError, size_of

DIGESTS = 'digests'
ONE_STREAM = OneStream()
ROWS_PER_SLICE = 1 << 24  # about half a gigabyte while it is sorted


@dataclass(frozen=True)
class DigestWriter:
    """Writes the digests of the images that could be kept; goes to the worker processes."""

    source: Source
    job: Job
    kind: str
    filters: Filters
    buckets: Buckets
    captions: Mapping[str, float] | None

    def __call__(self, part: Part) -> None:
        """DEST/digests/SETTINGS/PART.parquet: number and digest of each row that is usable, and of each that is on the skip-list."""
        digest, _ = KINDS[self.kind]
        identity = self.source.fingerprint(part)  # before reading: what changes meanwhile will differ from it
        num_rows, numbers, digests, skipped = 0, [], [], []
        with scratch_for(self.job.dest) as scratch:
            for number, row in enumerate(self.source.rows(part, scratch)):
                reason = self._reason(row)
                if row.image is not None and reason in (None, SKIPPED):
                    numbers.append(number)
                    digests.append(digest(row))
                    skipped.append(reason == SKIPPED)
                num_rows += 1
                count_rows()
            table = pa.table(
                {'row': pa.array(numbers, pa.int32()), 'digest': pa.array(digests, pa.binary(16)), 'skipped': pa.array(skipped, pa.bool_())}
            )
            table = table.replace_schema_metadata({'input': json.dumps(identity), 'rows': str(num_rows)})
            pq.write_table(table, scratch / 'digests.parquet')
            self.job.dest.put(scratch / 'digests.parquet', digests_name(self.job, part.name))

    def _reason(self, row: Row) -> str | None:
        """Why the row is not usable, as far as the decoder is not needed; copies of what that refuses are refused as well."""
        row = row if self.captions is None else with_captions(row, self.captions)
        reason = self.filters.row_reason(row) or self.filters.usable_captions(row)[1]
        if reason is not None or row.image is None:
            return reason
        try:
            size_px = size_of(row.image)
        except ImageError as error:
            return str(error)
        return self.filters.size_reason(*size_px) or self.buckets.place(*size_px)[1]


def write_all_digests(
    parts: Sequence[Part],
    source: Source,
    filters: Filters,
    kind: str,
    job: Job,
    processes: int,
    share: Share,
    buckets: Buckets = ONE_STREAM,
    captions: Mapping[str, float] | None = None,
) -> None:
    """Write the digests that are not there yet: first those of this share, then those that other hosts have not got to."""
    work = DigestWriter(source, job, kind, filters, buckets, captions)
    begin = len(parts) * share.rank // share.world_size  # hosts that have done theirs begin at different places
    for mine in (parts[share.rank :: share.world_size], [*parts[begin:], *parts[:begin]]):
        present = job.dest.files(DIGESTS)
        missing = [part for part in mine if digests_name(job, part.name) not in present]
        for _ in map_parts(work, missing, processes, 'digests'):
            pass


def digests_name(job: Job, part: str) -> str:
    """Where the digests of a part are, below DEST: the settings decide which of its rows are usable."""
    return f'{DIGESTS}/{job.digest}/{part}.parquet'


def find_duplicates(job: Job, parts: Sequence[Part], source: Source) -> dict[str, np.ndarray]:
    """Numbers of the rows of each part that repeat an earlier one, as bits (numpy.packbits); parts without any are not named.

    Raises:
        DataError: a part's digests are of another input.
    """
    if not parts:
        return {}
    with scratch_for(job.dest) as scratch, ThreadPoolExecutor(NUM_REQUESTS) as threads:
        files = {part.name: path for part, path in zip(parts, threads.map(partial(_fetch_checked, job, scratch, source), parts), strict=True)}
        metadata = {name: pq.read_metadata(path) for name, path in files.items()}
        counts = {name: int(of.metadata[b'rows']) for name, of in metadata.items()}
        num_digests = sum(of.num_rows for of in metadata.values())
        num_slices = -(-num_digests // ROWS_PER_SLICE) or 1
        repeated: dict[str, np.ndarray] = {}
        for i in range(num_slices):
            for part_index, row in _repeated_in_slice(files, parts, i, num_slices):
                name = parts[part_index].name
                bits = repeated.setdefault(name, np.zeros(-(-counts[name] // 8), np.uint8))
                bits[row >> 3] |= 128 >> (row & 7)
    return repeated


def _fetch_checked(job: Job, scratch: Path, source: Source, part: Part) -> Path:
    """A local file with the digests of a part, once they are known to be of what the part is now."""
    path = job.dest.fetch(digests_name(job, part.name), scratch)
    then = json.loads(pq.read_metadata(path).metadata[b'input'])
    compare(then, source.fingerprint(part), f'{job.dest.url}/{digests_name(job, part.name)}: was written with input', 'name another DEST')
    return path


def _repeated_in_slice(files: dict[str, Path], parts: Sequence[Part], i: int, num_slices: int) -> Iterator[tuple[int, int]]:
    """(index of part, row) of all but the first of equal digests in one slice of the space of digests.

    What is on the skip-list comes first: all its copies repeat it.
    """
    halves, places, skipped = [], [], []
    for index, part in enumerate(parts):
        table = pq.read_table(files[part.name])
        if not len(table):
            continue
        column = table['digest'].combine_chunks()
        digests = np.frombuffer(column.buffers()[1], '>u8').reshape(-1, 2)[column.offset : column.offset + len(column)]
        mine = digests[:, 0] % num_slices == i
        halves.append(digests[mine])
        skipped.append(table['skipped'].to_numpy()[mine])
        rows = table['row'].to_numpy()[mine]
        places.append(np.stack([np.full_like(rows, index), rows], axis=1))
    if not halves:
        return
    keys, where = np.concatenate(halves), np.concatenate(places)
    order = np.lexsort((~np.concatenate(skipped), keys[:, 1], keys[:, 0]))  # stable: equal digests stay in the order of the data
    repeats = (keys[order][1:] == keys[order][:-1]).all(axis=1)
    yield from where[order[1:][repeats]].tolist()


def is_repeated(bits: np.ndarray | None, row: int) -> bool:
    """Whether the row is among those found."""
    return bits is not None and bool(bits[row >> 3] & (128 >> (row & 7)))
