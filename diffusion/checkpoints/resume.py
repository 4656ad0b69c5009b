"""Find the checkpoint that a run resumes from: the newest whole one, on a disk or in object storage."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from diffusion.checkpoints.manifest import SET_ASIDE, CheckpointManifest, batches_of, file_of, find_damage, manifest_of, prune
from diffusion.checkpoints.owner import folder_errors
from diffusion.checkpoints.uploading import log
from diffusion.common.collective import on_first_rank, on_first_rank_of_node
from diffusion.common.files import sync, write_text
from diffusion.common.storage import Folder, LocalFolder, StorageError, open_folder, scratch_for
from diffusion.common.text import counted
from diffusion.contracts.errors import CheckpointError

ENCODERS = ('vae', 'text_encoder', 'tokenizer')  # what their names begin with
STOCK = re.compile(r'(latest|(.*-)?ba\d+)-rank\d+\.pt(\.symlink)?')  # Composer's names, without manifests


@dataclass(frozen=True)
class FoundCheckpoint:
    path: Path  # on a local disk
    manifest: CheckpointManifest


def find_newest(folder: str, staging: Path) -> FoundCheckpoint | None:
    """Return the newest whole checkpoint of `folder`, the same on all ranks; None if nothing was ever saved there. All ranks must call it.

    Every rejection is printed with its cause. Damaged files on the local disk are renamed, those in storage left as they are.

    Args:
        folder: local path or URL.
        staging: for a URL the local folder that checkpoints are uploaded from and downloaded to.

    Raises:
        CheckpointError: there are checkpoints and none is whole, or they are another version's, or not all machines see the file.
        StorageRefusal: the storage refuses.
        StorageOutage: the storage does not answer, so that it cannot be told which one is the newest.
    """
    with folder_errors():
        remote = open_folder(folder) if '://' in folder else None
        local = LocalFolder(str(staging if remote is not None else folder))
        chosen = on_first_rank(partial(_search, local, remote))
        if chosen is None:
            return None
        found = FoundCheckpoint(Path(local.url) / chosen.manifest.file, chosen.manifest)  # each machine may have its disk elsewhere
        on_first_rank_of_node(partial(_fetch_to_node, found, local, remote))
    return found


def refuse_other_data(manifest: CheckpointManifest, identities: Mapping[str, str]) -> None:
    """Raise CheckpointError if a stream's dataset is not the one that the checkpoint was trained on.

    Args:
        identities: of the current datasets, by stream. Whether streams may come and go is for the recipe's rules to say.
    """
    differences = [
        f'stream {name}: {manifest.data[name]} then, {identity} now'
        for name, identity in sorted(identities.items())
        if manifest.data.get(name, identity) != identity
    ]
    if differences:
        remedy = 'restore the dataset, give the stream a new name, or train another run from these weights with load_path'
        raise CheckpointError(f'{manifest.file} was trained on other data: {"; ".join(differences)}; {remedy}')


def refuse_other_encoders(manifest: CheckpointManifest, digests: Mapping[str, str]) -> None:
    """Raise CheckpointError if a frozen encoder, a tokenizer, or the network of an adapter is not the one that the checkpoint was trained with.

    Args:
        digests: of the current ones, by name. Checkpoints of earlier versions hold none of tokenizers.
    """
    others = {
        name: f'{manifest.encoders.get(name, "none")[:12]} then, {digest[:12]} now'
        for name, digest in sorted(digests.items())
        if manifest.encoders.get(name) != digest and (name in manifest.encoders or not name.startswith('tokenizer'))
    }
    if others:
        differences = [f'{name}: {change}' for name, change in others.items()]
        remedy = 'put these files back into model.encoders.source, or train another run from this checkpoint with load_path'
        if not all(name.startswith(ENCODERS) for name in others):
            remedy = 'an adapter belongs to one network: put its weights back into model.encoders.source, or name them with load_path'
        raise CheckpointError(f'{manifest.file} was trained with other encoders: {"; ".join(differences)}; {remedy}')


def _search(local: LocalFolder, remote: Folder | None) -> FoundCheckpoint | None:
    places = [local] if remote is None else [local, remote]
    names = {place.url: place.files() for place in places}
    candidates = [(batch, place is local) for place in places for batch in batches_of(names[place.url])]
    if not candidates:
        _refuse_stock([f'{place.url}/{name}' for place in places for name in names[place.url] if STOCK.fullmatch(name)])
    damaged = []
    for batch, is_local in sorted(candidates, reverse=True):
        try:
            found = _find_local(local, batch) if remote is None or is_local else _download(remote, batch, local)
        except (ValueError, FileNotFoundError) as error:
            log(f'{(local if is_local else remote or local).url}/{file_of(batch)} is not whole, trying the one before: {error}')
            damaged += [batch] if is_local else []
            continue
        for other in damaged:  # only now: if none is whole, the next start must still see that there were some
            if other != found.manifest.batch:
                _set_aside(Path(local.url), other)
        log(f'resuming from {found.path}, batch {found.manifest.batch:,}')
        return found
    if candidates:
        where = ' and '.join(place.url for place in places)
        raise CheckpointError(
            f'{where}: none of the {len(candidates)} checkpoints is whole; restore one, or move the folder away to start from scratch'
        )
    return None


def _refuse_stock(found: list[str]) -> None:
    if found:
        raise CheckpointError(
            f'{found[-1]}: {counted(len(found), "checkpoint")} of an earlier version, without manifests that say what is whole; to start from '
            'the weights of one move them to another folder and set load_path to its .pt file; move them away to start from scratch'
        )


def _find_local(folder: LocalFolder, batch: int) -> FoundCheckpoint:
    """Return the local checkpoint of `batch`; raise ValueError with the damage."""
    try:
        manifest = CheckpointManifest.parse(folder.read(manifest_of(batch)), batch)
    except StorageError as error:
        raise ValueError(str(error)) from error
    path = Path(folder.url) / manifest.file
    wrong = find_damage(path, manifest.content)
    if wrong is not None:
        raise ValueError(wrong)
    return FoundCheckpoint(path, manifest)


def _download(remote: Folder, batch: int, local: LocalFolder) -> FoundCheckpoint:
    """Download the checkpoint of `batch` into the local folder, in place of a damaged one; raise ValueError with the damage."""
    manifest = CheckpointManifest.parse(remote.read(manifest_of(batch)), batch)
    stat = remote.files().get(manifest.file)
    if stat is None or stat.num_bytes != manifest.content.bytes:  # before gigabytes are fetched
        raise ValueError(f'{0 if stat is None else stat.num_bytes:,} bytes, expected {manifest.content.bytes:,}')
    folder = Path(local.url)
    with scratch_for(local) as scratch:
        log(f'downloading {remote.url}/{manifest.file}, {stat.num_bytes / 1e6:,.0f} MB')
        fetched = remote.fetch(manifest.file, scratch)
        wrong = find_damage(fetched, manifest.content)
        if wrong is not None:
            raise ValueError(wrong)
        _set_aside(folder, batch)
        local.put(fetched, manifest.file)
    write_text(folder / manifest.name, manifest.to_json())
    return FoundCheckpoint(folder / manifest.file, manifest)


def _set_aside(folder: Path, batch: int) -> None:
    for name in (manifest_of(batch), file_of(batch)):
        if (folder / name).exists():
            os.replace(folder / name, folder / f'{name}{SET_ASIDE}')
    sync(folder)


def _fetch_to_node(found: FoundCheckpoint, local: LocalFolder, remote: Folder | None) -> None:
    """Make sure that this machine has the file; raise CheckpointError if it cannot."""
    batch, path = found.manifest.batch, found.path
    try:
        same = CheckpointManifest.parse((path.parent / manifest_of(batch)).read_bytes(), batch) == found.manifest
        if same and path.stat().st_size == found.manifest.content.bytes:
            return
    except (OSError, ValueError):
        pass
    if remote is None:
        raise CheckpointError(
            f'{path}: is there on the first machine and not on all; put checkpoint.folder on a disk that they share, or into object storage'
        )
    try:
        other = _download(remote, batch, local).manifest
        if other != found.manifest:
            raise ValueError(f'the one there was written by another process, at {other.time}, not at {found.manifest.time}')
        prune(local, 1, None, batch)  # only the first machine does so while it trains
    except (ValueError, OSError) as error:
        raise CheckpointError(f'{path}: is there on the first machine, and another cannot get it from {remote.url}: {error}') from error
