"""Duplicates: rows that show an image that an earlier row of the dataset shows already, bit by bit or to the eye.

It takes a reading of the input before the one that converts it. First a digest of each image goes to `DEST/digests/SETTINGS/PART.parquet`; any
process may write those of any part. When all are there, each process finds the repeated ones by itself, in slices of the space of
digests, so that memory holds one slice and a bit a row. The first usable row, in the order of the data, is the one kept;
none is if a copy is on the skip-list.
"""

import hashlib
import json
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from data_prep.converting.filters import SKIPPED, Options
from data_prep.engines.engine import Engine, PartWork, count_row, map_parts
from data_prep.mds.job import Job, Share, Tally, compare
from data_prep.sources.base import Part, Row, Source
from diffusion.common.storage import NUM_REQUESTS, Folder, scratch_for
from diffusion.datasets.decode import ImageError, open_image, size_of

DIGESTS = 'digests'
THUMBNAIL_PX = 64  # perceptual hashes look at 32 x 32 pixels
ROWS_PER_SLICE = 1 << 24  # about half a gigabyte while it is sorted


def sha256_digest(row: Row) -> bytes:
    """Equal for equal bytes: the first half of their SHA-256."""
    assert row.image is not None
    return bytes.fromhex(row.sha256)[:16] if row.sha256 else hashlib.sha256(row.image).digest()[:16]


def perceptual_digest(row: Row) -> bytes:
    """Equal for most images that look alike: ImageHash's phash of 64 bits, which sees no colour, and the colours that prevail.

    It finds about four in five copies of another size or quality.

    One that cannot be decoded is like none but its copies.
    """
    import imagehash

    assert row.image is not None
    try:
        image = open_image(row.image, (THUMBNAIL_PX, THUMBNAIL_PX))
        bits = np.concatenate([imagehash.phash(image).hash.ravel(), imagehash.colorhash(image, binbits=1).hash.ravel()])
        return np.packbits(bits).tobytes().ljust(16, b'\0')
    except ImageError:
        return sha256_digest(row)


DIGEST_OF: dict[str, Callable[[Row], bytes]] = {'exact': sha256_digest, 'near': perceptual_digest}


@dataclass(frozen=True)
class SourceFunction(PartWork[Part, Tally]):
    """Reads parts of a source and writes to the folder of a job: a process a part, which needs nothing loaded and calls `count_row` at each row."""

    source: Source
    job: Job
    options: Options

    @property
    def reads(self) -> Folder:
        return self.source.folder

    @property
    def writes(self) -> Folder:
        return self.job.dest

    @abstractmethod
    def __call__(self, part: Part) -> Tally:
        """Do one part."""

    def count(self, item: Part, result: Tally) -> int:
        return result.attempted_now

    def here(self, items: Sequence[Part], processes: int) -> Iterator[Tally]:
        return map_parts(self, items, processes, self.label)

    def start(self, cpus: int, gpus: float) -> Callable[[Part], Tally]:
        return self


@dataclass(frozen=True)
class DigestWriter(SourceFunction):
    """Writes the digests of the images that could be kept."""

    label = 'digests'

    def __call__(self, part: Part) -> Tally:
        """DEST/digests/SETTINGS/PART.parquet: number and digest of each row that is usable, and of each that is on the skip-list."""
        digest = DIGEST_OF[self.options.duplicates]
        identity = self.source.fingerprint(part)  # before reading: what changes meanwhile will differ from it
        num_rows, numbers, digests, skipped = 0, list[int](), list[bytes](), list[bool]()
        with scratch_for(self.job.dest) as scratch:
            for number, row in enumerate(self.source.rows(part, scratch)):
                _, reason = self.options.usable_captions(self.options.captioned(row))
                if reason is None and row.image is not None:
                    try:  # as far as the decoder is not needed; copies of what that refuses are refused as well
                        _, reason = self.options.place(*size_of(row.image))
                    except ImageError as error:
                        reason = str(error)
                if row.image is not None and reason in (None, SKIPPED):
                    numbers.append(number)
                    digests.append(digest(row))
                    skipped.append(reason == SKIPPED)
                num_rows += 1
                count_row()
            table = pa.table(
                {'row': pa.array(numbers, pa.int32()), 'digest': pa.array(digests, pa.binary(16)), 'skipped': pa.array(skipped, pa.bool_())}
            )
            table = table.replace_schema_metadata({'input': json.dumps(identity), 'rows': str(num_rows)})
            pq.write_table(table, scratch / 'digests.parquet')
            self.job.dest.put(scratch / 'digests.parquet', digests_name(self.job, part.name))
        return Tally(attempted_now=num_rows)


def write_all_digests(parts: Sequence[Part], work: DigestWriter, engine: Engine, share: Share) -> None:
    """Write the digests that are not there yet: first those of this share, then those that other hosts have not got to."""
    begin = len(parts) * share.rank // share.world_size  # hosts that have done theirs begin at different places
    for mine in (share.of(parts), [*parts[begin:], *parts[:begin]]):
        present = work.job.dest.files(DIGESTS)
        missing = [part for part in mine if digests_name(work.job, part.name) not in present]
        for _ in engine.map(work, missing):
            pass


def digests_name(job: Job, part: str) -> str:
    """Name of the file with the digests of a part, below DEST: the settings decide which of its rows are usable."""
    return f'{DIGESTS}/{job.digest}/{part}.parquet'


def find_duplicates(job: Job, parts: Sequence[Part], source: Source) -> dict[str, np.ndarray]:
    """Numbers of the rows of each part that repeat an earlier one, as bits (numpy.packbits); parts without any are not named.

    Raises:
        DataError: a part's digests are of another input.
    """
    if not parts:
        return {}
    with scratch_for(job.dest) as scratch, ThreadPoolExecutor(NUM_REQUESTS) as threads:

        def fetch(part: Part) -> Path:
            name = digests_name(job, part.name)
            path = job.dest.fetch(name, scratch)
            then = json.loads(pq.read_metadata(path).metadata[b'input'])
            compare(then, source.fingerprint(part), f'{job.dest.url}/{name}: was written with input', 'name another DEST')
            return path

        files = list(threads.map(fetch, parts))
        metadata = [pq.read_metadata(path) for path in files]
        num_slices = -(-sum(one.num_rows for one in metadata) // ROWS_PER_SLICE) or 1
        repeated: dict[str, np.ndarray] = {}
        for i in range(num_slices):
            for index, row in _repeated_in_slice(files, i, num_slices):
                num_bytes = -(-int(metadata[index].metadata[b'rows']) // 8)
                bits = repeated.setdefault(parts[index].name, np.zeros(num_bytes, np.uint8))
                bits[row >> 3] |= 128 >> (row & 7)
    return repeated


def _repeated_in_slice(files: Sequence[Path], i: int, num_slices: int) -> Iterator[tuple[int, int]]:
    """(index of part, row) of all but the first of equal digests in one slice of the space of digests.

    What is on the skip-list comes first: all its copies repeat it.
    """
    halves, places, skipped = [], [], []
    for index, path in enumerate(files):
        table = pq.read_table(path)
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
