"""What is done to each part of a job, apart from who does it: the processes of this host (local.py) or the machines of a Ray cluster (cluster.py).

The same part gives the same files whenever, wherever and however often it is done. So an engine may try a part again, do it twice at the same
time, or leave the rest to another engine.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

from diffusion.common.storage import Folder

Item = TypeVar('Item')
Result = TypeVar('Result')
Message = TypeVar('Message')


@dataclass(frozen=True)
class Resources:
    """What one worker of a cluster takes.

    Attributes:
        cpus: also the number of threads that it computes with.
        gpus: a fraction where several share one.
        custom: name of a resource that the cluster's owner has given to some nodes, such as `A10G`; a worker takes 1 of it.
    """

    cpus: int = 1
    gpus: float = 0
    custom: str | None = None


class PartWork(ABC, Generic[Item, Result]):
    """What is done to each part of a job; picklable, because it goes to the processes that do it.

    Attributes:
        label: of the progress bar.
        unit: of what the progress bar counts.
        uses_gpu: whether it is faster on a GPU.
    """

    label: ClassVar[str]
    unit: ClassVar[str] = 'rows'
    uses_gpu: ClassVar[bool] = False

    @property
    @abstractmethod
    def reads(self) -> Folder:
        """Where the items' files are."""

    @property
    @abstractmethod
    def writes(self) -> Folder:
        """The dataset."""

    @abstractmethod
    def name(self, item: Item) -> str:
        """Of the part that the item becomes."""

    @abstractmethod
    def file(self, item: Item) -> str:
        """One that the item is read from, below `reads`."""

    @abstractmethod
    def count(self, item: Item, result: Result) -> int:
        """How far an item moves the progress bar."""

    @abstractmethod
    def here(self, items: Sequence[Item], processes: int) -> Iterator[Result]:
        """Results of all items as they come, from processes of this host; 0: from this one."""

    @abstractmethod
    def start(self, resources: Resources) -> Callable[[Item], Result]:
        """What does one item in a process of another machine; called once there, it loads what all items need."""


class StreamedWork(PartWork[Item, Result], Generic[Item, Message, Result]):
    """Work of two stages, which may run on different machines: reading gives a stream of messages, from which the part is made."""

    @abstractmethod
    def messages(self, item: Item) -> Generator[Message]:
        """What is read of an item, in a fixed order; an expected error is the last message."""

    @abstractmethod
    def start_fed(self, resources: Resources) -> Callable[[Iterator[Message]], Result]:
        """What makes a part of the messages of one item; several threads may call it at the same time. `start` says more."""

    def start(self, resources: Resources) -> Callable[[Item], Result]:
        make = self.start_fed(resources)
        return lambda item: make(self.messages(item))

    def pack(self, message: Message) -> Any:
        """The message as it travels between machines."""
        return message

    def unpack(self, packed: Any) -> Message:
        return packed


class Engine(ABC):
    """Who does the work."""

    @abstractmethod
    def map(self, work: PartWork[Item, Result], items: Sequence[Item]) -> Iterator[Result]:
        """Results of the work on each item, as they come.

        Raises:
            IncompleteError: a part was not done because processes were killed; the same call resumes. What the work raises is raised here, too.
        """

    def close(self) -> None:  # noqa: B027  # the local one holds nothing
        """Let go of what the engine holds."""
