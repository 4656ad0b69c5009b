"""Rows of MDS shards whose files stay open: Streaming's reader opens a shard, reads twice, closes it and parses its columns' types for each."""

import os
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from struct import Struct
from typing import Any

import numpy as np
from streaming.base.format.mds import MDSReader
from streaming.base.format.mds.encodings import _get_coder

MOST_OPEN = 256  # of a process: a shuffled block of 262,144 samples lies in so many shards, and most systems allow 1,024 open files


class OpenShards:
    """Args:
    most: files that stay open, those that were read last; 0 opens a shard for each of its rows, so that an evicted file frees its disk at once.
    """

    def __init__(self, most: int = MOST_OPEN):
        self.most = most
        self._open: OrderedDict[MDSReader, _OpenShard] = OrderedDict()

    def row(self, shard: MDSReader, position: int) -> dict[str, Any]:
        """Decode a row. Arrays are views of the bytes that were read, not aligned to their numbers.

        Raises:
            FileNotFoundError: the shard is not on this disk.
            ValueError: its file is not what its header says; and whatever the decoder of a column raises.
        """
        opened = self._open.pop(shard, None) or _OpenShard(shard)
        if self.most:
            self._open[shard] = opened  # the last
        if len(self._open) > self.most:
            self._open.popitem(last=False)
        return opened.row(position)

    def close(self, shard: MDSReader) -> None:
        """Forget a file that is about to be replaced."""
        self._open.pop(shard, None)

    def __getstate__(self) -> dict[str, Any]:
        return {'most': self.most, '_open': OrderedDict()}  # a file descriptor is another process's nothing


class _OpenShard:
    """A shard is: uint32 number of rows, one offset more than rows, a JSON header, the rows. A row is: the uint32 sizes of its columns without a size
    of their own, then its columns."""

    def __init__(self, shard: MDSReader):
        path = os.path.join(shard.dirname, shard.split, shard.raw_data.basename)
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self.descriptor)  # when nobody reads it any more: another thread may forget it meanwhile
        self.num_bytes = os.fstat(self.descriptor).st_size
        self.offsets = np.frombuffer(os.pread(self.descriptor, 4 * (shard.samples + 1), 4), '<u4')
        self.sizes = Struct(f'<{sum(not size for size in shard.column_sizes)}I')
        self.columns: list[tuple[str, int, Callable[[bytes], Any]]] = [
            (name, size or 0, _get_coder(encoding).decode)  # type: ignore[union-attr]
            for name, encoding, size in zip(shard.column_names, shard.column_encodings, shard.column_sizes, strict=True)
        ]

    def row(self, position: int) -> dict[str, Any]:
        begin, end = self.offsets[position : position + 2].tolist()
        if not begin <= end <= self.num_bytes:
            raise ValueError(f'row {position} is said to be the bytes {begin:,} to {end:,} of a file of {self.num_bytes:,}')
        data = os.pread(self.descriptor, end - begin, begin)
        sizes: Iterator[int] = iter(self.sizes.unpack_from(data))
        row, place = {}, self.sizes.size
        for name, size, decode in self.columns:
            before, place = place, place + (size or next(sizes))
            row[name] = decode(data[before:place])
        return row
