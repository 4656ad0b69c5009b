"""Work that ends its process, for the tests of engines; without torch, so that a worker begins in a second."""

import os
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from data_prep.converting.conversion import Conversion
from data_prep.engines.engine import StreamedWork
from data_prep.mds.job import Tally
from data_prep.sources.base import Part
from diffusion.common.storage import Folder, open_folder

POISON = 'poison'
SLOW = 'slow'


class NumberFile(NamedTuple):
    """A file with a number."""

    path: str

    @property
    def name(self) -> str:
        return f'part-{self.path}'


@dataclass(frozen=True)
class Squares(StreamedWork[NumberFile, int, int]):
    """The square of a number in a file; of POISON the process ends, in one stage or the other; SLOW never ends."""

    label = 'squares'

    source: str
    dest: str
    dies_reading: bool = False

    @property
    def reads(self) -> Folder:
        return open_folder(self.source)

    @property
    def writes(self) -> Folder:
        return open_folder(self.dest)

    def count(self, item: NumberFile, result: int) -> int:
        return 1

    def here(self, items, processes):
        raise NotImplementedError

    def messages(self, item: NumberFile) -> Generator[int]:
        yield 1
        if self.dies_reading:
            self._meet(item.path)
        yield int((Path(self.source) / item.path).read_text())

    def start_fed(self, cpus: int, gpus: float) -> Callable[[Iterator[int]], int]:
        def make(messages: Iterator[int]) -> int:
            one, number = messages
            if not self.dies_reading:
                self._meet({13: POISON, 14: SLOW}.get(number, ''))
            with (Path(self.dest) / 'done').open('a') as done:
                done.write(f'{number}\n')
            return one * number**2

        return make

    def _meet(self, item: str) -> None:
        if item in (POISON, SLOW):
            with (Path(self.dest) / 'deaths').open('a') as deaths:
                deaths.write(f'{os.getpid()}\n')
        if item == POISON:
            os._exit(1)
        if item == SLOW:
            time.sleep(1000)


class DiesAtStart(Squares):
    """Ends its process before it could do anything."""

    def start_fed(self, cpus: int, gpus: float) -> Callable[[Iterator[int]], int]:
        os._exit(1)


class DiesAfterCommit(Conversion):
    """Ends its process once, just after its first part was committed."""

    def __call__(self, part: Part) -> Tally:
        tally = super().__call__(part)
        marker = Path(self.job.dest.url).parent / 'has-died'
        if not marker.exists():
            marker.touch()
            os._exit(1)
        return tally
