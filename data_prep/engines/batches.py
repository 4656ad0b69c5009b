"""Shards become parts by batches, without the accelerator waiting: workers read and decode; this thread computes; another one writes.

For work that loads a model once and is given batches of images, as `encode` and `recaption`. A batch holds images of one shard: the same shard gives
the same part to the bit, whenever and next to whatever it is worked on.
"""

import threading
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from tqdm import tqdm

from data_prep.engines.engine import StreamedWork, WorkerKilled, progress_bar
from data_prep.mds.dataset import Columns, PartWriter
from data_prep.mds.job import Job, Tally
from diffusion.common.processes import SHARED_MEMORY_FULL, end_with_parent
from diffusion.common.storage import Folder, StorageError, scratch_for
from diffusion.contracts.errors import DataError, EncoderError, IncompleteError
from diffusion.cost.hardware import gpu_without_kernels
from diffusion.datasets.shards import Shard

MAX_WORKERS = 16  # a device: what they have ready waits in shared memory
BATCHES_AHEAD = 4  # computed and not yet written
COMMITS_AHEAD = 4  # parts that are being uploaded


@dataclass(frozen=True)
class ImageBatch:
    """Images of one part and one stream as the model reads them, and the rows they are of."""

    part: Shard
    stream: str
    inputs: dict[str, Any]  # tensors, or arrays on their way by Ray
    rows: list[dict[str, Any]]

    def pin_memory(self) -> Self:
        """Pin the tensors for the DataLoader, which finds none in a class by itself."""
        return self.changed(lambda tensor: tensor.pin_memory())

    def changed(self, change: Callable[[Any], Any]) -> Self:
        return replace(self, inputs={name: change(tensor) for name, tensor in self.inputs.items()})


@dataclass(frozen=True)
class PartEnd:
    """Message that all batches of a part have been sent."""

    part: Shard
    failures: list[tuple[str, str, str]]
    """Key, url and reason of each row left out of a stream."""


Message = ImageBatch | PartEnd | Exception
"""About a part, in this order: its batches and its end; or the error that reading it met."""


@dataclass(frozen=True)
class BatchWork(StreamedWork[Shard, Message, Tally]):
    """Makes a part of each shard of images.

    Attributes:
        source: the dataset of images.
        job, columns, shard_bytes: of the dataset to write, as of PartWriter.
        batch_size: images a pass, as the command's option says.
    """

    unit, uses_gpu = 'images', True

    source: Folder
    job: Job
    columns: Mapping[str, Columns]
    shard_bytes: int
    batch_size: int

    @property
    def reads(self) -> Folder:
        return self.source

    @property
    def writes(self) -> Folder:
        return self.job.dest

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Device of the model."""

    @abstractmethod
    def load(self, device: torch.device) -> None:
        """Read the model to `device`, in a process of a cluster. Raises EncoderError: it cannot be read, or is not that of the job."""

    @abstractmethod
    def batches(self, shard: Shard, scratch: Path) -> Iterator[ImageBatch | PartEnd]:
        """Read a shard: its batches, and the PartEnd."""

    @abstractmethod
    def compute(self, batch: ImageBatch) -> tuple[Any, ...]:
        """Compute a batch on the device; what comes back may not be done yet."""

    @abstractmethod
    def write(self, writer: PartWriter, batch: ImageBatch, *computed: Any) -> None:
        """Write what was computed of a batch."""

    def count(self, item: Shard, result: Tally) -> int:
        return item.num_samples

    def here(self, items: Sequence[Shard], processes: int) -> Iterator[Tally]:
        """Tallies of the parts as they are committed, computed on the device that the model is on."""
        workers = min(processes, len(items), MAX_WORKERS)
        loader = DataLoader(
            ShardMessages(self, items),
            batch_size=None,
            num_workers=workers,
            prefetch_factor=4 if workers else None,
            worker_init_fn=_begin_worker if workers else None,
            pin_memory=self.device.type == 'cuda',
        )
        total = sum(shard.num_samples for shard in items)
        with progress_bar(total=total, unit=self.unit, desc=self.label, disable=not items) as progress:
            try:
                yield from self._parts(loader, progress)
            except RuntimeError as error:
                if 'shared memory' in str(error) or 'No space left on device' in str(error):  # of a worker that it killed, or of ours
                    raise IncompleteError(SHARED_MEMORY_FULL) from error
                if not str(error).startswith('DataLoader worker (pid'):
                    raise
                raise WorkerKilled from error

    def messages(self, item: Shard) -> Generator[Message]:
        yield from ShardMessages(self, [item])

    def start_fed(self, cpus: int, gpus: float) -> Callable[[Iterator[Message]], Tally]:
        """Raises EncoderError: as `load`; or PyTorch sees no GPU, or has no kernels for it, where one was promised."""
        if gpus and not torch.cuda.is_available():
            raise EncoderError('the cluster gives a GPU to this process, and PyTorch sees none; install a PyTorch of its CUDA version')
        if gpus and (lacking := gpu_without_kernels()):
            raise EncoderError(lacking)
        torch.set_num_threads(cpus)
        self.load(torch.device('cuda' if gpus else 'cpu'))

        def make(messages: Iterator[Message]) -> Tally:
            (tally,) = self._parts(messages)
            return tally

        return make

    def pack(self, message: Message) -> Any:
        """Arrays: Ray moves their memory without a copy, and pickles tensors."""
        return message.changed(lambda tensor: tensor.numpy()) if isinstance(message, ImageBatch) else message

    def unpack(self, packed: Any) -> Message:
        """Copy what comes from Ray: it cannot be written to, and PyTorch has no such tensors."""
        return packed.changed(lambda array: torch.from_numpy(array.copy())) if isinstance(packed, ImageBatch) else packed

    def _parts(self, messages: Iterable[Message], progress: tqdm | None = None) -> Iterator[Tally]:
        """Tallies of the parts that the messages are about, as they are committed; those of several parts may come mixed."""
        with PartsWriting(self) as writing:
            for message in messages:
                if isinstance(message, Exception):
                    raise message
                if isinstance(message, PartEnd):
                    writing.submit(message.part, writing.end, message)
                else:
                    try:
                        writing.submit(message.part, self.write, message, *self.compute(message))
                    except torch.cuda.OutOfMemoryError as error:
                        less = f'try {max(1, self.batch_size // 2)}, in another DEST if this one has parts: their bits depend on it'
                        raise DataError(f'the GPU has too little memory for --batch-size {self.batch_size}: {error}; {less}') from error
                yield from writing.committed()
                if progress is not None and isinstance(message, PartEnd):
                    progress.update(message.part.num_samples)
            writing.finish()
            yield from writing.committed()


class ShardMessages(IterableDataset):
    """Messages about all rows of some shards; each worker of a DataLoader has every n-th shard, and reads one at a time."""

    def __init__(self, work: BatchWork, shards: Sequence[Shard]):
        self.work, self.shards = work, shards

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        try:
            for shard in self.shards[worker.id :: worker.num_workers] if worker else self.shards:
                with scratch_for(self.work.writes) as scratch:
                    yield from self.work.batches(shard, scratch)
        except (DataError, StorageError) as error:
            yield error  # as data: what is raised in a worker arrives as a RuntimeError that quotes its traceback


class PartsWriting:
    """Writes parts in a thread of its own, in order, and uploads finished ones in others, while the accelerator computes the next batch."""

    def __init__(self, work: BatchWork):
        self.work = work
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

    def submit(self, part: Shard, step: Callable[..., None], *args: Any) -> None:
        """Have a step done with the writer of a part that has not ended; waits while too much waits already. Raises what an earlier step has met."""
        self._ahead.append(self._thread.submit(self._do, part, step, *args))
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

    def _do(self, part: Shard, step: Callable[..., None], *args: Any) -> None:
        """Nothing is done after a step that failed: a part would lack what that was to write."""
        if self._failed:
            return
        try:
            if part.name not in self._open:
                self._open[part.name] = PartWriter(self.work.job, part.name, self.work.columns, self.work.shard_bytes)
            step(self._open[part.name], *args)
        except BaseException:
            self._failed = True
            raise

    def end(self, writer: PartWriter, end: PartEnd) -> None:
        """Upload a part that is complete; a step."""
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


def _begin_worker(_: int) -> None:
    end_with_parent()
