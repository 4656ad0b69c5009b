"""`index.json`, the list of a dataset's shards: whether it agrees with itself and with the manifest next to it.

Every start of training and `data_prep.audit` make this comparison. It reads no shard, and imports no torch.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from diffusion.common.files import parse_json
from diffusion.common.storage import Folder, LocalFolder
from diffusion.common.text import counted
from diffusion.contracts.manifest import INDEX_NAME, MANIFEST_NAME, Manifest

HASH = 'sha256'
"""What data_prep hashes shards with. A shard without it is an error: damage to it could not be noticed."""
_DIGEST = re.compile('[0-9a-f]{64}')
_NUMBERED = re.compile(r'(.*shard\.)(\d{5})(\.mds)')

Entry = dict[str, Any]
"""What index.json says of one shard."""


@dataclass(frozen=True)
class Disagreement:
    """`where` is the file of the dataset that is wrong: a shard, index.json or manifest.json."""

    where: str
    detail: str

    def __str__(self) -> str:
        return f'{self.where}: {self.detail}'


def read_index(content: bytes) -> list[Entry]:
    """The shards that an index.json names, each with the fields that are needed to read it.

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
    return entries


def leads_outside(basename: str) -> bool:
    """Whether the name of a file leads out of the dataset."""
    return basename.startswith('/') or '..' in PurePosixPath(basename).parts


def disagreements(manifest: Manifest, entries: Sequence[Entry], folder: Folder) -> list[Disagreement]:
    """Every way in which a stream's list of shards contradicts itself or the stream's manifest.

    Args:
        folder: the stream's. It is looked into only if the counts differ, to name the shard.

    Raises:
        StorageError: the counts differ and the folder cannot be listed.
    """
    names = [basename(entry) for entry in entries]
    outside = [name for name in names if leads_outside(name)]
    if outside:
        return [Disagreement(INDEX_NAME, f'names {outside[0]!r}, a file outside the dataset; do not use data from this source')]
    found = [
        Disagreement(name, f'is listed {times} times in {INDEX_NAME}: its samples would be trained {times} times as often')
        for name, times in Counter(names).items()
        if times > 1
    ]
    found += [
        Disagreement(basename(entry), f'{INDEX_NAME} has no SHA-256 of it, so damage to it could not be noticed')
        for entry in entries
        if not _DIGEST.fullmatch(str(entry['raw_data']['hashes'].get(HASH)))
    ]
    if HASH not in manifest.hashes:
        found.append(Disagreement(MANIFEST_NAME, f'hashes is {manifest.hashes}, without the {HASH} that each shard needs'))
    num_listed = sum(entry['samples'] for entry in entries)
    if num_listed != manifest.num_samples:
        suspects = '; '.join(_suspects(entries, folder))
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


def other_columns(manifest: Manifest, entry: Entry) -> str:
    """The columns of a shard next to the manifest's, where they differ; otherwise ''."""
    found = dict(zip(entry['column_names'], entry['column_encodings'], strict=True))
    promised = {name: column['encoding'] for name, column in manifest.columns.items()}
    return '' if found == promised else f'{found}, the manifest says {promised}'


def basename(entry: Entry) -> str:
    """Name of the shard's file, below its stream."""
    return entry['raw_data']['basename']


def num_samples_in(shard: Path) -> int:
    """Samples that an MDS file says it holds, in its first four bytes."""
    with shard.open('rb') as file:
        return int.from_bytes(file.read(4), 'little')


def _miscounts(manifest: Manifest) -> list[Disagreement]:
    accounted = manifest.num_samples + sum(manifest.dropped.values())
    if manifest.attempted == accounted:
        return []
    return [Disagreement(MANIFEST_NAME, f'attempted is {manifest.attempted}, num_samples and dropped add up to {accounted}')]


def _suspects(entries: Sequence[Entry], folder: Folder) -> Iterator[str]:
    """The shards that a difference of the counts may come from."""
    files, listed = folder.files(), {basename(entry) for entry in entries}
    absent = {name for name in files if name.endswith('.mds')} - listed
    highest = Counter[tuple[str, str]]()
    for match in filter(None, map(_NUMBERED.fullmatch, listed)):
        highest[match[1], match[3]] = max(highest[match[1], match[3]], int(match[2]))
    absent |= {f'{start}{number:05}{end}' for (start, end), last in highest.items() for number in range(last)} - listed
    yield from (f'{name} is not listed' for name in sorted(absent))
    for entry in entries if isinstance(folder, LocalFolder) else ():
        path = Path(folder.url) / basename(entry)
        if path.is_file() and num_samples_in(path) != entry['samples']:
            yield f'{basename(entry)} holds {counted(num_samples_in(path), "sample")}, {INDEX_NAME} says {entry["samples"]}'
