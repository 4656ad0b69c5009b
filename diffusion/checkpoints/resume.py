"""Which checkpoint a run goes on from: the newest one whose bytes are those that were written, wherever it lies."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from diffusion.checkpoints.manifest import Manifest, batches_of, file_of, flaw, manifest_of
from diffusion.checkpoints.owner import folder_errors
from diffusion.checkpoints.retention import SET_ASIDE, prune
from diffusion.checkpoints.uploading import say
from diffusion.common.collective import of_first_rank, of_first_rank_of_node
from diffusion.common.files import sync, write_text
from diffusion.common.storage import Folder, LocalFolder, StorageError, open_folder, scratch_for
from diffusion.common.text import counted
from diffusion.contracts.errors import CheckpointError

STOCK = re.compile(r'(latest|(.*-)?ba\d+)-rank\d+\.pt(\.symlink)?')  # Composer's names, without manifests


@dataclass(frozen=True)
class Found:
    path: Path  # on a local disk
    manifest: Manifest


def find_newest(folder: str, staging: Path) -> Found | None:
    """The newest whole checkpoint of `folder`, on all ranks the same; None if nothing was ever saved there. All ranks must call it.

    Every rejection is printed with its cause. Damaged files on the local disk are renamed, those in storage left as they are.

    Args:
        folder: local path or URL.
        staging: for a URL the local folder that checkpoints are uploaded from and downloaded to.

    Raises:
        CheckpointError: there are checkpoints and none is whole, or they are another version's, or not all machines see the file.
        StorageOutage: the storage does not answer, so that it cannot be told which one is the newest.
    """
    with folder_errors():
        remote = open_folder(folder) if '://' in folder else None
        local = LocalFolder(str(staging if remote is not None else folder))
        chosen = of_first_rank(partial(_search, local, remote))
    if chosen is None:
        return None
    found = Found(Path(local.url) / chosen.manifest.file, chosen.manifest)  # each machine may have its disk elsewhere
    of_first_rank_of_node(partial(_bring, found, local, remote))
    return found


def refuse_other_data(manifest: Manifest, identities: Mapping[str, str]) -> None:
    """Raise CheckpointError if a stream's data set is not the one that the checkpoint was trained on.

    Args:
        identities: of the current data sets, by stream. Whether streams may come and go is for the recipe's rules to say.
    """
    differences = [
        f'stream {name}: {manifest.data[name]} then, {identity} now'
        for name, identity in sorted(identities.items())
        if manifest.data.get(name, identity) != identity
    ]
    if differences:
        remedy = 'bring the data set back, name the stream anew, or train another run from these weights with load_path'
        raise CheckpointError(f'{manifest.file} was trained on other data: {"; ".join(differences)}; {remedy}')


def refuse_other_encoders(manifest: Manifest, digests: Mapping[str, str]) -> None:
    """Raise CheckpointError if a frozen encoder has not the weights that the checkpoint was trained with.

    Args:
        digests: of the current encoders, by name.
    """
    differences = [
        f'{name}: {manifest.encoders.get(name, "none")[:12]} then, {digest[:12]} now'
        for name, digest in sorted(digests.items())
        if manifest.encoders.get(name) != digest
    ]
    if differences:
        remedy = 'put these weights back into model.encoders.source, or train another run from this checkpoint with load_path'
        raise CheckpointError(f'{manifest.file} was trained with other encoders: {"; ".join(differences)}; {remedy}')


def _search(local: LocalFolder, remote: Folder | None) -> Found | None:
    places = [local] if remote is None else [local, remote]
    names = {place.url: place.files() for place in places}
    candidates = [(batch, place is local) for place in places for batch in batches_of(names[place.url])]
    if not candidates:
        _refuse_stock([f'{place.url}/{name}' for place in places for name in names[place.url] if STOCK.fullmatch(name)])
    damaged = []
    for batch, is_local in sorted(candidates, reverse=True):
        try:
            found = _examined(local, batch) if remote is None or is_local else _downloaded(remote, batch, local)
        except (ValueError, FileNotFoundError) as error:
            say(f'{(local if is_local else remote or local).url}/{file_of(batch)} is not whole, the one before is tried: {error}')
            damaged += [batch] if is_local else []
            continue
        for other in damaged:  # only now: if none is whole, the next start must still see that there were some
            if other != found.manifest.batch:
                _set_aside(Path(local.url), other)
        say(f'going on from {found.path}, batch {found.manifest.batch:,}')
        return found
    if candidates:
        where = ' and '.join(place.url for place in places)
        raise CheckpointError(f'{where}: none of the {len(candidates)} checkpoints is whole; restore one, or move the folder away to start anew')
    return None


def _refuse_stock(found: list[str]) -> None:
    if found:
        raise CheckpointError(
            f'{found[-1]}: {counted(len(found), "checkpoint")} of an earlier version, without manifests that say what is whole; to start from '
            'the weights of one move them to another folder and set load_path to its .pt file; move them away to start anew'
        )


def _examined(folder: LocalFolder, batch: int) -> Found:
    """Raises ValueError with the flaw."""
    try:
        manifest = Manifest.parse(folder.read(manifest_of(batch)), batch)
    except StorageError as error:
        raise ValueError(str(error)) from error
    path = Path(folder.url) / manifest.file
    wrong = flaw(path, manifest.content)
    if wrong is not None:
        raise ValueError(wrong)
    return Found(path, manifest)


def _downloaded(remote: Folder, batch: int, local: LocalFolder) -> Found:
    """As `_examined`; what is whole is then in the local folder, in the place of a damaged one."""
    manifest = Manifest.parse(remote.read(manifest_of(batch)), batch)
    stat = remote.files().get(manifest.file)
    if stat is None or stat.num_bytes != manifest.content.bytes:  # before gigabytes are fetched
        raise ValueError(f'{0 if stat is None else stat.num_bytes:,} bytes, expected {manifest.content.bytes:,}')
    folder = Path(local.url)
    with scratch_for(local) as scratch:
        say(f'downloading {remote.url}/{manifest.file}, {stat.num_bytes / 1e6:,.0f} MB')
        fetched = remote.fetch(manifest.file, scratch)
        wrong = flaw(fetched, manifest.content)
        if wrong is not None:
            raise ValueError(wrong)
        _set_aside(folder, batch)
        local.put(fetched, manifest.file)
    write_text(folder / manifest.name, manifest.to_json())
    return Found(folder / manifest.file, manifest)


def _set_aside(folder: Path, batch: int) -> None:
    for name in (manifest_of(batch), file_of(batch)):
        if (folder / name).exists():
            os.replace(folder / name, folder / f'{name}{SET_ASIDE}')
    sync(folder)


def _bring(found: Found, local: LocalFolder, remote: Folder | None) -> None:
    """On each machine: see to it that the file is there. Raises CheckpointError if it cannot be."""
    batch, path = found.manifest.batch, found.path
    try:
        same = Manifest.parse((path.parent / manifest_of(batch)).read_bytes(), batch) == found.manifest
        if same and path.stat().st_size == found.manifest.content.bytes:
            return
    except (OSError, ValueError):
        pass
    if remote is None:
        raise CheckpointError(
            f'{path}: is there on the first machine and not on all; put checkpoint.folder on a disk that they share, or into object storage'
        )
    try:
        theirs = _downloaded(remote, batch, local).manifest
        if theirs != found.manifest:
            raise ValueError(f'the one there was written by another process, at {theirs.time}, not at {found.manifest.time}')
        prune(local, 1, None, batch)  # only the first machine does so while it trains
    except (ValueError, OSError, StorageError) as error:
        raise CheckpointError(f'{path}: is there on the first machine, and another cannot get it from {remote.url}: {error}') from error
