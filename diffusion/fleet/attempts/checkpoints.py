"""Checkpoints of a training child: new whole ones are found, and kept until they are handed over."""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from diffusion.checkpoints.manifest import CheckpointManifest, Content, batches_of, file_of, manifest_of, sha256_of
from diffusion.fleet.attempts.desk import HandedFile, HeldCheckpoint, NodeFault

LEFT_OUT = 'left-out.json'  # which batches a rollback left out (faults/rollback.py): a run that resumes without it would train on them


@dataclass(frozen=True)
class OutgoingCheckpoint:
    """A whole checkpoint whose files training does not delete any more."""

    step: int
    folder: Path
    files: dict[str, HandedFile]

    def discard(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def newest_step(folder: Path) -> int | None:
    """The newest batch with a manifest, which is written last; None: there is none."""
    try:
        found = batches_of(os.listdir(folder))
    except OSError:  # no folder yet
        return None
    return found[-1] if found else None


def take(folder: Path, step: int, outgoing: Path) -> OutgoingCheckpoint | None:
    """Link a checkpoint's files to a folder of their own, because training keeps the newest few alone; None if it is gone or damaged.

    Args:
        folder: of the run's checkpoints.
        outgoing: on the same disk.
    """
    kept = outgoing / f's{step}'
    kept.mkdir(parents=True, exist_ok=True)
    try:
        names = [file_of(step), manifest_of(step), *([LEFT_OUT] if (folder / LEFT_OUT).exists() else [])]
        for name in names:
            (kept / name).unlink(missing_ok=True)
            os.link(folder / name, kept / name)
        manifest = CheckpointManifest.parse((kept / manifest_of(step)).read_bytes(), step)
        files = {name: HandedFile(kept / name, manifest.content if name == manifest.file else content_of(kept / name)) for name in names}
    except (OSError, ValueError):
        shutil.rmtree(kept, ignore_errors=True)
        return None
    return OutgoingCheckpoint(step, kept, files)


def content_of(path: Path) -> Content:
    return Content(sha256_of(path), path.stat().st_size)


def refuse_strange_names(held: HeldCheckpoint) -> None:
    """Raises NodeFault: the files are not those of a checkpoint of that step."""
    wanted = {file_of(held.step), manifest_of(held.step)}
    if not wanted <= set(held.files) <= {*wanted, LEFT_OUT}:
        raise NodeFault(
            f'the checkpoint of step {held.step:,} holds {", ".join(sorted(held.files))[:200]}; {" and ".join(sorted(wanted))} are wanted'
        )
