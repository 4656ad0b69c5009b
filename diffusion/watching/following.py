"""The checkpoints of a run as another machine sees them: where they are, which are new, and whole copies of them. Nothing is written there.

Nothing here imports torch.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from diffusion.checkpoints.manifest import CheckpointManifest, batches_of, find_damage, manifest_of
from diffusion.checkpoints.owner import OWNER
from diffusion.common.storage import Folder, open_folder, scratch_for
from diffusion.contracts.errors import CheckpointError, InputError
from diffusion.recipe import recipe_from_yaml

CHECKPOINTS, SAMPLES = 'checkpoints', 'samples'


class IncompleteCheckpoint(ValueError):
    """The files of a checkpoint are not what its manifest says, or the manifest is torn."""


class CheckpointRemoved(LookupError):
    """The run has deleted the checkpoint since it was listed."""


def find_checkpoints(where: str) -> Folder:
    """The checkpoint folder of a run; it may still be empty.

    Args:
        where: a run folder, its checkpoint folder, or the URL of either.

    Raises:
        InputError: no run has written there.
        StorageError: it cannot be listed.
    """
    where = where if where.endswith('://') else where.rstrip('/')
    inside, given = open_folder(f'{where}/{CHECKPOINTS}'), open_folder(where)
    for folder in (inside, given):
        names = folder.files()
        if OWNER in names or batches_of(names):
            return folder
    recipe = Path(where) / 'recipe.yaml'
    if recipe.is_file():
        named = recipe_from_yaml(recipe.read_text(), str(recipe)).checkpoint.folder
        return inside if '://' in named else open_folder(named)  # those for object storage wait in the run folder for their upload
    raise InputError(
        f'{where}: neither a run nor its checkpoints are there: no {OWNER}, which a run writes when it starts, and no recipe.yaml; name the '
        "run's folder, or its checkpoint.folder, once it has started"
    )


def folder_of_grids(checkpoints: str) -> str | None:
    """Return the place of the sample grids of a checkpoint folder: `samples` next to a folder named `checkpoints`, else NAME-samples next to NAME.

    None for a whole bucket, which has nothing next to it.
    """
    scheme, separator, path = checkpoints.rpartition('://')
    parent, _, name = path.rstrip('/').rpartition('/')
    if separator and not parent:
        return None
    return f'{scheme}{separator}{parent}/{SAMPLES}' if name == CHECKPOINTS else f'{scheme}{separator}{parent}/{name}-{SAMPLES}'


@contextmanager
def whole(folder: Folder, batch: int) -> Iterator[tuple[CheckpointManifest, Path]]:
    """The manifest of a checkpoint and a local file that is what it says: a copy from object storage, which is removed at the end.

    Raises:
        IncompleteCheckpoint: with the damage.
        CheckpointRemoved: the run deleted it meanwhile.
        StorageError: the storage does not answer.
    """
    with scratch_for() as scratch:
        try:
            manifest = CheckpointManifest.parse(folder.read(manifest_of(batch)), batch)
            stat = folder.files().get(manifest.file)
            if stat is None or stat.num_bytes != manifest.content.bytes:  # before gigabytes are fetched
                raise ValueError(f'{0 if stat is None else stat.num_bytes:,} bytes, expected {manifest.content.bytes:,}')
            path = folder.fetch(manifest.file, scratch)
            if wrong := find_damage(path, manifest.content):
                raise ValueError(wrong)
        except (ValueError, FileNotFoundError) as error:
            if manifest_of(batch) not in folder.files():  # retention deletes it first
                raise CheckpointRemoved from error
            raise IncompleteCheckpoint(str(error)) from error
        try:
            yield manifest, path
        except CheckpointError as error:
            if manifest_of(batch) not in folder.files():  # it was read, not copied, and deleted before it was opened
                raise CheckpointRemoved from error
            raise
