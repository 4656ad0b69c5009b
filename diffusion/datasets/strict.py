"""A StreamingDataset whose epoch is complete, or ends with an error that says why.

Streaming 0.13 downloads in two background threads. When one fails, the epoch just ends there, or every process waits for ever for a shard that
nobody fetches; the threads keep the interpreter from exiting. Here the loop that yields the samples sees to each shard itself. A thread only
works ahead of it: what that could not fetch is tried again when it is due, and only then an error counts.

A StreamingDataset has up to ten segments in /dev/shm and two lock files, all beginning with its number. Streaming takes the first number that
looks free for some of the names and attaches to what it finds under the others: an orphan of another size, or of a job that starts at the same
moment. After `kill -9` they stay; Streaming's `clean_stale_shared_memory()` removes those of living runs too, from number 0 up to the first
that is free. So here a number is drawn from those that Streaming itself never comes to, its segments belong to the run (common/belongings.py),
and the lock files lie with them, where no TMPDIR matters.
"""

import atexit
import random
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout
from numpy.typing import NDArray
from streaming import StreamingDataset
from streaming.base import dataset as streaming_dataset
from streaming.base.constant import LOCALS, SHM_TO_CLEAN, TICK
from streaming.base.dataset import _ShardState
from streaming.base.format.mds import MDSReader
from streaming.base.shared import SharedArray, SharedMemory, _get_path, prefix

from diffusion.common import belongings
from diffusion.common.belongings import SHARED_MEMORY
from diffusion.common.collective import on_first_rank_of_node
from diffusion.contracts.errors import DataUnavailable
from diffusion.datasets.open_shards import MOST_OPEN, OpenShards
from diffusion.datasets.verified import VerifiedStream

DOUBTED = 'doubted'  # of diffusion/datasets/strict.py
NAMES = (*SHM_TO_CLEAN, DOUBTED)
NUMBERS = range(100_000, 1_000_000)  # of six digits; Streaming counts from 0

_random = random.SystemRandom()  # no draw of the run's own generators


@contextmanager
def own_number() -> Iterator[None]:
    """Within the context a StreamingDataset gets a number of its own. All processes of a job enter together."""
    found, temporary = streaming_dataset.get_shm_prefix, streaming_dataset.gettempdir
    streaming_dataset.get_shm_prefix = _number_and_segment  # type: ignore[assignment]
    try:
        yield
    finally:
        streaming_dataset.get_shm_prefix, streaming_dataset.gettempdir = found, temporary


def _number_and_segment(streams_local: Sequence[str], streams_remote: Any, world: Any, retry: int = 0) -> tuple[int, SharedMemory]:
    """Instead of Streaming's `get_shm_prefix`: the number, and its first segment."""
    made: list[SharedMemory] = []
    number = on_first_rank_of_node(partial(_take, list(streams_local), made))
    entry = _entry(number)
    if entry is not None:
        streaming_dataset.gettempdir = lambda: str(entry)  # where it puts the lock files
        if not made:
            belongings.join(entry)
    return number, made[0] if made else SharedMemory(_path(number, LOCALS), False)


def _take(streams_local: list[str], made: list[SharedMemory]) -> int:
    """Take a free number, with its first segment, which goes to `made`."""
    belongings.remove_dead()
    while True:
        number = _random.choice(NUMBERS)
        entry = _entry(number)
        try:
            if entry is not None:
                belongings.make(entry.name, (SHARED_MEMORY / _path(number, name) for name in NAMES))
        except FileExistsError:
            continue
        content = prefix._pack_locals(streams_local, number)
        try:
            if any(_exists(_path(number, name)) for name in NAMES):
                raise FileExistsError
            segment = SharedMemory(_path(number, LOCALS), True, len(content))
        except FileExistsError:  # another program's, or another user's
            if entry is not None:
                belongings.forget(entry)
            continue
        segment.buf[: len(content)] = content
        made.append(segment)
        return number


def _entry(number: int) -> Path | None:
    return belongings.entries() / str(number) if SHARED_MEMORY.exists() else None


def _path(number: int, name: str) -> str:
    return prefix._get_path(number, name)


def _exists(name: str) -> bool:
    try:
        SharedMemory(name, False, auto_cleanup=False).shm.close()
    except FileNotFoundError:
        return False
    except (PermissionError, ValueError):  # another user's, or an empty one
        return True
    return True


END_SEC = 2.0  # how long the end of a process waits for a shard that is being fetched
REMOTE, PREPARING, LOCAL = map(int, (_ShardState.REMOTE, _ShardState.PREPARING, _ShardState.LOCAL))  # NumPy compares an enum slowly


class StrictStreamingDataset(StreamingDataset):
    """Every sample of an epoch once, or as often as its stream's proportion says, on any number of nodes.

    Args:
        streams: all with a remote, if there is a cache limit.
        timeout_sec: longest wait for a shard that another process fetches.
        whole_batches: an epoch is as many whole global batches as its samples fill; Streaming's rounding depends on the number of GPUs.
        streaming: what StreamingDataset takes.
    """

    streams: Sequence[VerifiedStream]
    shards: list[MDSReader]  # type: ignore[assignment]
    predownload: int
    initial_physical_nodes: int  # type: ignore[assignment]

    def __init__(self, *, streams: Sequence[VerifiedStream], timeout_sec: float, whole_batches: bool, **streaming: Any):
        with own_number():
            super().__init__(streams=streams, **streaming)
        self.timeout_sec = timeout_sec
        self._open = OpenShards(0 if self.cache_limit else MOST_OPEN)
        if whole_batches:
            batch_size: int = streaming['batch_size']
            self.length = self.epoch_size // (batch_size * self._unique_rank_world.num_ranks) * batch_size
        # An epoch is dealt out as to one node, and then to as many as there are: Streaming alone wants a number of nodes that divides the
        # canonical ones at the first start, and one of the same number of GPUs a node ever after.
        self.initial_physical_nodes = 1
        # Shards that the cache held when the run began: the first process that needs one compares its hash, the others need not.
        self._doubted = SharedArray(self.num_shards, np.uint8, _get_path(self._shm_prefix_int, DOUBTED))
        if self._unique_rank_world.is_local_leader:
            by_hash = np.array([stream.verify == 'hash' for stream in streams])[self.stream_per_shard]
            self._doubted[:] = by_hash & (self._shard_states.numpy() == LOCAL)

    def load_state_dict(self, obj: dict[str, Any]) -> None:
        """Resume from a checkpoint; from one that the last batch of an epoch left, with the next epoch, as Composer counts it."""
        num_trained = self.length * self._unique_rank_world.num_ranks
        over = obj['sample_in_epoch'] >= num_trained > 0
        begin = {'epoch': obj['epoch'] + 1, 'sample_in_epoch': 0} if over else {}
        super().load_state_dict({**obj, **begin, 'initial_physical_nodes': 1})

    def state_dict(self, num_samples: int, from_beginning: bool) -> dict[str, Any]:
        """Streaming's state, but between two epochs it names the coming one, not the finished one, which would be served again."""
        state = super().state_dict(num_samples, from_beginning)
        return {**state, 'epoch': max(self.next_epoch, state['epoch'])} if from_beginning and num_samples == 0 else state

    def resample_streams(self, epoch: int, stream_id: int | None = None) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Sizes of an epoch's passes over the shards, and the view that each place in the epoch has: id + occurrence x number of samples.

        A sample of an up-sampled stream occurs several times in an epoch; its occurrence (0, 1, ...) is the number of the pass over its shard. It is
        known here, before the epoch is shuffled and dealt out, from seed and epoch alone: the number of processes and a resume change none of it.
        Without up-sampling there is one pass over each shard, and a view is the id.
        """
        passes, sample_ids = super().resample_streams(epoch, stream_id)
        begins = sample_ids[np.cumsum(passes) - passes]
        numbers = pass_numbers(np.searchsorted(self.sample_offset_per_shard, begins, side='right'))  # of the shards that they are in
        if numbers.any():
            sample_ids += np.repeat(numbers * self.num_samples, passes)
        return passes, sample_ids

    def __iter__(self) -> Iterator[Any]:
        self._unique_worker_world = self._unique_rank_world.detect_workers()
        self._parallel_worker_world = self._parallel_rank_world.detect_workers()
        epoch, begin = self._resume_incr_epoch()
        padded = self._get_work(epoch, begin)
        occurrences, sample_ids = np.divmod(padded[padded != -1], self.num_samples)
        shard_ids = np.asarray(np.searchsorted(self.sample_offset_per_shard, sample_ids, side='right')) - 1
        ahead = _Ahead(self, shard_ids)
        atexit.register(ahead.end)  # after the dataset's own, so called before them
        ahead.start()
        try:
            for ahead.position, shard_id in enumerate(shard_ids):
                if not ahead.has(shard_id):
                    self.prepare_shard(int(shard_id))
                yield self.view(int(sample_ids[ahead.position]), int(occurrences[ahead.position]), epoch)
        finally:
            ahead.stopped = True

    def view(self, sample_id: int, occurrence: int, epoch: int | None = None) -> Any:
        """A sample as it is at its `occurrence`-th time in an epoch, counted from 0; without a number, in the one that is being read."""
        return self[sample_id]

    def get_item(self, sample_id: int, retry: int = 7) -> Any:
        return self.row(*self.spanner[sample_id])

    def row(self, shard_id: int, position: int) -> dict[str, Any]:
        """A row of a shard, which is fetched, and fetched again where it was evicted, until the time is up.

        Raises:
            DataError, DataUnavailable: as `prepare_shard`; and whatever the decoder of a bad sample raises.
        """
        end = time.monotonic() + self.timeout_sec
        while True:
            try:
                row = self._open.row(self.shards[shard_id], position)
                if self.cache_limit:
                    self._shard_access_times[shard_id] = time.time_ns()
                return row
            except FileNotFoundError as error:
                if time.monotonic() > end:
                    raise self._waited(shard_id) from error
                self.prepare_shard(shard_id)

    def prepare_shard(self, shard_id: int, blocking: bool = True) -> None:
        """Have a right copy of a shard in the cache.

        Args:
            blocking: wait if another process is at it.

        Raises:
            DataError: the shard is wrong or missing.
            DataUnavailable: storage does not answer, the disk is full, or the other process does not come to an end.
        """
        self._open.close(self.shards[shard_id])
        end = time.monotonic() + self.timeout_sec
        while not self._provided(shard_id) and blocking:
            if time.monotonic() > end:
                raise self._waited(shard_id)
            time.sleep(TICK)

    def _provided(self, shard_id: int) -> bool:
        """Fetch a shard unless another process is at it; whether it is here now. Cache usage counts what is LOCAL or becomes so."""
        stream, shard = self.streams[self.stream_per_shard[shard_id]], self.shards[shard_id]
        states, size = self._shard_states.numpy(), shard.raw_data.bytes
        with self._locked(shard_id):
            if states[shard_id] == PREPARING:
                return False
            if states[shard_id] == LOCAL:
                if not self._doubted[shard_id] and stream.path(shard.raw_data).is_file():
                    return True
            else:
                while self.cache_limit and self.cache_usage + size > int(self.cache_limit):
                    if not (states == LOCAL).any():  # all the room is taken by shards that others fetch
                        return False
                    self._evict_coldest_shard()
                self.cache_usage += size
            states[shard_id] = PREPARING
        try:
            stream.prepare_shard(shard)
        except BaseException:
            with self._locked(shard_id):
                self.cache_usage -= size
                states[shard_id] = REMOTE  # or all others would wait for it
            raise
        with self._locked(shard_id):
            self._shard_access_times[shard_id] = time.time_ns()
            self._doubted[shard_id] = 0
            states[shard_id] = LOCAL
        return True

    def doubt(self, shard_id: int) -> None:
        """Compare a shard again before its next use."""
        self._doubted[shard_id] = 1

    @contextmanager
    def _locked(self, shard_id: int) -> Iterator[None]:
        lock = FileLock(self._cache_filelock_path, timeout=self.timeout_sec, poll_interval=TICK)
        try:
            lock.acquire()
        except Timeout as error:
            raise self._waited(shard_id) from error
        try:
            yield
        finally:
            lock.release()

    def called(self, shard_id: int) -> str:
        """A shard's stream and URL, for messages."""
        return f'{self.streams[self.stream_per_shard[shard_id]].where}/{self.shards[shard_id].raw_data.basename}'

    def _waited(self, shard_id: int) -> DataUnavailable:
        return DataUnavailable(
            f'{self.called(shard_id)}: another process of this machine did not come to an end with it, or data.cache_limit leaves no room for it, in '
            f'data.timeout_sec={self.timeout_sec:g} s; run the same command again'
        )


def pass_numbers(shards: NDArray[np.int64]) -> NDArray[np.int64]:
    """How many of the entries before each, in its run of equal entries, are the same: `[3, 3, 3, 4, 5, 5]` gives `[0, 1, 2, 0, 0, 1]`."""
    places = np.arange(len(shards))
    begins = np.append(True, shards[1:] != shards[:-1])
    return places - np.maximum.accumulate(np.where(begins, places, 0))


class _Ahead(threading.Thread):
    """Fetches the shards of the coming `predownload` samples. A daemon: it keeps a process from exiting for END_SEC at most.

    Where the process ends during a fetch it is waited for: Streaming unmaps at exit what the thread would then write to.
    """

    def __init__(self, dataset: StrictStreamingDataset, shard_ids: NDArray[np.int64]):
        super().__init__(daemon=True)
        self.dataset, self.shard_ids = dataset, shard_ids
        self.states, self.doubted = dataset._shard_states.numpy(), dataset._doubted.numpy()
        self.position = 0
        self.stopped = False

    def has(self, shard_id: int) -> bool:
        """Whether a shard that was compared is in the cache."""
        return bool(self.states[shard_id] == LOCAL and not self.doubted[shard_id])

    def end(self) -> None:
        self.stopped = True
        self.join(END_SEC)

    def run(self) -> None:
        try:
            self._fetch()
        finally:
            atexit.unregister(self.end)

    def _fetch(self) -> None:
        dataset, failed, begin = self.dataset, set(), 0
        while begin < len(self.shard_ids) and not self.stopped:
            end = self.position + dataset.predownload + 1
            for shard_id in dict.fromkeys(self.shard_ids[begin:end].tolist()):
                if self.stopped:
                    return
                if self.has(shard_id):
                    dataset._shard_access_times[shard_id] = time.time_ns()  # it is not to be evicted now
                elif shard_id not in failed:
                    try:
                        dataset.prepare_shard(shard_id, blocking=False)
                    except Exception:  # it is tried again when it is due, and that error counts
                        failed.add(shard_id)
            begin = max(begin, end)
            time.sleep(TICK)
