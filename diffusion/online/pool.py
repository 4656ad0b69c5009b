"""The encoders of a run as one rank sees them: which are there, which has which micro-batch, and a loader whose batches they encode ahead.

A rank sends each micro-batch to the encoder that has least of it to do, from its own copy in the object store: whatever becomes of an encoder, the
work goes to another one, and nothing of Ray's lineage is needed. Ray starts a lost encoder again under its name.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from diffusion.common.ray_cluster import ClusterRefusal, refuse_lost_head
from diffusion.common.text import counted, first_line, print_message
from diffusion.contracts.batch import Batch, StoredImages
from diffusion.contracts.errors import DataUnavailable
from diffusion.online.encoder import BadImage

LOOK_SEC = 1.0  # between two looks at what has come; also between two calls of an encoder that does not answer yet
UNREACHABLE = 'its process has died, or its machine cannot be reached'
ANSWER_SEC = 10.0  # in which an encoder that computes says so
NUM_NAMED = 8  # samples that a message names
MAX_LOSSES, LOSSES_SEC = 10, 3600.0  # of one encoder within an hour, but for those over images that are suspected already


@dataclass(eq=False)
class MicroBatch:
    """A micro-batch on its way."""

    content: Any  # the rank's own copy in the object store
    training: bool  # see `ImageEncoder.encode`
    num_images: int
    due: bool = False  # its batch is the one that training waits for
    suspected: int = 0  # how many encoders were lost over it
    answer: Any = None  # once it has come
    dropped: bool = False  # nobody waits for it any more


@dataclass(eq=False)
class Member:
    """An encoder."""

    name: str
    actor: Any
    sent: dict[Any, MicroBatch] = field(default_factory=dict)  # its calls in their order
    begun: float = 0.0  # when it was given the first of them, or last said that it is at it
    starting: Any = None  # the call that it answers once it can serve; None if it serves
    call_again: float = 0.0  # when to ask a starting one again, if the call failed
    look: Any = None  # the call by which it says that it computes
    look_begun: float = 0.0
    serves: bool = False
    has_served: bool = False
    losses: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_LOSSES))  # when it was lost, the last times
    lost: str = ''  # why it will not come again; '' otherwise
    cause: str = ''


class Pool:
    """Args:
    ray: the module, connected.
    actors: of all encoders, by name.
    patience_sec: longest silence of an encoder that has work.
    """

    def __init__(self, ray: Any, actors: Mapping[str, Any], patience_sec: float):
        self.ray, self.patience_sec = ray, patience_sec
        self.members = [Member(name, actor) for name, actor in actors.items()]
        self.waiting: list[MicroBatch] = []  # for an encoder that serves
        self.num_images = self.num_replaced = 0
        self.waited_sec = 0.0  # for encoders, of all batches
        for member in self.members:
            member.starting = member.actor.ready.remote()

    @property
    def num_serving(self) -> int:
        return sum(member.serves for member in self.members)

    def send(self, images: np.ndarray | StoredImages, num_images: int, training: bool) -> MicroBatch:
        """Have (B, 3, H, W) uint8 images encoded, or stored ones."""
        work = MicroBatch(self.ray.put(images), training, num_images)
        self.waiting.append(work)
        self._hand_out()
        return work

    def drop(self, work: MicroBatch) -> None:
        work.dropped, work.content = True, None
        if work in self.waiting:
            self.waiting.remove(work)

    def advance(self, limit_sec: float) -> None:
        """Take what has come, and see to encoders that are lost, silent or back; waits for any of it, at most `limit_sec`.

        Raises:
            DataUnavailable: no encoder is left, and none will come again.
            ClusterRefusal, EncoderError: an encoder that has not served yet cannot.
            ClusterError: the head of the cluster is gone.
        """
        refuse_lost_head()
        calls = {call: member for member in self.members for call in (*member.sent, member.starting, member.look) if call is not None}
        done: list[Any] = []
        if calls:
            done, _ = self.ray.wait(list(calls), num_returns=1, timeout=limit_sec)
            done, _ = self.ray.wait(list(calls), num_returns=len(calls), timeout=0) if done else ([], None)
        else:
            time.sleep(limit_sec)
        for call in done:
            self._take(calls[call], call)
        for member in self.members:
            self._check_member(member)
        if all(member.lost for member in self.members):
            raise DataUnavailable(
                f'data.encoders.ray: no encoder is left. {self.members[0].name}: {self.members[0].lost}; run the same command again to resume'
            )
        self._hand_out()

    def _take(self, member: Member, call: Any) -> None:
        if call not in member.sent and call not in (member.starting, member.look):
            return  # of an encoder that was lost in between
        try:
            answer = self.ray.get(call)
        except self.ray.exceptions.RayTaskError:  # a fault of ours, with its traceback
            raise
        except self.ray.exceptions.RayError as error:
            if call is member.look:  # says nothing that the other calls do not
                member.look = None
            elif isinstance(error, self.ray.exceptions.ObjectLostError) and call in member.sent:  # the answer, not the encoder
                self.waiting.insert(0, member.sent.pop(call))
            else:
                self._lose(member, error)
            return
        if call is member.starting:
            member.starting = None
            self._register(member, answer)
        elif call is member.look:
            member.look = None
            if answer < self.patience_sec:
                member.begun = time.monotonic() - answer
            else:
                self._give_up(member, f'has computed for {answer:.0f} s on one micro-batch')
        else:
            work = member.sent.pop(call)
            member.begun = time.monotonic()
            if not work.dropped:
                work.answer, work.content = answer, None
                self.num_images += work.num_images

    def _register(self, member: Member, answer: Any) -> None:
        """A starting encoder has answered: with the name of its machine, or with what keeps it from serving."""
        if isinstance(answer, Exception):
            self._leave_out(member, answer)
            return
        if member.has_served:
            self.num_replaced += 1
            print_message(f'encoders: {member.name} is back, {answer}')
        member.serves = member.has_served = True

    def _leave_out(self, member: Member, error: Exception) -> None:
        """Give up an encoder that cannot serve: at the start that is an error, later the others do its work."""
        if not member.has_served:
            raise error
        member.lost = str(error)
        print_message(f'encoders: {member.name} is not used any more: {error}')

    def _lose(self, member: Member, error: Exception) -> None:
        """Its work goes to others. What it was computing may be the cause, and then waits until it is due, lest it take all the encoders with it."""
        member.cause = UNREACHABLE if isinstance(error, self.ray.exceptions.ActorUnavailableError) else first_line(error)
        works, member.sent = list(member.sent.values()), {}
        if member.serves and not (works and works[0].suspected):
            member.losses.append(time.monotonic())
        if works:
            works[0].suspected += 1
        self.waiting[:0] = [work for work in works if not work.dropped]
        if member.serves:
            print_message(f'encoders: {member.name} is lost: {member.cause}')
        member.serves, member.starting, member.look = False, None, None
        member.call_again = time.monotonic() + LOOK_SEC
        if isinstance(error, self.ray.exceptions.ActorDiedError) and error.actor_init_failed:
            cause = str(error).strip().splitlines()[-1]
            refusal = ClusterRefusal(f'could not be started: {cause}; install this project with its extra [ray] on all machines of the cluster')
            self._leave_out(member, refusal)
        elif len(member.losses) == MAX_LOSSES and (within_sec := member.losses[-1] - member.losses[0]) < LOSSES_SEC:
            often = f'lost {MAX_LOSSES} times within {within_sec / 60:.0f} min (limit {LOSSES_SEC / 60:.0f})'
            self._leave_out(member, DataUnavailable(f'{often}, the last time: {member.cause}; look at its machine (out of memory?)'))

    def _check_member(self, member: Member) -> None:
        now = time.monotonic()
        if member.lost:
            return
        if not member.serves:
            if member.starting is None and now > member.call_again:
                member.starting = member.actor.ready.remote()
            return
        if not member.sent or now - member.begun < self.patience_sec:
            return
        if member.look is None:
            member.look, member.look_begun = member.actor.busy_sec.options(concurrency_group='look').remote(), now
        elif now - member.look_begun > min(ANSWER_SEC, self.patience_sec):
            self._give_up(member, f'has not answered for {now - member.begun:.0f} s')

    def _give_up(self, member: Member, why: str) -> None:
        """Kill an encoder that hangs; Ray starts another one under its name."""
        self.ray.kill(member.actor, no_restart=False)
        self._lose(member, DataUnavailable(f'{why} (data.encoders.ray.patience_sec={self.patience_sec:g}) and was killed'))

    def _hand_out(self) -> None:
        serving = [member for member in self.members if member.serves]
        for work in [work for work in self.waiting if work.due or not work.suspected] if serving else ():
            member = min(serving, key=lambda member: len(member.sent))
            if not member.sent:
                member.begun = time.monotonic()
            member.sent[member.actor.encode.remote(work.content, work.training)] = work
            self.waiting.remove(work)

    def why_none(self) -> Iterator[str]:
        """Yield what is known of each encoder that does not serve."""
        for member in self.members:
            if not member.serves:
                yield f'{member.name}: {member.lost or member.cause or "still starting"}'


@dataclass(frozen=True)
class EncodedAhead:
    """Replaces images by moments in an iterator of batches, a few batches ahead, in the loader's order."""

    pool: Pool
    micro_size: int  # images that are encoded together. Other numbers round otherwise: these are the micro-batches of training
    ahead: int  # batches that are on their way while another one is trained on
    training: bool  # see `ImageEncoder.encode`
    timeout_sec: float  # longest wait for a batch
    pin: bool  # hand out tensors in pinned memory
    refuse: Callable[[int, str], None]  # raises DataError for the id of a sample that cannot be decoded, and the cause

    def __call__(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Yield the batches.

        Raises:
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
            if isinstance(work.answer, BadImage):
                self.refuse(int(keys[work.answer.position, 1]), work.answer.cause)
            if isinstance(work.answer, Exception):
                raise work.answer
        batch['moments'] = torch.cat([torch.from_numpy(work.answer) for work in works])
        return _pinned(batch) if self.pin else batch

    def _overdue(self, batch: Batch, works: list[MicroBatch]) -> DataUnavailable:
        """Return the error that names the samples that are missing, those first over which most encoders were lost."""
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
