"""Samples that cannot be decoded: which, why, and how many a run has met so far."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path

from diffusion.errors import DataError


class BadSamples:
    """A list in the run folder that all ranks and loader processes share, restarts included.

    Args:
        path: of the list, a JSON object a line.
        most: different samples that it may hold.
    """

    def __init__(self, path: Path, most: int):
        self.path, self.most = path, most

    def add(self, stream: str, shard: str, sample: int, cause: str) -> None:
        """Note a sample, once however often it is met.

        Raises:
            DataError: there are more than `most`.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open('a+') as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            known = read_lines(file.read())
            entry = {'stream': stream, 'shard': shard, 'sample': sample, 'cause': cause}
            if entry not in known:
                file.write(json.dumps(entry) + '\n')
                file.flush()
                os.fsync(file.fileno())
                known.append(entry)
        if len(known) > self.most:
            raise DataError(
                f'stream {stream}: sample {sample} of shard {shard} cannot be used: {cause}. It is one of {len(known)} such samples in {self.path}, '
                f'data.max_bad_samples is {self.most}; make the data set again without it, or raise data.max_bad_samples to replace them by others'
            )


def read_lines(content: str) -> list[dict[str, object]]:
    """The entries, without a line that a kill or a full disk cut short."""
    entries = []
    for line in content.splitlines():
        try:
            entries.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return entries
