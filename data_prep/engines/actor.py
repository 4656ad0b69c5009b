"""What runs on the other machines: an actor that makes parts, and the task that reads for it.

An expected error comes back as data: what is raised in an actor would arrive with a traceback of Ray's around it.
"""

from __future__ import annotations

import os
import queue
import threading
import traceback
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any

import ray

from data_prep.engines.engine import PartWork, Resources, StreamedWork
from data_prep.engines.nodes import NodeCheck
from diffusion.common.collective import portable
from diffusion.contracts.errors import EncoderError, IncompleteError

MESSAGES_AHEAD = 4


@dataclass(frozen=True)
class ActorPlace:
    """Where an actor runs, as soon as it can make parts."""

    node_id: str
    address: str
    process_id: int


@dataclass(frozen=True)
class Done:
    result: Any


@dataclass(frozen=True)
class Failed:
    """What the work raised, and where, for an error that no one expected."""

    error: Exception
    trace: str

    @classmethod
    def by(cls, error: Exception) -> Failed:
        return cls(portable(error), traceback.format_exc())


@dataclass(frozen=True)
class StreamLost:
    """The process that read for this part is gone, or its machine."""

    reason: str
    machine_gone: bool


class PartActor:
    """Makes parts, each whole; calls of `do` may come from several threads at a time.

    Args:
        read_elsewhere: tasks on other machines read, and their messages stream to this one.
    """

    def __init__(self, work: PartWork[Any, Any], resources: Resources, check: NodeCheck, read_elsewhere: bool):
        self.work, self.resources, self.check, self.read_elsewhere = work, resources, check, read_elsewhere

    def begin(self) -> ActorPlace | Failed:
        """Load what all parts need."""
        context = ray.get_runtime_context()
        address = ray.util.get_node_ip_address()
        try:
            if problem := self.check.enter():
                raise IncompleteError(f'machine {address} of the Ray cluster: {problem}')
            self._do = self._start()
        except EncoderError as error:
            return Failed.by(EncoderError(f'machine {address} of the Ray cluster: {error}'))
        except Exception as error:
            return Failed.by(error)
        return ActorPlace(context.get_node_id(), address, os.getpid())

    def do(self, item: Any) -> Done | Failed | StreamLost:
        """Make a part."""
        try:
            return Done(self._do(item))
        except ray.exceptions.RayTaskError as error:  # a mistake in what reads
            return Failed.by(RuntimeError(str(error)))
        except ray.exceptions.RayError as error:
            return _stream_lost(error)
        except Exception as error:
            return Failed.by(error)

    def _start(self) -> Callable[[Any], Any]:
        if not isinstance(self.work, StreamedWork):
            return self.work.start(self.resources)
        self.shared_work = ray.put(self.work) if self.read_elsewhere else None
        make, messages = self.work.start_fed(self.resources), self._stream if self.read_elsewhere else self.work.messages
        return lambda item: _consume(messages(item), make)

    def _stream(self, item: Any) -> Generator[Any]:
        """The messages of a task that runs on whichever machine has a CPU to spare; it is never more than a few ahead."""
        assert isinstance(self.work, StreamedWork)
        task = ray.remote(  # type: ignore[call-overload]  # Ray's types do not know the last one
            num_cpus=1,
            num_returns='streaming',
            max_retries=0,  # the driver counts the attempts
            scheduling_strategy='SPREAD',
            _generator_backpressure_num_objects=MESSAGES_AHEAD,
        )(read_part)
        stream = task.remote(self.shared_work, item, self.check)
        try:
            for message in stream:
                yield self.work.unpack(ray.get(message))
        finally:
            ray.cancel(stream)


def read_part(work: StreamedWork[Any, Any, Any], item: Any, check: NodeCheck) -> Iterator[Any]:
    """The messages of an item, packed for the way."""
    if problem := check.enter():
        yield IncompleteError(f'machine {ray.util.get_node_ip_address()} of the Ray cluster: {problem}')
        return
    for message in work.messages(item):  # not `yield from`: Ray sends something into the generator
        yield work.pack(message)


def _stream_lost(error: Exception) -> StreamLost:
    """What became of a task whose process is gone."""
    gone = ray.exceptions.NodeDiedError, ray.exceptions.ObjectLostError
    return StreamLost(str(error).strip().splitlines()[0], isinstance(error, gone))


def _consume(messages: Generator[Any], make: Callable[[Iterator[Any]], Any]) -> Any:
    """Make a part of messages that a thread reads a few ahead; what that raises is raised here."""
    ready: queue.Queue[tuple[Any, Exception | None] | None] = queue.Queue(MESSAGES_AHEAD)
    stop = threading.Event()

    def read() -> None:
        try:
            for message in messages:
                ready.put((message, None))
                if stop.is_set():
                    break
        except Exception as error:
            ready.put((None, error))
        finally:
            messages.close()
            ready.put(None)

    def received() -> Iterator[Any]:
        while (entry := ready.get()) is not None:
            message, error = entry
            if error is not None:
                raise error
            yield message

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    try:
        return make(received())
    finally:
        stop.set()
        while thread.is_alive():  # a reader that waits for room finds it, and then that it is to stop
            _make_room(ready)
            thread.join(0.05)


def _make_room(ready: queue.Queue[Any]) -> None:
    while not ready.empty():
        ready.get_nowait()
