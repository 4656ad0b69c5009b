"""Write one part of an MDS dataset: what one piece of the input became, all of it or nothing.

The shards go to their places first and the marker `parts/NAME.json` last, so a part is there when its marker is. A part written
twice is the same twice.
"""

import json
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from data_prep.mds.job import Job
from data_prep.mds.tally import Tally
from diffusion.common.files import parse_json
from diffusion.common.processes import quick_imports
from diffusion.common.storage import scratch_for, write
from diffusion.datasets.shards import in_stream

HASHES = ['sha256']
FAILURES_SCHEMA = pa.schema([(name, pa.string()) for name in ('key', 'url', 'reason')])
PARTS = 'parts'
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
