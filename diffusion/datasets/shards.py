"""A dataset's index.json and its shards: whether they agree with the manifest, each shard against its hash, and the captions of a row.

Every start of training and `data_prep.audit` compare the index with the manifest. Imports no torch, but for reading a shard.
"""

import hashlib
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from diffusion.common.files import parse_json
from diffusion.common.processes import quick_imports
from diffusion.common.storage import Folder, LocalFolder, open_folder
from diffusion.common.text import counted
from diffusion.contracts.errors import DataError
from diffusion.contracts.manifest import INDEX_NAME, MANIFEST_NAME, Manifest

HASH = 'sha256'
"""Hash of shards that data_prep writes. A shard without it is an error: damage to it could not be noticed."""
REMEDY = 'copy it again; python -m data_prep.audit says how to have it written again'
_DIGEST = re.compile('[0-9a-f]{64}')
_NUMBERED = re.compile(r'(.*shard\.)(\d{5})(\.mds)')


def in_stream(stream: str, name: str) -> str:
    """File name below the dataset of a file of one stream."""
    return f'{stream}/{name}' if stream else name


class DamagedShard(DataError):
    """A shard is missing, or is not what the index says."""


@dataclass(frozen=True)
class Shard:
    """A shard file of a dataset."""

    stream: str
    entry: dict[str, Any]  # of index.json

    @property
    def path(self) -> str:
        """File name below the dataset."""
        return in_stream(self.stream, self.basename)

    @property
    def basename(self) -> str:
        """File name below its stream."""
        return self.entry['raw_data']['basename']

    @property
    def num_samples(self) -> int:
        return self.entry['samples']

    @property
    def hashes(self) -> dict[str, str]:
        return self.entry['raw_data']['hashes']

    @property
    def num_bytes(self) -> int:
        return self.entry['raw_data']['bytes']

    @property
    def name(self) -> str:
        """Its path, without what is the same for all: a name for a part made from it."""
        return self.path.removesuffix('.mds').replace('/shard.', '-').replace('/', '-')

    @property
    def fingerprint(self) -> dict[str, Any]:
        return {'shard': self.path, 'hashes': self.hashes}


@dataclass(frozen=True)
class Disagreement:
    """`where` is the file of the dataset that is wrong: a shard, index.json or manifest.json."""

    where: str
    detail: str

    def __str__(self) -> str:
        return f'{self.where}: {self.detail}'


def read_index(content: bytes, stream: str = '') -> list[Shard]:
    """The shards that the index.json of a stream names, each with the fields that are needed to read it.

    Raises:
        ValueError: it is damaged, or not the index of an MDS dataset.
    """
    try:
        entries = parse_json(content)['shards']
        for number, entry in enumerate(entries):
            raw, counts = entry['raw_data'], (entry['samples'], entry['raw_data']['bytes'])
            right = isinstance(raw['basename'], str) and isinstance(raw['hashes'], dict) and all(type(n) is int and n >= 0 for n in counts)
            if not right or len(entry['column_names']) != len(entry['column_encodings']):
                raise ValueError(f'entry {number} has a field of the wrong type')
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f'is not an MDS index: {error!r}') from error
    return [Shard(stream, entry) for entry in entries]


def leads_outside(basename: str) -> bool:
    """Whether the name of a file leads out of the dataset."""
    return basename.startswith('/') or '..' in basename.split('/')


def disagreements(manifest: Manifest, shards: Sequence[Shard], folder: Folder) -> list[Disagreement]:
    """Every way in which a stream's list of shards contradicts itself or the stream's manifest.

    Args:
        folder: the stream's. It is looked into only if the counts differ, to name the shard.

    Raises:
        StorageError: the counts differ and the folder cannot be listed.
    """
    names = [shard.basename for shard in shards]
    outside = [name for name in names if leads_outside(name)]
    if outside:
        return [Disagreement(INDEX_NAME, f'names {outside[0]!r}, a file outside the dataset; do not use data from this source')]
    found = [
        Disagreement(name, f'is listed {times} times in {INDEX_NAME}: its samples would be trained {times} times as often')
        for name, times in Counter(names).items()
        if times > 1
    ]
    found += [
        Disagreement(shard.basename, f'{INDEX_NAME} has no SHA-256 of it, so damage to it could not be noticed')
        for shard in shards
        if not _DIGEST.fullmatch(str(shard.hashes.get(HASH)))
    ]
    if HASH not in manifest.hashes:
        found.append(Disagreement(MANIFEST_NAME, f'hashes is {manifest.hashes}, without the {HASH} that each shard needs'))
    num_listed = sum(shard.num_samples for shard in shards)
    if num_listed != manifest.num_samples:
        suspects = '; '.join(_suspects(shards, folder))
        found.append(
            Disagreement(
                MANIFEST_NAME,
                f'num_samples is {manifest.num_samples}, the shards in {INDEX_NAME} hold {num_listed}{": " if suspects else ""}{suspects}',
            )
        )
    return found + _miscounts(manifest)


def disagreements_of_streams(manifest: Manifest, num_samples: int) -> list[Disagreement]:
    """The same of a dataset of streams, whose manifest counts the samples of all of them: `num_samples`."""
    found = [Disagreement(MANIFEST_NAME, f'names the stream {name} {times} times') for name, times in Counter(manifest.streams).items() if times > 1]
    if num_samples != manifest.num_samples:
        found.append(Disagreement(MANIFEST_NAME, f'num_samples is {manifest.num_samples}, its {len(manifest.streams)} streams hold {num_samples}'))
    return found + _miscounts(manifest)


def other_columns(manifest: Manifest, shard: Shard) -> str:
    """The columns of a shard next to the manifest's, where they differ; otherwise ''."""
    found = dict(zip(shard.entry['column_names'], shard.entry['column_encodings'], strict=True))
    promised = {name: column['encoding'] for name, column in manifest.columns.items()}
    return '' if found == promised else f'{found}, the manifest says {promised}'


def num_samples_in(shard: Path) -> int:
    """Samples that an MDS file says it holds, in its first four bytes."""
    with shard.open('rb') as file:
        return int.from_bytes(file.read(4), 'little')


def _miscounts(manifest: Manifest) -> list[Disagreement]:
    accounted = manifest.num_samples + sum(manifest.dropped.values())
    if manifest.attempted == accounted:
        return []
    return [Disagreement(MANIFEST_NAME, f'attempted is {manifest.attempted}, num_samples and dropped add up to {accounted}')]


def _suspects(shards: Sequence[Shard], folder: Folder) -> Iterator[str]:
    """The shards that a difference of the counts may come from."""
    listed = {shard.basename for shard in shards}
    absent = {name for name in folder.files() if name.endswith('.mds')} - listed
    highest = Counter[tuple[str, str]]()
    for match in filter(None, map(_NUMBERED.fullmatch, listed)):
        highest[match[1], match[3]] = max(highest[match[1], match[3]], int(match[2]))
    absent |= {f'{start}{number:05}{end}' for (start, end), last in highest.items() for number in range(last)} - listed
    yield from (f'{name} is not listed' for name in sorted(absent))
    for shard in shards if isinstance(folder, LocalFolder) else ():
        path = Path(folder.url) / shard.basename
        if path.is_file() and num_samples_in(path) != shard.num_samples:
            yield f'{shard.basename} holds {counted(num_samples_in(path), "sample")}, {INDEX_NAME} says {shard.num_samples}'


def captions_of(row: Mapping[str, Any]) -> list[tuple[str, float]]:
    """(caption, weight) of a row; the weights add up to 1."""
    if 'captions' in row:
        return [(caption, weight) for caption, weight in row['captions']]
    return [(row['caption'], 1.0)]


def pick(captions: Sequence[tuple[str, float]], uniform: float) -> str:
    """The caption that a draw from (0, 1] falls on."""
    for (caption, _), reached in zip(captions, accumulate(weight for _, weight in captions), strict=True):
        if uniform <= reached:
            return caption
    return captions[-1][0]  # the weights add up to a little less than 1


def words_of(folder: Path) -> list[str]:
    """The words of the captions of an MDS on this machine, sorted; lower case, because CLIP's tokenizers know no other."""
    from streaming import LocalDataset  # imports torch

    dataset = LocalDataset(local=str(folder))
    return sorted({word for i in range(len(dataset)) for word in words_in(dataset[i]['caption'])})


def words_in(caption: str) -> set[str]:
    """Runs of the letters a to z, in lower case."""
    return set(re.findall(r'[a-z]+', caption.lower()))


def list_shards(folder: Folder, streams: Sequence[str]) -> list[Shard]:
    """All shards of some streams, in the order of the index.

    Raises:
        DataError: an index.json is missing or damaged, or names files outside the dataset.
    """
    shards = list[Shard]()
    for stream in streams:
        if leads_outside(stream):
            raise DataError(f'{folder.url}/{MANIFEST_NAME}: names the stream {stream!r}, outside the dataset; do not use data from this source')
        name = in_stream(stream, INDEX_NAME)
        try:
            shards += read_index(folder.read(name), stream)
        except FileNotFoundError as error:
            raise DataError(f'{error}; {REMEDY}') from None
        except ValueError as error:
            raise DataError(f'{folder.url}/{name} {error}; {REMEDY}') from error
        if outside := [shard.basename for shard in shards if leads_outside(shard.basename)]:
            raise DataError(f'{folder.url}/{name}: names {outside[0]!r}, a file outside the dataset; do not use data from this source')
    return shards


def agreed_shards(folder: Folder, manifest: Manifest) -> list[Shard]:
    """The same of a dataset whose index.json has to agree with its manifest: a lost shard would be left out of what is made from it.

    Raises:
        DataError: as `list_shards`; or they do not agree.
    """
    shards = list[Shard]()
    for stream in manifest.streams or ['']:
        own, here = list_shards(folder, [stream]), open_folder(f'{folder.url}/{stream}') if stream else folder
        if found := disagreements(Manifest.read(here.url), own, here):
            raise DataError(f'{here.url}/{found[0]}; {REMEDY}')
        shards += own
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

        from diffusion.datasets.open_shards import OpenShards

    where, expected = f'{folder.url}/{shard.path}', shard.hashes.get(HASH)
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
    opened = OpenShards()
    for i in range(shard.num_samples):
        yield opened.row(reader, i)
    if path.parent == scratch:
        path.unlink()
