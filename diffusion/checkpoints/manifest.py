"""The manifest of a checkpoint: `ba00000400.json` next to `ba00000400.pt`, written last, with the digest of every file.

Nothing here imports torch.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from diffusion.common.files import parse_json_object

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
    def parse(cls, text: str | bytes, batch: int) -> CheckpointManifest:
        """Parse the manifest of `batch`; fields that a later version adds are ignored.

        Raises:
            ValueError: torn, or the manifest of something else.
        """
        try:
            fields = parse_json_object(text)
            kept: dict[str, Any] = {name: fields[name] for name in cls.__dataclass_fields__}
            for name in ('files', 'data', 'encoders', 'packages'):
                if not isinstance(kept[name], dict):
                    raise ValueError(f'{name} is a {type(kept[name]).__name__}')
            kept['files'] = {name: Content(str(content['sha256']), int(content['bytes'])) for name, content in kept['files'].items()}
            manifest = cls(**kept)
        except KeyError as error:
            raise ValueError(f'the manifest lacks {error}') from error
        except (ValueError, TypeError, OverflowError) as error:
            raise ValueError(f'the manifest is damaged: {error}') from error
        if manifest.batch != batch or set(manifest.files) != {file_of(batch)}:
            raise ValueError(f'the manifest is that of batch {manifest.batch} with {", ".join(manifest.files)}')
        return manifest


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
