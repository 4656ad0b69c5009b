"""Files of a checkpoint folder: the manifest `ba00000400.json` next to `ba00000400.pt`, written last, with its digest; and which ones are kept.

Old ones are deleted by a new listing each time, so that a restart forgets none. Nothing here imports torch.
"""

import hashlib
import itertools
import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from diffusion.common.files import TEMPORARY, name_of_temporary, parse_typed
from diffusion.common.processes import failpoint
from diffusion.common.storage import Folder, LocalFolder

SET_ASIDE = '.corrupt'
SET_ASIDE_KEPT = 2  # checkpoints, for finding out what happened to them

LATEST = 'latest.json'  # a copy of the newest manifest, for people and other tools; nothing here reads it
OURS = re.compile(r'ba(\d{8,})\.(pt|json)')
CHUNK_BYTES = 1 << 22


@dataclass(frozen=True)
class Content:
    """Size and digest that a file must have."""

    sha256: str
    bytes: int


@dataclass(frozen=True)
class CheckpointManifest:
    files: dict[str, Content]
    batch: int
    epoch: int
    samples: int
    world_size: int
    recipe_sha256: str
    data: dict[str, str]  # identity of each stream's dataset
    encoders: dict[str, str]  # digests of the frozen models' weights and of tokenizers, by name
    packages: dict[str, str]
    commit: str | None
    save_sec: float  # how long training waited for it
    time: str  # UTC, ISO 8601

    @property
    def file(self) -> str:
        return file_of(self.batch)

    @property
    def content(self) -> Content:
        return self.files[self.file]

    @property
    def name(self) -> str:
        return manifest_of(self.batch)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1) + '\n'

    @classmethod
    def parse(cls, content: bytes | str, batch: int) -> Self:
        """Parse the manifest of `batch`, without fields that a later version adds; raise ValueError if it is torn, or that of something else."""
        try:
            manifest = parse_typed(content.encode() if isinstance(content, str) else content, cls)
        except ValueError as error:
            raise ValueError(f'the manifest is damaged: {error}') from error
        if manifest.batch != batch or set(manifest.files) != {file_of(batch)}:
            raise ValueError(f'the manifest is that of batch {manifest.batch} with {", ".join(manifest.files)}')
        return manifest


def read_manifest(checkpoint: Path) -> CheckpointManifest | None:
    """Return the manifest next to a checkpoint's file; None if it is missing or damaged."""
    try:
        return CheckpointManifest.parse(checkpoint.with_suffix('.json').read_bytes(), int(checkpoint.stem.removeprefix('ba')))
    except (OSError, ValueError):
        return None


def file_of(batch: int) -> str:
    return f'ba{batch:08d}.pt'


def manifest_of(batch: int) -> str:
    return f'ba{batch:08d}.json'


def batches_of(names: Iterable[str], suffix: str = 'json') -> list[int]:
    """Return the batches that have a manifest among `names` (or a file, with suffix `pt`), in order."""
    found = (OURS.fullmatch(name) for name in names)
    return sorted(int(match[1]) for match in found if match and match[2] == suffix)


def find_damage(path: Path, expected: Content) -> str | None:
    """Describe how the file differs from its manifest; None if it does not."""
    try:
        num_bytes = path.stat().st_size
        if num_bytes != expected.bytes:
            return f'{num_bytes:,} bytes, expected {expected.bytes:,}'
        digest = sha256_of(path)
    except OSError as error:
        return f'{type(error).__name__}: {error.strerror}'
    return None if digest == expected.sha256 else f'SHA-256 {digest}, expected {expected.sha256}'


def sha256_of(path: Path) -> str:
    sha = hashlib.sha256()
    with path.open('rb') as file:
        while chunk := file.read(CHUNK_BYTES):
            sha.update(chunk)
    return sha.hexdigest()


def superfluous(batches: Iterable[int], keep: int, keep_every: int | None) -> list[int]:
    """Return the batches that are neither among the newest `keep` (-1: all) nor the first at or after a multiple of `keep_every`."""
    ordered = sorted(batches)
    kept = set(ordered if keep == -1 else ordered[-keep:])
    if keep_every is not None:
        kept |= {batch for before, batch in itertools.pairwise([0, *ordered]) if batch // keep_every > before // keep_every}
    return [batch for batch in ordered if batch not in kept]


def prune(folder: Folder, keep: int, keep_every: int | None, newest: int) -> None:
    """Delete superfluous checkpoints and the remains of deleted ones.

    Args:
        newest: the batch of the newest checkpoint known to be whole. Later ones are damaged, or not yet safe: neither counted nor touched.

    Raises:
        StorageError, OSError: the folder cannot be listed or changed.
    """
    names = folder.files()
    for batch in superfluous((batch for batch in batches_of(names) if batch <= newest), keep, keep_every):
        folder.delete(manifest_of(batch))  # first: a file without manifest is nothing, a manifest without file is damage
        failpoint('retention.between')
        folder.delete(file_of(batch))
    sweep(folder, newest)


def sweep(folder: Folder, newest: int) -> None:
    """Delete what killed processes left: files without manifest, unfinished ones, more than a few that were set aside. Only names of this project.

    In storage a later file without manifest than `newest` may be one that another process is just uploading.
    """
    names = folder.files()
    for batch in sorted(set(batches_of(names, 'pt')) - set(batches_of(names))):
        if batch <= newest or isinstance(folder, LocalFolder):
            folder.delete(file_of(batch))
    if isinstance(folder, LocalFolder):
        for path in Path(folder.url).glob(f'{TEMPORARY}*'):  # hidden, so not among `names`
            name = name_of_temporary(path.name)
            if name is not None and (OURS.fullmatch(name) or name == LATEST):
                path.unlink(missing_ok=True)
        aside = [name for name in names if name.endswith(SET_ASIDE) and OURS.fullmatch(name.removesuffix(SET_ASIDE))]
        recent = sorted({name.partition('.')[0] for name in aside})[-SET_ASIDE_KEPT:]
        for name in aside:
            if name.partition('.')[0] not in recent:
                folder.delete(name)
