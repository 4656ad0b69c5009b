"""A job that can be stopped and run again: its share of the work, its settings, its counts.

What the content of DEST depends on is in `DEST/job.json`, written before anything else, once, by one of all processes that start; a change of
settings is refused.

`data_prep.convert`, `encode` and `recaption` add parts with markers (dataset.py), `download` shards with stats (crawling/crawl.py),
`shapes` whole files.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Self, TypeVar

from diffusion.common.files import parse_json_object
from diffusion.common.ray_cluster import ClusterError, ClusterRefusal
from diffusion.common.storage import Folder, LocalFolder
from diffusion.contracts.errors import DataError, EncoderError, ManifestError
from diffusion.contracts.manifest import MANIFEST_NAME, Manifest

JOB_NAME = 'job.json'
Item = TypeVar('Item')


@dataclass(frozen=True)
class Share:
    """Place among several hosts that share the work; each has every world_size-th part."""

    rank: int = 0
    world_size: int = 1
    merge_only: bool = False  # write nothing but what is merged from the parts of all hosts
    launched: bool = False  # the other ranks run now, started by the same launcher; the first one waits for them, merges and shows the whole

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise DataError(f'--rank {self.rank} is not one of 0 to {self.world_size - 1} (--world-size {self.world_size})')

    def of(self, parts: Sequence[Item]) -> Sequence[Item]:
        """Return this host's parts."""
        return parts[self.rank :: self.world_size]


ALONE = Share()


@dataclass
class Tally:
    """Counts of what became of the input rows, each of which is kept or dropped."""

    kept_in: Counter[str] = field(default_factory=Counter)  # kept rows by stream; a dataset that is one stream has the name ''
    dropped: Counter[str] = field(default_factory=Counter)  # rows left out, by reason
    notes: Counter[str] = field(default_factory=Counter)  # what was done to kept rows, such as `re-encoded: CMYK`
    min_side_px: dict[str, int] = field(default_factory=dict)  # shortest side of any kept image, by stream
    num_bytes: int = 0  # size of the shards
    attempted_now: int = 0  # rows that this run of the command dealt with; the others were there already
    remarks: list[str] = field(default_factory=list)  # lines for the end of the closing table

    @property
    def kept(self) -> int:
        return self.kept_in.total()

    @property
    def attempted(self) -> int:
        return self.kept + self.dropped.total()

    def keep(self, stream: str = '', side_px: int | None = None) -> None:
        self.kept_in[stream] += 1
        if side_px is not None:
            self.min_side_px[stream] = min(side_px, self.min_side_px.get(stream, side_px))

    def add(self, other: 'Tally') -> None:
        self.attempted_now += other.attempted_now
        self.num_bytes += other.num_bytes
        for mine, its in ((self.kept_in, other.kept_in), (self.dropped, other.dropped), (self.notes, other.notes)):
            mine.update(its)
        for stream, side_px in other.min_side_px.items():
            self.min_side_px[stream] = min(side_px, self.min_side_px.get(stream, side_px))

    def to_json(self) -> dict[str, Any]:
        """Return what a part's marker keeps."""
        return {name: getattr(self, name) for name in ('attempted', 'kept_in', 'dropped', 'notes', 'min_side_px', 'num_bytes')}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Self:
        kept_in, dropped, notes = (Counter(content[name]) for name in ('kept_in', 'dropped', 'notes'))
        return cls(kept_in, dropped, notes, content['min_side_px'], content['num_bytes'])


@dataclass(frozen=True)
class Job:
    """The settings of one job, and the folder it writes."""

    dest: Folder  # the dataset
    settings: dict[str, Any]  # what it depends on apart from the input; the same in all processes that write to `dest`
    name: str = JOB_NAME  # of the file that holds them

    @cached_property
    def content(self) -> bytes:
        """Content of job.json."""
        return json.dumps(self.settings, indent=1).encode()

    @cached_property
    def digest(self) -> str:
        """Digest of the settings; every part carries it, so that parts of two jobs are never merged."""
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
        new = list[Path]()  # folders on a disk that this makes, the deepest ones first
        if isinstance(self.dest, LocalFolder):
            root = Path(self.dest.url)
            inside = {root / parent for name in first for parent in Path(name).parents} - {root}
            new = [folder for folder in (*sorted(inside, reverse=True), root, *root.parents) if not folder.exists()]
        self.begin()
        try:
            yield
        except (DataError, EncoderError, ClusterRefusal, ClusterError, KeyboardInterrupt):
            there = set(self.dest.files())
            if self._there() == self.content and there <= {self.name, *first}:  # nothing of a part: a mistake was met, such as a misspelt filter
                for name in sorted(there, key=lambda name: (name == self.name, name)):
                    self.dest.delete(name)
            for folder in new:
                with suppress(OSError):  # not empty: the run had begun, or another one has
                    folder.rmdir()
            raise

    def claim(self) -> None:
        """Make sure that DEST is still this job's, before something is put there. Raises DataError: it is another's."""
        self._take(None)

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
        """Return whether the job that is there has ended, without a single sample."""
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
