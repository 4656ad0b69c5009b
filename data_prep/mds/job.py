"""A job that can be stopped and run again: what the content of DEST depends on is in `DEST/job.json`, written before anything else, once, by one of
all processes that start; each is one of several that share the work, and a change of settings is refused.

`data_prep.convert`, `encode` and `recaption` add parts with markers (dataset.py, parts.py), `download` shards with stats (crawling/crawl.py),
`shapes` whole files.
"""

import hashlib
import json
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from diffusion.common.files import parse_json_object
from diffusion.common.ray_cluster import ClusterError, ClusterRefusal
from diffusion.common.storage import Folder, LocalFolder
from diffusion.contracts.errors import DataError, EncoderError, ManifestError
from diffusion.contracts.manifest import MANIFEST_NAME, Manifest

JOB_NAME = 'job.json'
Item = TypeVar('Item')


@dataclass(frozen=True)
class Share:
    """Which of several hosts this is; each has every world_size-th part."""

    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise DataError(f'--rank {self.rank} is not one of 0 to {self.world_size - 1} (--world-size {self.world_size})')

    def of(self, parts: Sequence[Item]) -> Sequence[Item]:
        """This host's parts."""
        return parts[self.rank :: self.world_size]


ALONE = Share()


@dataclass(frozen=True)
class Job:
    """The settings of one job, and the folder it writes.

    Attributes:
        dest: the dataset.
        settings: what it depends on apart from the input; the same in all processes that write to `dest`.
        name: of the file that holds them.
    """

    dest: Folder
    settings: dict[str, Any]
    name: str = JOB_NAME

    @cached_property
    def content(self) -> bytes:
        """Of job.json."""
        return json.dumps(self.settings, indent=1).encode()

    @cached_property
    def digest(self) -> str:
        """Of the settings; every part carries it, so that parts of two jobs are never merged."""
        return hashlib.sha256(self.content).hexdigest()[:16]

    def begin(self) -> None:
        """Take DEST for this job, or find that it was begun with the same settings. Of several jobs that begin at the same time one gets it.

        Raises:
            DataError: DEST holds something else, or was begun with other settings.
        """
        there = self._there()
        if there is None:
            present = list(self.dest.files()) or ([self.dest.url] if Path(self.dest.url).is_file() else [])
            if present and self._there() is None:  # asked again: another process may have begun just now
                raise DataError(f'{self.dest.url}: holds something else already ({", ".join(present[:3])}); name a new or empty folder')
        elif there != self.content and self._kept_nothing():
            self.dest.delete(MANIFEST_NAME)  # first: or the job that takes its place would look finished, too
            self._take(there)
            return
        self._take(None)

    @contextmanager
    def begun(self, first: Collection[str] = ()) -> Iterator[None]:
        """`begin`, for a block; one that is refused before it has written a part leaves DEST new, and no folder that was not there.

        Args:
            first: files that the block writes before any part, from the settings alone.
        """
        new = self._missing_folders(first)
        self.begin()
        try:
            yield
        except (DataError, EncoderError, ClusterRefusal, ClusterError, KeyboardInterrupt):
            self._withdraw(first)
            for folder in new:
                with suppress(OSError):  # not empty: the run had begun, or another one has
                    folder.rmdir()
            raise

    def claim(self) -> None:
        """Make sure that DEST is still this job's, before something is put there.

        Raises:
            DataError: it is another's.
        """
        self._take(None)

    def _withdraw(self, first: Collection[str]) -> None:
        """Leave DEST to others, if nothing but job.json and the `first` files is there: an attempt that met a mistake, such as a misspelt filter."""
        there = set(self.dest.files())
        if self._there() == self.content and there <= {self.name, *first}:
            for name in sorted(there - {self.name}):
                self.dest.delete(name)
            self.dest.delete(self.name)

    def _missing_folders(self, first: Collection[str]) -> list[Path]:
        """Folders that `begin` and writing the `first` files would make on a disk, the deepest ones first."""
        if not isinstance(self.dest, LocalFolder):
            return []
        root = Path(self.dest.url)
        inside = {root / parent for name in first for parent in Path(name).parents} - {root}
        return [folder for folder in (*sorted(inside, reverse=True), root, *root.parents) if not folder.exists()]

    def _take(self, old: bytes | None) -> None:
        there = self._there()
        if there == old:
            if self.dest.swap(self.name, old, self.content):
                return
            there = self._there()
        if there != self.content:
            self._refuse(there or b'{}')

    def _there(self) -> bytes | None:
        try:
            return self.dest.read(self.name)
        except FileNotFoundError:
            return None

    def _kept_nothing(self) -> bool:
        """Whether the job that is there has ended, without a single sample."""
        try:
            return Manifest.read(self.dest.url).num_samples == 0
        except ManifestError:
            return False

    def _refuse(self, there: bytes) -> None:
        path = f'{self.dest.url}/{self.name}'
        try:
            then = parse_json_object(there)
        except (ValueError, TypeError) as error:
            raise DataError(f'{path}: is damaged: {error}; copy it again, or name another DEST') from error
        remedy = 'name another DEST'
        if set(self.dest.files()) <= {self.name}:
            remedy += f'; nothing else is there yet: if no process works on it any more, remove {path} and start again'
        compare(then, self.settings, f'{self.dest.url}: was begun with', remedy)


def compare(then: dict[str, Any], now: dict[str, Any], what: str, remedy: str) -> None:
    """Raises DataError for the first value that has changed; it begins with `what` and ends with `remedy`."""
    now = json.loads(json.dumps(now))  # as `then` has come back from a file: with lists for tuples
    for key in {**then, **now}:
        if then.get(key) != now.get(key):
            before = f'{key}={then[key]}' if key in then else f'no {key} (not given, or by a version that did not keep it)'
            raise DataError(f'{what} {before}, now it is {now.get(key)}; {remedy}')
