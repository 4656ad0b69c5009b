"""Finished batches become parts of DEST, while the accelerator works on the next ones."""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Self

from data_prep.mds.job import Job
from data_prep.mds.parts import Columns, PartWriter
from data_prep.mds.tally import Tally
from diffusion.datasets.shards import Shard

BATCHES_AHEAD = 4  # computed and not yet written
COMMITS_AHEAD = 4  # parts that are being uploaded


@dataclass(frozen=True)
class PartEnd:
    """All images of a part have been sent."""

    part: Shard
    failures: list[tuple[str, str, str]]
    """Key, url and reason of each row left out of a stream."""


class PartsWriting:
    """Writes parts in a thread of its own, in the order in which it is told to, and uploads finished ones in others.

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
        """Of a part that has not ended; for steps."""
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
