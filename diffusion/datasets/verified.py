"""A Streaming stream that gives whole, right shards or says what is wrong with them.

Streaming 0.13 hashes a shard only after its download, leaves a bad one under its final name, where the next start trusts it, trusts every file
of a cache by its name, and writes wherever the names in index.json lead. Here index.json comes from the dataset at each start, a download
gets its final name only when its hash is right, and what a cache holds is compared before it is used.
"""

import errno
import itertools
import os
import time
from collections.abc import Callable
from functools import cache
from glob import escape
from pathlib import Path
from typing import Any, Literal

from streaming import Stream
from streaming.base.format import FileInfo, Reader, get_index_basename
from streaming.base.format.mds import MDSReader
from streaming.base.hashing import get_hash

from diffusion.common.files import parse_json, replacing
from diffusion.common.object_storage import JITTER, keep_random_state
from diffusion.common.processes import failpoint
from diffusion.common.text import counted, print_message
from diffusion.contracts.errors import DataError, DataUnavailable
from diffusion.datasets.shards import leads_outside, num_samples_in

NUM_DOWNLOADS = 3  # of a shard whose hash stays wrong: once more for a bad copy under way, once more for a bad copy in between
LONGEST_PAUSE_SEC = 20
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class VerifiedStream(Stream):
    """Args:
    name: of the stream in the recipe, for messages.
    index: content of the dataset's index.json.
    verify: what is compared of a shard that the cache holds already: `size`, or also its `hash`.
    patience_sec: longest time that one shard is asked for again and again.
    streaming: what Stream takes.
    """

    def __init__(self, *, name: str, index: bytes, verify: Literal['hash', 'size'], patience_sec: float, **streaming: Any):
        super().__init__(**streaming)
        self.remote = self.remote.rstrip('/') if self.remote else None
        if self.remote is not None and os.path.realpath(self.remote) == os.path.realpath(self.local):
            self.remote = None  # it is no cache, nothing may be removed from it
        self.name, self.index, self.verify, self.patience_sec = name, index, verify, patience_sec

    @property
    def where(self) -> str:
        """Folder or URL of the data."""
        return f'stream {self.name}: {self.remote or self.local}'

    def path(self, info: FileInfo) -> Path:
        return Path(self._name(info))

    def _name(self, info: FileInfo) -> str:
        """Its path as text, a fifth of the time to make: each start looks at every shard."""
        return os.path.join(self.local, info.basename)

    def get_index_size(self) -> int:
        return len(self.index)

    def get_shards(self, world: Any, allow_unsafe_types: bool) -> list[Reader]:
        """The shards that index.json names.

        Raises:
            DataError: it is damaged, names a file outside of the dataset, or lacks hashes that the manifest promises.
        """
        where = f'{self.where}/{get_index_basename()}'
        shards: list[Reader] = []
        root = Path(self.local).resolve()
        inside = cache(lambda folder: self.remote is None or (root / folder).resolve().is_relative_to(root))
        try:
            content = parse_json(self.index)
            if content['version'] != 2:
                raise ValueError(f'version {content["version"]}, not 2')
            for entry in content['shards']:
                shard = self._shard(entry, where)
                shard.validate(allow_unsafe_types)
                self._refuse(shard.raw_data, where, inside)
                shards.append(shard)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(f'{where}: not an index of shards that can be trusted: {error!r}; make the dataset again') from error
        return shards

    def _shard(self, entry: dict[str, Any], where: str) -> MDSReader:
        """Read an entry of the index as MDSReader.from_json does, which first copies each deeply: a minute for 200,000."""
        fields = dict(entry)
        kind, version, raw_data = fields.pop('format'), fields.pop('version'), FileInfo(**fields.pop('raw_data'))
        if kind != 'mds' or fields['zip_data'] is not None:
            raise DataError(f'{where}: holds {kind} shards, compression {fields["compression"]}; only plain MDS is read: convert it again')
        if version != 2:
            raise ValueError(f'version {version}, not 2')
        return MDSReader(dirname=self.local, split=self.split, raw_data=raw_data, **fields)

    def _refuse(self, info: FileInfo, where: str, inside: Callable[[str], bool]) -> None:
        name = info.basename
        if leads_outside(name) or not name.strip('./') or '\0' in name or not inside(os.path.dirname(name)):
            raise DataError(f'{where}: names the shard {name!r}, which lies outside of the dataset; do not use data of this origin')
        if self.validate_hash and self.validate_hash not in info.hashes:
            raise DataError(
                f'{where}: has no {self.validate_hash} of shard {name}, although the manifest names it in `hashes`; copy the dataset again'
            )

    def set_up_local(self, shards: list[MDSReader], cache_usage_per_shard: Any) -> None:  # type: ignore[override]
        """Leave in the cache only what may belong to this dataset: shards of the right size, of the same index.json.

        Raises:
            DataError: a shard that has no remote is missing or has another size.
        """
        if self.remote is None:
            for shard in shards:
                damage = self.damage(shard, thorough=False)
                if damage:
                    raise self.broken(shard.raw_data, damage)
        else:
            self._forget_other_data(shards)
        for number, shard in enumerate(shards):
            cache_usage_per_shard[number] = shard.raw_data.bytes if os.path.isfile(self._name(shard.raw_data)) else 0

    def _forget_other_data(self, shards: list[MDSReader]) -> None:
        root = Path(self.local)
        for leftover in root.rglob('.tmp-*'):  # of downloads that were killed
            leftover.unlink(missing_ok=True)
        kept_index = root / get_index_basename()
        known = _hashes(kept_index.read_bytes()) if kept_index.is_file() else {}
        unknown_is_wrong = self.verify == 'size' or not self.validate_hash  # otherwise its hash will tell
        num_removed = 0
        for shard in shards:
            info = shard.raw_data
            path, before = self._name(info), known.get(info.basename)
            stale = unknown_is_wrong if before is None else before != info.hashes
            if os.path.isfile(path) and (stale or self.damage(shard, thorough=False)):
                os.unlink(path)
                num_removed += 1
        if num_removed:
            print_message(f'{self.where}: removed {counted(num_removed, "shard")} in {self.local}, not of this dataset or cut off: fetched again')
        if not kept_index.is_file() or kept_index.read_bytes() != self.index:
            try:
                with replacing(kept_index) as temporary:
                    temporary.write_bytes(self.index)
            except OSError as error:
                raise self._disk_trouble(error) from error

    def damage(self, shard: MDSReader, thorough: bool, path: Path | None = None) -> str:
        """Describe what is wrong with the local file of a shard, with expected and actual value; '' if nothing is.

        Args:
            thorough: compare the hash and the number of samples, not only the size.
        """
        info = shard.raw_data
        name = path or self._name(info)
        if not os.path.isfile(name):
            return 'is missing'
        num_bytes = os.stat(name).st_size
        if num_bytes != info.bytes:
            return f'has {num_bytes:,} bytes, index.json says {info.bytes:,}'
        if not thorough or not self.validate_hash:
            return ''
        path = Path(name)
        actual, expected = get_hash(self.validate_hash, path.read_bytes()), info.hashes[self.validate_hash]
        if actual != expected:
            return f'has {self.validate_hash} {actual}, index.json says {expected}'
        held = num_samples_in(path)
        return '' if held == shard.samples else f'holds {counted(held, "sample")}, index.json says {shard.samples}'

    def broken(self, info: FileInfo, damage: str) -> DataError:
        """The error that names a shard that fetching again does not repair."""
        kept = '' if self.remote else ' It is the only copy, so it stays as it is.'
        return DataError(
            f'{self.where}/{info.basename}: {damage}.{kept} Look at all of it with python -m data_prep.audit {self.remote or self.local}, '
            'and copy or make the dataset again'
        )

    def prepare_shard(self, shard: MDSReader) -> int:  # type: ignore[override]
        """Have a right copy of a shard in the cache; what is there already is compared thoroughly, and fetched again if it is bad.

        Raises:
            DataError: it is not there, or not what index.json says.
            DataUnavailable: storage does not answer, or the disk is full.
        """
        info = shard.raw_data
        try:
            damage = self.damage(shard, thorough=True)
            if not damage:
                return 0
            if self.remote is None:
                raise self.broken(info, damage)
            if self.path(info).exists():
                print_message(f'{self.where}/{info.basename}: the copy in {self.local} {damage}; it is fetched again')
                self.path(info).unlink()
            self._fetch(shard)
            return info.bytes
        except OSError as error:
            raise self._disk_trouble(error) from error

    def _fetch(self, shard: MDSReader) -> None:
        info = shard.raw_data
        path = self.path(info)
        temporary = path.with_name(f'.tmp-{os.getpid()}-{path.name}')
        try:
            for _ in range(NUM_DOWNLOADS):
                self._download(info.basename, temporary)
                damage = self.damage(shard, thorough=True, path=temporary)
                if not damage:
                    os.replace(temporary, path)
                    return
                temporary.unlink(missing_ok=True)
            raise self.broken(info, f'{damage}, also after {NUM_DOWNLOADS} downloads')
        finally:
            for rest in path.parent.glob(f'{escape(temporary.name)}*'):  # storage clients have temporary names of their own
                rest.unlink(missing_ok=True)

    def _download(self, basename: str, path: Path) -> None:
        """Ask for a file until it is here; OSError only for the local disk."""
        url, end = f'{self.remote}/{basename}', time.monotonic() + self.patience_sec
        keep_random_state(url.partition('://')[0])
        for attempt in itertools.count():
            try:
                failpoint('data.fetch')
                self._downloader.download(url, str(path), self.download_timeout)
                return
            except Exception as error:  # each client has exceptions of its own
                self._downloader.clean_up()
                if isinstance(error, OSError) and error.errno in DISK_FULL:
                    raise
                if _is_missing(error):
                    raise self._missing(basename) from error
                pause_sec = min(2**attempt, LONGEST_PAUSE_SEC) * JITTER.uniform(0.5, 1)
                if time.monotonic() + pause_sec > end:
                    raise DataUnavailable(
                        f'stream {self.name}: {url} could not be had in {self.patience_sec:.0f} s and {attempt + 1} attempts: '
                        f'{type(error).__name__}: {error}; run the same command again when storage answers, or raise data.timeout_sec'
                    ) from error
                time.sleep(pause_sec)

    def _missing(self, basename: str) -> DataError:
        return DataError(
            f'stream {self.name}: {self.remote}/{basename} does not exist, although index.json names it. Look at all of it with '
            f'python -m data_prep.audit {self.remote}, and copy or make the dataset again'
        )

    def _disk_trouble(self, error: OSError) -> DataUnavailable:
        room = 'make room there, or bound the cache with data.cache_limit' if error.errno in DISK_FULL else 'look at this disk'
        return DataUnavailable(f'stream {self.name}: {self.local} cannot be used: {error}; {room}, and run the same command again')


def _hashes(index: bytes) -> dict[str, dict[str, str]]:
    """Hashes by file name, of an index.json that may be damaged."""
    try:
        return {shard['raw_data']['basename']: shard['raw_data']['hashes'] for shard in parse_json(index)['shards']}
    except (ValueError, KeyError, TypeError):
        return {}


def _is_missing(error: Exception) -> bool:
    answer = getattr(error, 'response', None)  # botocore
    code = answer.get('Error', {}).get('Code') if isinstance(answer, dict) else None
    status = getattr(error, 'status', None) or getattr(error, 'code', None)  # OCI, Google
    return isinstance(error, FileNotFoundError) or code in ('404', 'NoSuchKey') or status == 404
