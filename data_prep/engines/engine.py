"""The work on each part of a job, apart from who does it: processes of this host (local.py) or the machines of a Ray cluster (cluster.py).

The same part gives the same files whenever, wherever and however often it is made. So an engine may try a part again, make it twice at the same
time, or leave the rest to another engine.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, ClassVar, Generic, TypeVar

from diffusion.common.storage import Folder

Item = TypeVar('Item')
Result = TypeVar('Result')
Message = TypeVar('Message')


class PartWork(ABC, Generic[Item, Result]):
    """Work on each part of a job; picklable, because it goes to the processes that do it.

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
        """Folder of the items' files."""

    @property
    @abstractmethod
    def writes(self) -> Folder:
        """Folder of the dataset."""

    @abstractmethod
    def name(self, item: Item) -> str:
        """Name of the part that the item becomes."""

    @abstractmethod
    def file(self, item: Item) -> str:
        """Path of a file that the item is read from, below `reads`."""

    @abstractmethod
    def count(self, item: Item, result: Result) -> int:
        """Return how far an item moves the progress bar."""

    @abstractmethod
    def here(self, items: Sequence[Item], processes: int) -> Iterator[Result]:
        """Yield the results of all items as they come, from processes of this host; 0: from this one."""

    @abstractmethod
    def start(self, cpus: int, gpus: float) -> Callable[[Item], Result]:
        """Load what all items need, once in a process of another machine that has these resources; returns the function of an item."""


class StreamedWork(PartWork[Item, Result], Generic[Item, Message, Result]):
    """Work of two stages, which may run on different machines: reading gives a stream of messages, from which the part is made."""

    @abstractmethod
    def messages(self, item: Item) -> Generator[Message]:
        """Read an item, in a fixed order; an expected error is the last message."""

    @abstractmethod
    def start_fed(self, cpus: int, gpus: float) -> Callable[[Iterator[Message]], Result]:
        """Load as `start` does; the function makes a part of the messages of one item, and several threads may call it at the same time."""

    def start(self, cpus: int, gpus: float) -> Callable[[Item], Result]:
        make = self.start_fed(cpus, gpus)
        return lambda item: make(self.messages(item))

    def pack(self, message: Message) -> Any:
        """Return the message as it travels between machines."""
        return message

    def unpack(self, packed: Any) -> Message:
        return packed


class Engine(ABC):
    """Makes the parts of a job."""

    @abstractmethod
    def map(self, work: PartWork[Item, Result], items: Sequence[Item]) -> Iterator[Result]:
        """Yield the results of the work on each item, as they come.

        Raises:
            IncompleteError: a part was not made because processes were killed; the same call resumes. What the work raises is raised here, too.
        """

    def close(self) -> None:  # noqa: B027  # the local one holds nothing
        """Release what the engine holds."""
