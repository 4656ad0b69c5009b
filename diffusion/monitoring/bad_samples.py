"""Log the number of samples that the run had to replace."""

from pathlib import Path

from composer.core import Callback, State
from composer.loggers import Logger
from composer.utils import dist

from diffusion.common.files import read_json_lines


class BadSamplesLog(Callback):
    """Log `data/bad_samples`, the length of the list that the loader's processes write, when it grows.

    Args:
        path: of the list.
        every: batches between two looks at its size.
    """

    def __init__(self, path: Path, every: int):
        self.path, self.every = path, every
        self.num_bytes = 0

    def batch_end(self, state: State, logger: Logger) -> None:
        if dist.get_global_rank() != 0 or state.timestamp.batch.value % self.every or not self.path.exists():
            return
        num_bytes = self.path.stat().st_size
        if num_bytes != self.num_bytes:
            self.num_bytes = num_bytes
            logger.log_metrics({'data/bad_samples': sum(1 for _ in read_json_lines(self.path))})
