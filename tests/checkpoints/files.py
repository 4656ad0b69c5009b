"""Checkpoints of a few bytes: what chooses, keeps and uploads them looks at names, sizes and digests only."""

import hashlib
from pathlib import Path

from diffusion.checkpoints.manifest import CheckpointManifest, Content, file_of


def manifest(batch: int, content: bytes = b'', **fields) -> CheckpointManifest:
    values = {
        'files': {file_of(batch): Content(hashlib.sha256(content).hexdigest(), len(content))},
        'batch': batch,
        'epoch': 0,
        'samples': 8 * batch,
        'world_size': 1,
        'recipe_sha256': '0' * 64,
        'data': {},
        'encoders': {},
        'packages': {},
        'commit': None,
        'save_sec': 0.1,
        'time': '2026-01-01T00:00:00+00:00',
    }
    return CheckpointManifest(**{**values, **fields})


def content_of(batch: int) -> bytes:
    return f'checkpoint of batch {batch} '.encode() * 100


def write_checkpoint(folder: Path, batch: int, content: bytes | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    content = content_of(batch) if content is None else content
    (folder / file_of(batch)).write_bytes(content)
    said = manifest(batch, content)
    (folder / said.name).write_text(said.to_json())
    return folder / file_of(batch)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())
