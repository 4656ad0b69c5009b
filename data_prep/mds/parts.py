"""Parts of an MDS dataset: what one piece of the input became, all of it or nothing.

The shards go to their places first and the marker `parts/NAME.json` last, so a part is there when its marker is. A part written
twice is the same twice.
"""

import json
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any, Self

import pyarrow as pa
import pyarrow.parquet as pq

from data_prep.mds.job import Job, Tally
from diffusion.common.files import parse_json
from diffusion.common.processes import quick_imports
from diffusion.common.storage import scratch_for, write
from diffusion.datasets.shards import Shard, in_stream

HASHES = ['sha256']
FAILURES_SCHEMA = pa.schema([(name, pa.string()) for name in ('key', 'url', 'reason')])
PARTS = 'parts'
BATCHES_AHEAD = 4  # computed and not yet written
COMMITS_AHEAD = 4  # parts that are being uploaded
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
        self.tally.drop(reason)
        self.failures.append({'key': key, 'url': url, 'reason': reason})

    def commit(self, identity: dict[str, Any]) -> Tally:
        """Move everything to DEST; `identity` is what the part's input was.

        Raises:
            DataError: DEST belongs to a job with other settings by now.
        """
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


@dataclass(frozen=True)
class PartEnd:
    """Message that all images of a part have been sent."""

    part: Shard
    failures: list[tuple[str, str, str]]
    """Key, url and reason of each row left out of a stream."""


class PartsWriting:
    """Writes parts of batches in a thread of its own, in order, and uploads finished ones in others, while the accelerator computes the next.

    Args:
        job, columns, shard_bytes: as of PartWriter.
    """

    def __init__(self, job: Job, columns: Mapping[str, Columns], shard_bytes: int):
        self.job, self.columns, self.shard_bytes = job, columns, shard_bytes
        self._thread, self._ahead = ThreadPoolExecutor(1), deque[Future[None]]()
        self._open: dict[str, PartWriter] = {}
        self._uploads, self._commits = ThreadPoolExecutor(COMMITS_AHEAD), list[Future[Tally]]()
        self._slots = threading.BoundedSemaphore(2 * COMMITS_AHEAD)
        self._failed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown(cancel_futures=True)
        self._uploads.shutdown(cancel_futures=True)
        for writer in self._open.values():
            writer.close()

    def submit(self, step: Callable[..., None], *args: Any) -> None:
        """Have a step done, such as `end`; waits while too much is waiting already. Raises what an earlier one has met."""
        self._ahead.append(self._thread.submit(self._do, step, *args))
        while len(self._ahead) > BATCHES_AHEAD or (self._ahead and self._ahead[0].done()):
            self._ahead.popleft().result()

    def finish(self) -> None:
        """Wait until everything is written and uploaded."""
        while self._ahead:
            self._ahead.popleft().result()
        for commit in self._commits:
            commit.exception()

    def committed(self) -> Iterator[Tally]:
        """Parts that have become part of DEST since the last call."""
        done = [commit for commit in self._commits if commit.done()]
        for commit in done:
            self._commits.remove(commit)
            yield commit.result()

    def _do(self, step: Callable[..., None], *args: Any) -> None:
        """Nothing is done after a step that failed: a part would lack what that was to write."""
        if self._failed:
            return
        try:
            step(*args)
        except BaseException:
            self._failed = True
            raise

    def writer(self, part: Shard) -> PartWriter:
        """Return the writer of a part that has not ended; for steps."""
        if part.name not in self._open:
            self._open[part.name] = PartWriter(self.job, part.name, self.columns, self.shard_bytes)
        return self._open[part.name]

    def end(self, end: PartEnd) -> None:
        """Upload a part that is complete."""
        writer = self.writer(end.part)
        for failure in end.failures:
            writer.drop(*failure)
        del self._open[end.part.name]
        self._slots.acquire()  # what waits for its upload takes scratch space: better to wait here
        commit = self._uploads.submit(_commit, writer, end.part.fingerprint)
        commit.add_done_callback(lambda _: self._slots.release())
        self._commits.append(commit)


def _commit(writer: PartWriter, identity: dict[str, Any]) -> Tally:
    with closing(writer):
        return writer.commit(identity)
