"""Retention: delete old checkpoints, on a disk or in object storage, by a new listing each time, so that a restart forgets none."""

import itertools
from collections.abc import Iterable
from pathlib import Path

from diffusion.checkpoints.manifest import LATEST, OURS, batches_of, file_of, manifest_of
from diffusion.common.files import TEMPORARY, name_of_temporary
from diffusion.common.processes import failpoint
from diffusion.common.storage import Folder, LocalFolder

SET_ASIDE = '.corrupt'
SET_ASIDE_KEPT = 2  # checkpoints, for finding out what happened to them


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
