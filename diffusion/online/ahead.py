"""A loader's batches with moments in the place of images, encoded elsewhere a few batches ahead, in the loader's order."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from diffusion.common.text import counted
from diffusion.contracts.batch import Batch
from diffusion.contracts.errors import DataUnavailable
from diffusion.online.encoder import BadImage
from diffusion.online.pool import LOOK_SEC, MicroBatch, Pool

NUM_NAMED = 8  # samples that a message names


@dataclass(frozen=True)
class EncodedAhead:
    """From an iterator of batches to an iterator of batches.

    Args:
        pool: of the encoders.
        micro_size: images that are encoded together. Other numbers round otherwise: these are the micro-batches of training.
        ahead: batches that are on their way while another one is trained on.
        training: see `ImageEncoder.encode`.
        timeout_sec: longest wait for a batch.
        pin: hand out tensors in pinned memory.
        refuse: raises DataError for the id of a sample that cannot be decoded, and the cause.
    """

    pool: Pool
    micro_size: int
    ahead: int
    training: bool
    timeout_sec: float
    pin: bool
    refuse: Callable[[int, str], None]

    def __call__(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Raises:
        DataUnavailable: a batch took longer than `timeout_sec`, or no encoder is left.
        DataError: an image cannot be decoded.
        ClusterRefusal: an encoder has no room for a micro-batch.
        """
        under_way: deque[tuple[Batch, list[MicroBatch]]] = deque()
        try:
            for batch in batches:
                under_way.append((batch, self._sent(batch)))
                if len(under_way) > self.ahead:
                    yield self._encoded(*under_way.popleft())
            while under_way:
                yield self._encoded(*under_way.popleft())
        finally:
            for _, works in under_way:
                for work in works:
                    self.pool.drop(work)

    def _sent(self, batch: Batch) -> list[MicroBatch]:
        if 'stored' in batch:
            return [self.pool.send(part, len(part.contents), self.training) for part in batch.pop('stored').split(self.micro_size)]
        return [self.pool.send(part.numpy(), len(part), self.training) for part in batch.pop('images').split(self.micro_size)]

    def _encoded(self, batch: Batch, works: list[MicroBatch]) -> Batch:
        for work in works:
            work.due = True
        self.pool.advance(0)
        waited_sec, begun = 0.0, time.monotonic()
        while any(work.answer is None for work in works):
            self.pool.advance(LOOK_SEC)
            now = time.monotonic()
            waited_sec, begun = waited_sec + min(now - begun, 10 * LOOK_SEC), now  # not what this process was stopped for
            if waited_sec > self.timeout_sec:
                raise self._overdue(batch, works)
        self.pool.waited_sec += waited_sec
        for work, keys in zip(works, batch['sample_key'].split(self.micro_size), strict=True):
            error = work.answer.error
            if isinstance(error, BadImage):
                self.refuse(int(keys[error.position, 1]), error.cause)
            if error is not None:
                raise error
        batch['moments'] = torch.cat([torch.from_numpy(work.answer.moments) for work in works])
        return _pinned(batch) if self.pin else batch

    def _overdue(self, batch: Batch, works: list[MicroBatch]) -> DataUnavailable:
        """Says which samples are missing, those first over which most encoders were lost."""
        keys = zip(works, batch['sample_key'].split(self.micro_size), strict=True)
        missing = sorted(((work, part) for work, part in keys if work.answer is None), key=lambda each: -each[0].suspected)
        suspected, first = missing[0][0].suspected, missing[0][1].tolist()
        named = ', '.join(str(sample_id) for _, sample_id, _ in first[:NUM_NAMED]) + (' ...' if len(first) > NUM_NAMED else '')
        over = f'; {counted(suspected, "encoder")} lost over the samples with the ids {named} of epoch {first[0][0]}' if suspected else ''
        serving = f'{self.pool.num_serving} of {counted(len(self.pool.members), "encoder")} serve'
        why = ''.join(f'; {cause}' for cause in self.pool.why_none())
        return DataUnavailable(
            f'data.encoders.ray: {len(missing)} of {len(works)} micro-batches of a batch did not come back within {self.timeout_sec:g} s '
            f'(data.timeout_sec)'
            f'{over}; {serving}{why}. Look at their machines and run the same command again to resume'
        )


def _pinned(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.pin_memory()
    return {name: _pinned(part) for name, part in value.items()} if isinstance(value, dict) else value
