"""Samples that cannot be decoded: which, why, and how many a run has met so far."""

import os
from pathlib import Path

from diffusion.common.files import append_json_line, open_to_append, read_json_lines
from diffusion.contracts.errors import DataError


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
        with open_to_append(self.path, shared=True) as file:
            known = list(read_json_lines(self.path))
            entry = {'stream': stream, 'shard': shard, 'sample': sample, 'cause': cause}
            if entry not in known:
                append_json_line(file, entry)
                os.fsync(file.fileno())
                known.append(entry)
        if len(known) > self.most:
            raise DataError(
                f'stream {stream}: sample {sample} of shard {shard} cannot be used: {cause}. It is one of {len(known)} such samples in {self.path}, '
                f'data.max_bad_samples is {self.most}; make the dataset again without it, or raise data.max_bad_samples to replace them by others'
            )
