"""Images to latents without the accelerator waiting: workers read, decode and resize; this thread encodes; another one writes.

A worker has a shard at a time to itself, and a batch holds images of one shard: the same shard gives the same latents to the bit,
whenever and next to whatever it is encoded.
"""

from __future__ import annotations

import math
import queue
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from tqdm import tqdm

from data_prep.mds.job import Job
from data_prep.mds.parts import Columns, PartWriter
from data_prep.mds.shards import Shard, read_shard
from data_prep.mds.tally import Tally
from diffusion.common.processes import end_with_parent
from diffusion.common.storage import Folder, StorageError, scratch_for
from diffusion.contracts.errors import DataError, IncompleteError
from diffusion.datasets.decode import ImageError
from diffusion.datasets.transforms import covered
from diffusion.encoders.frozen import FrozenEncoders

BATCHES_AHEAD = 4  # encoded and not yet written
COMMITS_AHEAD = 4  # parts that are being uploaded


@dataclass(frozen=True)
class Encoding:
    """From where to where, and what each stream holds."""

    source: Folder
    job: Job
    sizes: Mapping[str, tuple[int, int]]
    """Width and height of each stream, in pixels."""
    by_bucket: bool
    """Whether an image stays in the stream that it is in; otherwise it goes into each."""
    columns: Mapping[str, Columns]
    shard_bytes: int

    def sizes_of(self, shard: Shard) -> Mapping[str, tuple[int, int]]:
        """The streams that a shard's images go into."""
        return {shard.stream: self.sizes[shard.stream]} if self.by_bucket else self.sizes


@dataclass(frozen=True)
class Pixels:
    """A batch of one part and one stream: (B, 3, H, W) uint8, and the rows they are of."""

    part: Shard
    stream: str
    images: Tensor
    rows: list[dict[str, Any]]

    def pin_memory(self) -> Pixels:
        """For the DataLoader, which knows only tensors by itself."""
        return replace(self, images=self.images.pin_memory())


@dataclass(frozen=True)
class PartEnd:
    """All images of a part have been sent."""

    part: Shard
    failures: list[tuple[str, str, str]]
    """Key, url and reason of each row left out of a stream."""


@dataclass(frozen=True)
class Failure:
    """What a worker met, as data: an exception that crosses processes drags its traceback along."""

    error: Exception


def encode_captions(encoders: FrozenEncoders, captions: Sequence[str]) -> Tensor:
    """(B, L, width) float16, what the U-Net sees of the captions."""
    return encoders.encode_text(encoders.tokenize(captions)).text.half()


class PixelsOfShards(IterableDataset):
    """Messages about all rows of some shards; each worker of a DataLoader has every n-th shard."""

    def __init__(self, encoding: Encoding, shards: Sequence[Shard], batch_size: int):
        self.encoding, self.shards, self.batch_size = encoding, shards, batch_size

    def __iter__(self) -> Iterator[Pixels | PartEnd | Failure]:
        worker = get_worker_info()
        try:
            for shard in self.shards[worker.id :: worker.num_workers] if worker else self.shards:
                with scratch_for(self.encoding.job.dest) as scratch:
                    yield from self._messages(shard, scratch)
        except (DataError, StorageError) as error:
            yield Failure(error)

    def _messages(self, shard: Shard, scratch: Path) -> Iterator[Pixels | PartEnd]:
        sizes = self.encoding.sizes_of(shard)
        waiting: dict[str, list[tuple[Tensor, dict[str, Any]]]] = {stream: [] for stream in sizes}
        failures = []
        for row in read_shard(self.encoding.source, shard, scratch):
            content = row.pop('image')
            for stream, size in sizes.items():
                try:
                    pixels, crop = _cover(row, content, *size)
                    geometry = {'size': np.array((row['original_height'], row['original_width']), np.int32), 'crop': np.array(crop, np.int32)}
                    waiting[stream].append((pixels, {**row, **geometry}))
                except ImageError as error:
                    failures.append((row['key'], row.get('url', ''), str(error)))
                if len(waiting[stream]) == batch_at(size, self.batch_size):
                    yield _batch(shard, stream, waiting[stream])
                    waiting[stream] = []
        yield from (_batch(shard, stream, rest) for stream, rest in waiting.items() if rest)
        yield PartEnd(shard, failures)


def batch_at(size_px: tuple[int, int], batch_size: int) -> int:
    """Images a pass: as many pixels as `batch_size` squares of 256 px have, or fewer."""
    return max(1, min(batch_size, batch_size * 256**2 // math.prod(size_px)))


def _cover(row: dict[str, Any], content: bytes, width: int, height: int) -> tuple[Tensor, tuple[int, int]]:
    if row['width'] < width or row['height'] < height:
        raise ImageError(f'short side below {width} px' if width == height else 'smaller than its aspect bucket')
    return covered(content, width, height)


def _batch(shard: Shard, stream: str, waiting: list[tuple[Tensor, dict[str, Any]]]) -> Pixels:
    return Pixels(shard, stream, torch.stack([pixels for pixels, _ in waiting]), [row for _, row in waiting])


def encode_parts(
    encoding: Encoding,
    encoders: FrozenEncoders,
    text_embeddings: bool,
    shards: Sequence[Shard],
    batch_size: int,
    processes: int,
    progress: tqdm,
) -> Iterator[Tally]:
    """Tallies of the parts as they are committed."""
    pixels = PixelsOfShards(encoding, shards, batch_size)
    workers = min(processes, len(shards))
    loader = DataLoader(
        pixels,
        batch_size=None,
        num_workers=workers,
        prefetch_factor=4 if workers else None,
        worker_init_fn=_begin_worker if workers else None,
        pin_memory=encoders.device.type == 'cuda',
    )
    with Writing(encoding) as writing:
        try:
            for message in loader:
                if isinstance(message, Failure):
                    raise message.error
                if isinstance(message, PartEnd):
                    writing.submit(message)
                    progress.update(message.part.num_samples)
                else:
                    moments = encoders.encode_images(message.images.to(encoders.device, non_blocking=True)).half()
                    embeddings = encode_captions(encoders, [row['caption'] for row in message.rows]) if text_embeddings else None
                    writing.submit(Latents(message, moments, embeddings))
                yield from writing.committed()
        except torch.cuda.OutOfMemoryError as error:
            raise DataError(f'the GPU has too little memory for --batch-size {batch_size}: {error}; try {max(1, batch_size // 2)}') from error
        except RuntimeError as error:
            if not str(error).startswith('DataLoader worker (pid'):
                raise
            raise IncompleteError(
                'a worker process was killed, perhaps for lack of memory; nothing is lost: run the same command again, with fewer --processes'
            ) from error
        writing.finish()
        yield from writing.committed()


def _begin_worker(_: int) -> None:
    end_with_parent()


@dataclass(frozen=True)
class Latents:
    """An encoded batch; the tensors may still be on the device, and not computed yet."""

    pixels: Pixels
    moments: Tensor
    embeddings: Tensor | None


class Writing:
    """Writes what is submitted in a thread of its own, and uploads finished parts in others."""

    def __init__(self, encoding: Encoding):
        self.encoding = encoding
        self._queue: queue.Queue[Latents | PartEnd | None] = queue.Queue(BATCHES_AHEAD)
        self._open: dict[str, tuple[PartWriter, ExitStack]] = {}
        self._commits: list[Future[Tally]] = []
        self._uploads = ThreadPoolExecutor(COMMITS_AHEAD)
        self._slots = threading.BoundedSemaphore(2 * COMMITS_AHEAD)
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, daemon=True)

    def __enter__(self) -> Writing:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        while self._thread.is_alive():  # after an error: it still writes, or waits for more
            with suppress(queue.Full):
                self._queue.put(None, timeout=0.1)
                self._thread.join()
        self._uploads.shutdown(wait=True, cancel_futures=True)
        for _writer, scratch in self._open.values():
            scratch.close()

    def submit(self, item: Latents | PartEnd | None) -> None:
        """Have it written; waits while too much is waiting already. Raises what the writing has met."""
        while True:
            if self._error is not None:
                raise self._error
            try:
                return self._queue.put(item, timeout=1)
            except queue.Full:
                continue

    def finish(self) -> None:
        """Wait until everything is written and uploaded."""
        self.submit(None)
        self._thread.join()
        if self._error is not None:
            raise self._error
        for commit in self._commits:
            commit.exception()

    def committed(self) -> Iterator[Tally]:
        """Parts that have become part of DEST since the last call."""
        done = [commit for commit in self._commits if commit.done()]
        for commit in done:
            self._commits.remove(commit)
            yield commit.result()

    def _work(self) -> None:
        try:
            while (item := self._queue.get()) is not None:
                if isinstance(item, PartEnd):
                    self._end(item)
                else:
                    self._write(item)
        except BaseException as error:  # handed to the thread that submits
            self._error = error

    def _writer(self, part: Shard) -> PartWriter:
        if part.name not in self._open:
            stack = ExitStack()
            scratch = stack.enter_context(scratch_for(self.encoding.job.dest))
            writer = PartWriter(self.encoding.job, part.name, self.encoding.columns, scratch, self.encoding.shard_bytes)
            self._open[part.name] = writer, stack
        return self._open[part.name][0]

    def _write(self, latents: Latents) -> None:
        stream, writer = latents.pixels.stream, self._writer(latents.pixels.part)
        moments = latents.moments.cpu().numpy()
        embeddings = None if latents.embeddings is None else latents.embeddings.cpu().numpy()
        for i, row in enumerate(latents.pixels.rows):
            if not np.isfinite(moments[i]).all():
                writer.drop(row['key'], row.get('url', ''), 'latents not finite')
                continue
            values = {**row, 'moments': moments[i]}
            if embeddings is not None:
                values['text_embeddings'] = embeddings[i]
            writer.keep({column: values[column] for column in self.encoding.columns[stream]}, stream)

    def _end(self, end: PartEnd) -> None:
        writer = self._writer(end.part)
        for failure in end.failures:
            writer.drop(*failure)
        _, scratch = self._open.pop(end.part.name)
        self._slots.acquire()  # what waits for its upload takes scratch space: better to wait here
        commit = self._uploads.submit(_commit, writer, end.part.fingerprint, scratch)
        commit.add_done_callback(lambda _: self._slots.release())
        self._commits.append(commit)


def _commit(writer: PartWriter, identity: dict[str, Any], scratch: ExitStack) -> Tally:
    with scratch:
        return writer.commit(identity)
