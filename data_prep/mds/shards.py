"""Reading an MDS data set shard by shard, each checked against the hash it was written with."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from data_prep.errors import DataError
from data_prep.mds.parts import in_stream
from diffusion.datasets.manifest import MANIFEST_NAME, Manifest
from diffusion.storage import Folder

REMEDY = 'copy it again; python -m data_prep.inspect says how to have it written anew'


class DamagedShard(DataError):
    """A shard is missing, or is not what the index says."""


@dataclass(frozen=True)
class Shard:
    """A shard file of a data set, and its entry in index.json."""

    stream: str
    entry: dict[str, Any]

    @property
    def path(self) -> str:
        """File name below the data set."""
        return in_stream(self.stream, self.basename)

    @property
    def basename(self) -> str:
        return self.entry['raw_data']['basename']

    @property
    def num_samples(self) -> int:
        return self.entry['samples']

    @property
    def num_bytes(self) -> int:
        return self.entry['raw_data']['bytes']

    @property
    def name(self) -> str:
        """Its path, without what is the same for all: a name for a part made from it."""
        return self.path.removesuffix('.mds').replace('/shard.', '-').replace('/', '-')

    @property
    def fingerprint(self) -> dict[str, Any]:
        return {'shard': self.path, 'hashes': self.entry['raw_data']['hashes']}


def list_shards(folder: Folder, manifest: Manifest) -> list[Shard]:
    """All shards of all streams, in the order of the index.

    Raises:
        DataError: an index.json is missing or damaged, or names files outside the data set.
    """
    shards = []
    for stream in manifest.streams or ['']:
        if _leads_outside(stream):
            raise DataError(f'{folder.url}/{MANIFEST_NAME}: names the stream {stream!r}, outside the data set; do not use data from this source')
        name = in_stream(stream, 'index.json')
        try:
            entries = json.loads(folder.read(name))['shards']
            shards += [Shard(stream, entry) for entry in entries]
            outside = [entry['raw_data']['basename'] for entry in entries if _leads_outside(entry['raw_data']['basename'])]
        except FileNotFoundError as error:
            raise DataError(f'{error}; {REMEDY}') from None
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise DataError(f'{folder.url}/{name}: is not an MDS index: {error}; {REMEDY}') from error
        if outside:
            raise DataError(f'{folder.url}/{name}: names {outside[0]!r}, a file outside the data set; do not use data from this source')
    return shards


def _leads_outside(basename: str) -> bool:
    return basename.startswith('/') or '..' in PurePosixPath(basename).parts


def read_shard(folder: Folder, shard: Shard, scratch: Path) -> Iterator[dict[str, Any]]:
    """The samples of a shard, once its bytes are known to be those that were written.

    Raises:
        DamagedShard: the file is missing, or its SHA-256 is not that of the index.
    """
    from streaming.base.format.mds.reader import MDSReader  # imports torch; only the processes that read need it

    where, expected = f'{folder.url}/{shard.path}', shard.entry['raw_data']['hashes'].get('sha256')
    try:
        path = folder.fetch(shard.path, scratch)
    except FileNotFoundError:
        raise DamagedShard(f'{where}: no such file, but index.json names it; {REMEDY}') from None
    with path.open('rb') as file:
        found = hashlib.file_digest(file, 'sha256').hexdigest()
    if expected is not None and found != expected:
        raise DamagedShard(f'{where}: SHA-256 is {found}, index.json says {expected}; the file is damaged: {REMEDY}')
    here = {**shard.entry, 'raw_data': {**shard.entry['raw_data'], 'basename': path.name}}
    reader = MDSReader.from_json(str(path.parent), None, here)
    try:
        reader.validate(allow_unsafe_types=False)
    except ValueError as error:
        raise DataError(f'{where}: {error}; a column of this kind can run code: do not use data from this source') from None
    for i in range(shard.num_samples):
        yield reader[i]
    if path.parent == scratch:
        path.unlink()
