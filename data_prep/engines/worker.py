"""The engine's side on other machines: an actor that makes parts, the task that reads for it, and the check that a machine is fit for either.

An expected error comes back as data: what is raised in an actor would arrive with a traceback of Ray's around it.
"""

import os
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import ray

from data_prep.engines.engine import PartWork, StreamedWork
from diffusion.common.collective import portable
from diffusion.common.environment import code_identity
from diffusion.contracts.errors import EncoderError, IncompleteError

MESSAGES_AHEAD = 4
REMEDY = 'use object storage (s3://, gs://, oci://), or a disk that all machines mount at the same place'


class ReaderLost(Exception):
    """The process that read for a part is gone, or its machine."""


def check_machine(identity: Mapping[str, str | None], folder: str, source: str | None, token: tuple[str, str] | None) -> str | None:
    """Change to the driver's working folder, and return what is not the same here; None if nothing.

    Args:
        identity: `code_identity` of the driver.
        folder: the driver's working folder, below which relative paths are.
        source: a local file of SOURCE.
        token: a local file in DEST, and what the driver wrote there.
    """
    with suppress(OSError):  # if there is no such folder, only relative paths miss it, and they say so below
        os.chdir(folder)
    here = code_identity()
    different = [f'{name} is {here.get(name)}, the driver has {value}' for name, value in identity.items() if here.get(name) != value]
    if different:
        return f'{"; ".join(different)}: install the same versions on all machines, or they would write unequal parts of one dataset'
    if source is not None and not Path(source).exists():
        return f'{Path(source).absolute()} of SOURCE is not there: {REMEDY}'
    if token is not None:
        path, content = token
        with suppress(OSError):
            if Path(path).read_text() == content:
                return None
        return f'DEST {Path(path).absolute().parents[1]} is another folder there than here: {REMEDY}'
    return None


Check = Callable[[], str | None]
"""`check_machine` with the driver's side of it."""


class PartActor:
    """Makes parts, each whole; calls of `do` may come from several threads at a time.

    Args:
        cpus, gpus: of this process.
        read_elsewhere: tasks on other machines read, and their messages stream to this one.
    """

    def __init__(self, work: PartWork[Any, Any], cpus: int, gpus: float, check: Check, read_elsewhere: bool):
        self.work, self.cpus, self.gpus, self.check, self.read_elsewhere = work, cpus, gpus, check, read_elsewhere
        self._make: Callable[[Any], Any] | None = None

    def begin(self) -> str | Exception:
        """Load what all parts need, before any `do`; returns the address of this machine."""
        address = ray.util.get_node_ip_address()
        try:
            if problem := self.check():
                raise IncompleteError(f'machine {address} of the Ray cluster: {problem}')
            if self._make is None:  # it is there if this process was only out of reach
                self._make = self._start()
        except EncoderError as error:
            return _as_data(EncoderError(f'machine {address} of the Ray cluster: {error}'))
        except Exception as error:
            return _as_data(error)
        return address

    def do(self, item: Any) -> Any:
        """Make a part; returns its result, or an exception."""
        assert self._make is not None
        try:
            return self._make(item)
        except ray.exceptions.RayTaskError as error:  # a mistake in what reads
            return _as_data(RuntimeError(str(error)))
        except ray.exceptions.RayError as error:
            return ReaderLost(str(error).strip().splitlines()[0])
        except Exception as error:
            return _as_data(error)

    def _start(self) -> Callable[[Any], Any]:
        if not isinstance(self.work, StreamedWork):
            return self.work.start(self.cpus, self.gpus)
        make, messages = self.work.start_fed(self.cpus, self.gpus), self.work.messages
        if self.read_elsewhere:
            self.shared_work, messages = ray.put(self.work), self._stream

        def do(item: Any) -> Any:
            with closing(read_ahead(messages(item))) as ahead:
                return make(ahead)

        return do

    def _stream(self, item: Any) -> Generator[Any]:
        """Messages of a task that runs on whichever machine has a CPU to spare; it is never more than a few ahead."""
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


def read_part(work: StreamedWork[Any, Any, Any], item: Any, check: Check) -> Iterator[Any]:
    """Yield the messages of an item, packed for the way."""
    if problem := check():
        yield IncompleteError(f'machine {ray.util.get_node_ip_address()} of the Ray cluster: {problem}')
        return
    for message in work.messages(item):  # not `yield from`: Ray sends something into the generator
        yield work.pack(message)


def read_ahead(messages: Generator[Any]) -> Generator[Any]:
    """Yield messages that a thread reads a few ahead; what reading raises is raised here."""
    end = object()
    with ThreadPoolExecutor(1) as thread:
        ahead = deque(thread.submit(next, messages, end) for _ in range(MESSAGES_AHEAD))
        try:
            while (message := ahead.popleft().result()) is not end:
                ahead.append(thread.submit(next, messages, end))
                yield message
        finally:
            for future in ahead:
                future.cancel()
            thread.submit(messages.close).result()


def _as_data(error: Exception) -> Exception:
    """Return the error as it can travel, with its traceback for one that no one expected."""
    error = portable(error)
    error.add_note(traceback.format_exc())
    return error
