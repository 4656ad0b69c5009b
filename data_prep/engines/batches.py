"""Shards become parts by batches, without the accelerator waiting: workers read and decode; this thread computes; another one writes.

For work that loads a model once and is given batches of images, as `encode` and `recaption`. A batch holds images of one shard: the same shard gives
the same part to the bit, whenever and next to whatever it is worked on.
"""

from abc import abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Generic

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from tqdm import tqdm

from data_prep.engines.engine import Message, StreamedWork
from data_prep.engines.local import WorkerKilled, progress_bar
from data_prep.mds.job import Job, Tally
from data_prep.mds.parts import PartEnd, PartsWriting
from diffusion.common.processes import SHARED_MEMORY_FULL, end_with_parent
from diffusion.common.storage import StorageError, scratch_for
from diffusion.contracts.errors import DataError, EncoderError, IncompleteError
from diffusion.cost.hardware import gpu_without_kernels
from diffusion.datasets.shards import Shard

MAX_WORKERS = 16  # a device: what they have ready waits in shared memory


class ShardMessages(IterableDataset):
    """Messages about all rows of some shards; each worker of a DataLoader has every n-th shard, and reads one at a time.

    About a part, in this order: its batches and its PartEnd; or the error that reading it met.
    """

    def __init__(self, job: Job, shards: Sequence[Shard]):
        self.job, self.shards = job, shards

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        try:
            for shard in self.shards[worker.id :: worker.num_workers] if worker else self.shards:
                with scratch_for(self.job.dest) as scratch:
                    yield from self.of_shard(shard, scratch)
        except (DataError, StorageError) as error:
            yield error  # as data: what is raised in a worker arrives as a RuntimeError that quotes its traceback

    @abstractmethod
    def of_shard(self, shard: Shard, scratch: Path) -> Iterator[Any]:
        """Batches, and the PartEnd."""


class BatchWork(StreamedWork[Shard, Message, Tally], Generic[Message]):
    """Makes a part of each shard of images.

    Attributes:
        batch_size: images a pass, as the command's option says.
    """

    unit, uses_gpu = 'images', True
    batch_size: int

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Device of the model."""

    @abstractmethod
    def read(self, shards: Sequence[Shard]) -> ShardMessages:
        """Return the messages that workers read of shards."""

    @abstractmethod
    def writing(self) -> PartsWriting:
        """Return the writer of parts."""

    @abstractmethod
    def step(self, writing: Any, batch: Any) -> None:
        """Compute a batch on the device, and have `writing` write the result."""

    @abstractmethod
    def load(self, device: torch.device) -> None:
        """Read the model to `device`, in a process of a cluster. Raises EncoderError: it cannot be read, or is not that of the job."""

    def name(self, shard: Shard) -> str:
        return shard.name

    def file(self, shard: Shard) -> str:
        return shard.path

    def count(self, shard: Shard, tally: Tally) -> int:
        return shard.num_samples

    def here(self, shards: Sequence[Shard], processes: int) -> Iterator[Tally]:
        """Tallies of the parts as they are committed, computed on the device that the model is on."""
        workers = min(processes, len(shards), MAX_WORKERS)
        loader = DataLoader(
            self.read(shards),
            batch_size=None,
            num_workers=workers,
            prefetch_factor=4 if workers else None,
            worker_init_fn=_begin_worker if workers else None,
            pin_memory=self.device.type == 'cuda',
        )
        total = sum(shard.num_samples for shard in shards)
        with progress_bar(total=total, unit=self.unit, desc=self.label, disable=not shards) as progress:
            try:
                yield from self._parts(_counted(loader, progress))
            except RuntimeError as error:
                if 'shared memory' in str(error) or 'No space left on device' in str(error):  # of a worker that it killed, or of ours
                    raise IncompleteError(SHARED_MEMORY_FULL) from error
                if not str(error).startswith('DataLoader worker (pid'):
                    raise
                raise WorkerKilled from error

    def messages(self, shard: Shard) -> Generator[Message]:
        yield from self.read([shard])

    def start_fed(self, cpus: int, gpus: float) -> Callable[[Iterator[Message]], Tally]:
        """Raises EncoderError: as `load`; or PyTorch sees no GPU, or has no kernels for it, where one was promised."""
        if gpus and not torch.cuda.is_available():
            raise EncoderError('the cluster gives a GPU to this process, and PyTorch sees none; install a PyTorch of its CUDA version')
        if gpus and (lacking := gpu_without_kernels()):
            raise EncoderError(lacking)
        torch.set_num_threads(cpus)
        self.load(torch.device('cuda' if gpus else 'cpu'))
        return self._part

    def _part(self, messages: Iterator[Message]) -> Tally:
        (tally,) = self._parts(messages)
        return tally

    def _parts(self, messages: Iterable[Message]) -> Iterator[Tally]:
        """Tallies of the parts that the messages are about, as they are committed; those of several parts may come mixed."""
        with self.writing() as writing:
            for message in messages:
                if isinstance(message, Exception):
                    raise message
                if isinstance(message, PartEnd):
                    writing.submit(writing.end, message)
                else:
                    try:
                        self.step(writing, message)
                    except torch.cuda.OutOfMemoryError as error:
                        less = f'try {max(1, self.batch_size // 2)}, in another DEST if this one has parts: their bits depend on it'
                        raise DataError(f'the GPU has too little memory for --batch-size {self.batch_size}: {error}; {less}') from error
                yield from writing.committed()
            writing.finish()
            yield from writing.committed()


def _counted(messages: Iterable[Message], progress: tqdm) -> Iterator[Message]:
    for message in messages:
        yield message
        if isinstance(message, PartEnd):
            progress.update(message.part.num_samples)


def _begin_worker(_: int) -> None:
    end_with_parent()
