"""Reading an MDS dataset shard by shard, each checked against the hash it was written with."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diffusion.common.processes import quick_imports
from diffusion.common.storage import Folder, open_folder
from diffusion.common.text import counted
from diffusion.contracts.errors import DataError
from diffusion.contracts.manifest import INDEX_NAME, MANIFEST_NAME, Manifest
from diffusion.datasets.index import basename, disagreements, leads_outside, num_samples_in, read_index

REMEDY = 'copy it again; python -m data_prep.audit says how to have it written again'


def in_stream(stream: str, name: str) -> str:
    """File name below the dataset of a file of one stream."""
    return f'{stream}/{name}' if stream else name


class DamagedShard(DataError):
    """A shard is missing, or is not what the index says."""


@dataclass(frozen=True)
class Shard:
    """A shard file of a dataset, and its entry in index.json."""

    stream: str
    entry: dict[str, Any]

    @property
    def path(self) -> str:
        """File name below the dataset."""
        return in_stream(self.stream, self.basename)

    @property
    def basename(self) -> str:
        return basename(self.entry)

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


def list_shards(folder: Folder, streams: Sequence[str]) -> list[Shard]:
    """All shards of some streams, in the order of the index.

    Raises:
        DataError: an index.json is missing or damaged, or names files outside the dataset.
    """
    shards = []
    for stream in streams:
        if leads_outside(stream):
            raise DataError(f'{folder.url}/{MANIFEST_NAME}: names the stream {stream!r}, outside the dataset; do not use data from this source')
        name = in_stream(stream, INDEX_NAME)
        try:
            entries = read_index(folder.read(name))
        except FileNotFoundError as error:
            raise DataError(f'{error}; {REMEDY}') from None
        except ValueError as error:
            raise DataError(f'{folder.url}/{name} {error}; {REMEDY}') from error
        shards += [Shard(stream, entry) for entry in entries]
        outside = [basename(entry) for entry in entries if leads_outside(basename(entry))]
        if outside:
            raise DataError(f'{folder.url}/{name}: names {outside[0]!r}, a file outside the dataset; do not use data from this source')
    return shards


def agreed_shards(folder: Folder, manifest: Manifest) -> list[Shard]:
    """The same of a dataset whose index.json has to agree with its manifest: a lost shard would be left out of what is made from it.

    Raises:
        DataError: as `list_shards`; or they do not agree.
    """
    streams = manifest.streams or ['']
    shards = list_shards(folder, streams)
    for stream in streams:
        here = open_folder(f'{folder.url}/{stream}') if stream else folder
        found = disagreements(Manifest.read(here.url), [shard.entry for shard in shards if shard.stream == stream], here)
        if found:
            raise DataError(f'{here.url}/{found[0]}; {REMEDY}')
    return shards


def shards_by_name(folder: Folder, manifest: Manifest) -> dict[str, Shard]:
    """The same by name, for who makes something of each shard.

    Raises:
        DataError: as `agreed_shards`; or two have one name, and one of them would be left out.
    """
    listed = agreed_shards(folder, manifest)
    shards = {shard.name: shard for shard in listed}
    if len(shards) < len(listed):
        raise DataError(f'{folder.url}: index.json names {len(listed)} shards under {len(shards)} names; do not use data from this source')
    return shards


def read_shard(folder: Folder, shard: Shard, scratch: Path) -> Iterator[dict[str, Any]]:
    """The samples of a shard, once its bytes are known to be those that were written.

    Raises:
        DamagedShard: the file is missing, or its SHA-256 is not that of the index.
    """
    with quick_imports():
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
    if num_samples_in(path) != shard.num_samples:
        raise DamagedShard(f'{where}: holds {counted(num_samples_in(path), "sample")}, index.json says {shard.num_samples}; {REMEDY}')
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
