"""Which rows show a picture that an earlier row of the data set shows already, bit by bit or to the eye.

It takes a reading of the input before the one that converts it. First a digest of each picture goes to `DEST/digests/PART.parquet`; any
process may write those of any part. When all are there, each process finds the repeated ones by itself, in slices of the space of
digests, so that memory holds one slice and a bit a row. The first usable row, in the order of the data, is the one kept.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from data_prep.converting.buckets import Buckets, OneStream
from data_prep.converting.filters import Filters, with_captions
from data_prep.errors import DataError
from data_prep.mds.dataset import Share
from data_prep.mds.workers import count_rows, map_parts
from data_prep.sources import Part, Row, Source
from diffusion.datasets.decode import ImageError, open_image, size_of
from diffusion.storage import Folder, scratch_for

DIGESTS = 'digests'
ONE_STREAM = OneStream()
ROWS_PER_SLICE = 1 << 24  # about half a gigabyte while it is sorted
THUMBNAIL_PX = 64  # perceptual hashes look at 32 x 32 pixels


def sha256_digest(row: Row) -> bytes:
    """Equal for equal bytes: the first half of their SHA-256."""
    assert row.image is not None
    return bytes.fromhex(row.sha256)[:16] if row.sha256 else hashlib.sha256(row.image).digest()[:16]


def perceptual_digest(row: Row) -> bytes:
    """Equal for most pictures that look alike: ImageHash's phash of 64 bits finds about four in five copies of another size or quality.

    One that cannot be decoded is like none but its copies.
    """
    import imagehash

    assert row.image is not None
    try:
        return np.packbits(imagehash.phash(open_image(row.image, THUMBNAIL_PX)).hash).tobytes() + bytes(8)
    except ImageError:
        return sha256_digest(row)


KINDS: dict[str, tuple[Callable[[Row], bytes], str]] = {
    'exact': (sha256_digest, 'duplicate of an earlier picture'),
    'near': (perceptual_digest, 'near duplicate of an earlier picture'),
}


def check_kind(kind: str) -> None:
    """Raises DataError where the library for it is not installed."""
    if kind == 'near':
        try:
            import imagehash  # noqa: F401
        except ImportError:
            raise DataError("--duplicates near needs ImageHash: pip install 'diffusion[near-duplicates]'") from None


@dataclass(frozen=True)
class DigestWriter:
    """Writes the digests of the pictures that could be kept; goes to the worker processes."""

    source: Source
    dest: Folder
    kind: str
    filters: Filters
    buckets: Buckets
    captions: Mapping[str, float] | None

    def __call__(self, part: Part) -> None:
        """DEST/digests/PART.parquet: the number and the digest of each row that is usable."""
        digest, _ = KINDS[self.kind]
        identity = self.source.fingerprint(part)  # before reading: what changes meanwhile will differ from it
        num_rows, numbers, digests = 0, [], []
        with scratch_for(self.dest) as scratch:
            for number, row in enumerate(self.source.rows(part, scratch)):
                if self._is_usable(row):
                    numbers.append(number)
                    digests.append(digest(row))
                num_rows += 1
                count_rows()
            table = pa.table({'row': pa.array(numbers, pa.int32()), 'digest': pa.array(digests, pa.binary(16))})
            table = table.replace_schema_metadata({'input': json.dumps(identity), 'rows': str(num_rows)})
            pq.write_table(table, scratch / 'digests.parquet')
            self.dest.put(scratch / 'digests.parquet', digests_name(part.name))

    def _is_usable(self, row: Row) -> bool:
        """Whether all but the decoder accepts the row; copies of what that refuses are refused as well."""
        row = row if self.captions is None else with_captions(row, self.captions)
        if self.filters.row_reason(row) is not None or row.image is None or self.filters.usable_captions(row)[1] is not None:
            return False
        try:
            width, height = size_of(row.image)
        except ImageError:
            return False
        return self.filters.size_reason(width, height) is None and self.buckets.place(width, height)[1] is None


def write_all_digests(
    parts: Sequence[Part],
    source: Source,
    filters: Filters,
    kind: str,
    dest: Folder,
    processes: int,
    share: Share,
    buckets: Buckets = ONE_STREAM,
    captions: Mapping[str, float] | None = None,
) -> None:
    """Write the digests that are not there yet: first those of this share, then those that other hosts have not got to."""
    work = DigestWriter(source, dest, kind, filters, buckets, captions)
    for mine in (parts[share.rank :: share.world_size], parts):
        present = dest.files(DIGESTS)
        missing = [part for part in mine if digests_name(part.name) not in present]
        for _ in map_parts(work, missing, processes, 'digests'):
            pass


def digests_name(part: str) -> str:
    """Where the digests of a part are, below DEST."""
    return f'{DIGESTS}/{part}.parquet'


def find_duplicates(dest: Folder, parts: Sequence[Part], source: Source) -> dict[str, np.ndarray]:
    """Numbers of the rows of each part that repeat an earlier one, as bits (numpy.packbits); parts without any are not named.

    Raises:
        DataError: a part's digests are of another input.
    """
    if not parts:
        return {}
    with scratch_for(dest) as scratch:
        files = {part.name: dest.fetch(digests_name(part.name), scratch) for part in parts}
        counts, num_digests = {}, 0
        for part in parts:
            metadata = pq.read_metadata(files[part.name])
            then, now = json.loads(metadata.metadata[b'input']), json.loads(json.dumps(source.fingerprint(part)))
            if then != now:
                raise DataError(f'{dest.url}/{digests_name(part.name)}: is of another input than {part.name} is now; name another DEST')
            counts[part.name] = int(metadata.metadata[b'rows'])
            num_digests += metadata.num_rows
        num_slices = -(-num_digests // ROWS_PER_SLICE) or 1
        repeated: dict[str, np.ndarray] = {}
        for i in range(num_slices):
            for part_index, row in _repeated_in_slice(files, parts, i, num_slices):
                name = parts[part_index].name
                bits = repeated.setdefault(name, np.zeros(-(-counts[name] // 8), np.uint8))
                bits[row >> 3] |= 128 >> (row & 7)
    return repeated


def _repeated_in_slice(files: dict[str, Path], parts: Sequence[Part], i: int, num_slices: int) -> Iterator[tuple[int, int]]:
    """(index of part, row) of all but the first of equal digests in one slice of the space of digests."""
    halves, places = [], []
    for index, part in enumerate(parts):
        table = pq.read_table(files[part.name])
        digests = np.frombuffer(b''.join(table['digest'].to_pylist()), '>u8').reshape(-1, 2)
        mine = digests[:, 0] % num_slices == i
        halves.append(digests[mine])
        rows = table['row'].to_numpy()[mine]
        places.append(np.stack([np.full_like(rows, index), rows], axis=1))
    keys, where = np.concatenate(halves), np.concatenate(places)
    order = np.lexsort((keys[:, 1], keys[:, 0]))  # stable: equal digests stay in the order of the data
    repeats = (keys[order][1:] == keys[order][:-1]).all(axis=1)
    yield from where[order[1:][repeats]].tolist()


def is_repeated(bits: np.ndarray | None, row: int) -> bool:
    """Whether the row is among those found."""
    return bits is not None and bool(bits[row >> 3] & (128 >> (row & 7)))
