"""Draw a grid of each new checkpoint of a run, as the run itself would, until the run is finished. Its folders are only read."""

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from composer.core import get_precision_context
from composer.utils import get_device
from PIL import Image

from diffusion.checkpoints.manifest import CheckpointManifest, batches_of, file_of, find_damage, manifest_of
from diffusion.checkpoints.owner import OWNER
from diffusion.checkpoints.reading import load_strictly, read_checkpoint, recipe_yaml, weights_by_part, zeros_for_empty
from diffusion.checkpoints.resume import refuse_other_encoders
from diffusion.common.images import save_png
from diffusion.common.storage import Folder, LocalFolder, StorageError, StorageRefusal, open_folder, scratch_for
from diffusion.common.text import counted, one_line, print_message
from diffusion.contracts.errors import CheckpointError, IncompleteError, InputError
from diffusion.families.adapters import adapted_parts, load_adapters
from diffusion.families.registry import kernels_in_use
from diffusion.monitoring.loggers import start_wandb
from diffusion.monitoring.sample_grid import draw_grid, grid_name, grid_texts
from diffusion.recipe import Recipe, RecipeError, recipe_from_yaml
from diffusion.recipe.rules import length_in_batches
from diffusion.recipe.schema import Samples, present
from diffusion.training.builder import build_model, frozen_digests
from diffusion.training.machine import fit_machine

if TYPE_CHECKING:
    from wandb import Run

CHECKPOINTS, SAMPLES = 'checkpoints', 'samples'
CHECKPOINT = 'checkpoint'  # text in the file of a grid: digest of the checkpoint that it was drawn from
LOGGER = 'WandBLogger'  # by its name the checkpoint has the state of the run's own logger, which monitoring/loggers.py writes


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


class GridDrawer:
    """The model of a run: its encoders and the base of its adapter are loaded once, what it trains from each checkpoint.

    Args:
        recipe: of the first checkpoint; a run keeps its `model`, `data.resolution` and `train.precision`.

    Raises:
        EncoderError, RecipeError: the model cannot be built here, with the remedy.
    """

    def __init__(self, recipe: Recipe):
        on_gpu = get_device(None).name == 'gpu'  # Composer's device switches TF32 on, as in training
        self.recipe = as_drawn(recipe, on_gpu)
        fit_machine(self.recipe, partial(kernels_in_use, self.recipe), trains=False)
        # As of a run that resumes: its weights come from a checkpoint, not from load_path.
        self.model: Any = build_model(self.recipe, torch.device('cuda' if on_gpu else 'cpu'), resumes=True).eval()

    def load(self, state: dict[str, Any], manifest: CheckpointManifest, weights: str) -> str:
        """Load the EMA (`ema`), where the checkpoint has none yet the weights as trained, or those in any case (`training`); returns which.

        Raises:
            CheckpointError: another network, or trained with other encoders.
        """
        refuse_other_encoders(manifest, frozen_digests(self.model))
        family, network = self.model.family, self.model.network
        average = weights_by_part(state, family.component, average=True) if weights == 'ema' else None
        self.model.zeros_for_empty = self.model.zeros_for_empty or zeros_for_empty(state)
        chosen = average or weights_by_part(state, family.component, average=False) or {}
        if self.recipe.adapter is None:
            load_strictly(network, chosen[family.component], manifest.file)
        else:
            load_adapters(adapted_parts(family, network, self.model.encoders.text), chosen, manifest.file)
        return 'training' if average is None else 'ema'

    def draw(self, samples: Samples) -> Image.Image:
        with get_precision_context('fp32' if self.recipe.train.precision == 'fp32' else 'amp_bf16'):
            return draw_grid(self.model, samples, self.recipe.data.resolution)


def as_drawn(recipe: Recipe, on_gpu: bool) -> Recipe:
    """The recipe for one process that draws: nothing sharded or compiled; bf16 by autocast on a GPU, float32 elsewhere."""
    train = replace(recipe.train, sharding='ddp', compile=None, checkpoint_activations=False)
    train.precision = 'amp_bf16' if on_gpu and train.precision != 'fp32' else 'fp32'
    train.attention = train.attention if on_gpu else 'auto'
    return replace(recipe, train=train)


class Watcher:
    """Draws the checkpoints of one run.

    Args:
        where: run folder, checkpoint folder, or URL.
        out: folder or URL for the grids; None puts them next to the checkpoints.
        samples: prompts and settings other than the recipe's: fields of its `log.samples`.
        weights: `ema` (as trained until there is one) or `training`.
        every_sec: seconds between looks.
        overrides: changes to the checkpoints' recipe, `key=value`.
    """

    def __init__(
        self,
        where: str,
        out: str | None = None,
        samples: Mapping[str, Any] | None = None,
        weights: str = 'ema',
        every_sec: float = 60.0,
        overrides: Sequence[str] = (),
    ):
        self.where, self.samples, self.weights, self.every_sec, self.overrides = where, samples or {}, weights, every_sec, overrides
        self.out = None if out is None else open_folder(out)
        self.folder: Folder | None = None
        self.drawer: GridDrawer | None = None
        self.wandb: Run | None = None
        self.last = -1  # batch of the newest checkpoint that was dealt with
        self.finished = False
        self.counts = Counter[str]()
        self._flawed: dict[int, object] = {}  # by batch, sizes and versions of files that were found to be incomplete
        self._tried_wandb = False

    def once(self) -> None:
        """Draw the newest whole checkpoint.

        Raises:
            IncompleteError: there is none yet.
            StorageError: the storage does not answer.
        """
        if not self.look():
            raise IncompleteError(f'{self.where}: no whole checkpoint yet; run it again later, or without --once, which waits for one')

    def follow(self) -> None:
        """Draw the newest checkpoint and then each new one, until the run has saved its last; storage that does not answer is asked again."""
        waited = False
        while not self.finished:
            try:
                found = self.look()
                if not found and not waited and self.last < 0:
                    log(f'{self.where}: no checkpoint yet; looking again every {self.every_sec:g} s')
                    waited = True
            except StorageRefusal:
                raise
            except StorageError as error:
                log(f'{one_line(error)}; trying again in {self.every_sec:g} s')
                found = False
            if not found:
                time.sleep(self.every_sec)

    def look(self) -> bool:
        """Deal with the newest checkpoint that is new and whole; False if there is none."""
        if self.folder is None:
            self._find()
        assert self.folder is not None
        names = self.folder.files()
        new = [batch for batch in batches_of(names) if batch > self.last]
        for batch in reversed(new):
            seen = names[manifest_of(batch)], names.get(file_of(batch))
            if self._flawed.get(batch) == seen:
                continue
            start = time.monotonic()
            try:
                with whole(self.folder, batch) as (manifest, path):
                    self._draw(manifest, path, start)
            except CheckpointRemoved:
                log(f'{file_of(batch)}: deleted by the run before it was read; skipped')
                self.counts['deleted'] += 1
            except IncompleteCheckpoint as error:
                log(f'{file_of(batch)}: not whole, not drawn: {error}')
                self.counts['not whole'] += batch not in self._flawed
                self._flawed[batch] = seen
            else:
                self._skip([older for older in new if older < batch])
                self.last = batch
                return True
        return False

    def summary(self) -> str:
        """Checkpoints that were seen."""
        parts = [f'{counted(self.counts["drawn"], "grid")} drawn']
        seen = {
            'skipped': ('older checkpoint', 'skipped'),
            'deleted': ('checkpoint', 'deleted before it was read'),
            'not whole': ('checkpoint', 'not whole'),
        }
        parts += [f'{counted(self.counts[name], what)} {fate}' for name, (what, fate) in seen.items() if self.counts[name]]
        where = '' if self.out is None else f': {self.out.url}'
        return f'{", ".join(parts)}{where}{"; the run is finished" if self.finished else ""}'

    def close(self) -> None:
        if self.wandb is not None:
            self.wandb.finish()
            self.wandb = None

    def _find(self) -> None:
        folder = find_checkpoints(self.where)
        if self.out is None:
            place = folder_of_grids(folder.url)
            if place is None:
                raise InputError(f'{folder.url}: a whole bucket has no place next to it for the grids; name one with --out')
            self.out = open_folder(place)
        if self.out.url.rstrip('/') == folder.url.rstrip('/'):
            raise InputError(f'--out {self.out.url}: the checkpoints are there, and nothing else may be written there; name another folder')
        self.folder = folder
        log(f'following {folder.url}, grids go to {self.out.url}')

    def _skip(self, older: Sequence[int]) -> None:
        """Count the checkpoints of a backlog that are not drawn, without those that have a grid."""
        assert self.out is not None
        grids = {name.partition('-')[0] for name in self.out.files()}
        skipped = [batch for batch in older if f'ba{batch:08d}' not in grids and batch not in self._flawed]
        if skipped:
            self.counts['skipped'] += len(skipped)
            some = f'batch {skipped[0]:,}' if len(skipped) == 1 else f'batches {skipped[0]:,} to {skipped[-1]:,}'
            log(f'{counted(len(skipped), "older checkpoint")} skipped ({some}): of several only the newest is drawn')

    def _draw(self, manifest: CheckpointManifest, path: Path, start: float) -> None:
        assert self.out is not None
        state = read_checkpoint(path)
        recipe = recipe_from_yaml(recipe_yaml(state), manifest.file, self.overrides)
        samples = replace(recipe.log.samples, **self.samples)
        prompts = present(samples.prompts)
        if not prompts:
            raise InputError(f"{self.where}: nothing to draw: the run's log.samples.prompts is empty; give --prompt or --prompts-file")
        if self.drawer is None:
            self.drawer = GridDrawer(recipe)
        weights = self.drawer.load(state, manifest, self.weights)
        name = grid_name(manifest.batch, weights)
        texts = {**grid_texts(samples), CHECKPOINT: manifest.content.sha256}
        if self._is_drawn(name, texts):
            log(f'batch {manifest.batch:,}: {self.out.url}/{name} is there already')
        else:
            loaded = time.monotonic()
            image = self.drawer.draw(samples)
            with scratch_for(self.out) as scratch:
                save_png(image, scratch / name, texts)
                self.out.put(scratch / name, name)
            self.counts['drawn'] += 1
            log(
                f'batch {manifest.batch:,}: {self.out.url}/{name}, {counted(len(prompts), "prompt")}, read in {loaded - start:.1f} s, '
                f'drawn in {time.monotonic() - loaded:.1f} s'
            )
            self._log_image(image, weights, manifest.batch, recipe, state)
        end = last_batch(recipe, state)
        self.finished = end is not None and manifest.batch >= end

    def _is_drawn(self, name: str, texts: Mapping[str, str]) -> bool:
        """Whether the grid is there already, perhaps drawn by the run itself.

        Raises:
            InputError: a grid of other prompts or settings has its name.
        """
        assert self.out is not None
        try:
            with scratch_for() as scratch, Image.open(self.out.fetch(name, scratch), formats=('PNG',)) as image:
                there = {text: image.info.get(text, wanted) for text, wanted in texts.items()}  # the run's own do not name a checkpoint
        except (OSError, SyntaxError):  # SyntaxError: Pillow of a broken PNG
            return False
        if there[CHECKPOINT] != texts[CHECKPOINT]:
            return False  # of an earlier run in this place
        if there != texts:
            raise InputError(f'{self.out.url}/{name}: was drawn with other prompts or settings and is not replaced; name another folder with --out')
        return True

    def _log_image(self, image: Image.Image, weights: str, batch: int, recipe: Recipe, state: dict[str, Any]) -> None:
        """Log to W&B if the run itself does; without it the grids are drawn all the same.

        W&B lets several processes write to one run in its experimental shared mode alone (0.28): all of them must be in it, the training process too,
        whose metrics would then lose their batch (`step` is ignored), and offline there is no such mode. Two ordinary clients of one run overwrite
        each other's history. So the grids are a run of their own, `NAME-watch`, in the group of the run that is watched, with an id made of its id: a
        later process continues it.
        """
        assert self.out is not None
        if not self._tried_wandb and 'wandb' in recipe.log.to:
            self._tried_wandb = True
            watched = state.get('callbacks', {}).get(LOGGER)
            if not isinstance(watched, dict) or not watched.get('id'):
                log('W&B: the checkpoint does not name its run, whose grids are not logged there')
                return
            init = {
                **{name: watched[name] for name in ('entity', 'project', 'group')},
                'id': f'{watched["id"]}-watch',
                'name': f'{recipe.name}-watch',
                'job_type': 'watch',
                'config': {'watched_run': watched['id']},
                'resume': 'allow',
                'settings': {'disable_git': True, 'disable_code': True, 'quiet': True},
                # In object storage W&B chooses a folder for its local files: the current one, or WANDB_DIR.
                **({'dir': str(Path(self.out.url).parent)} if isinstance(self.out, LocalFolder) else {}),
            }
            try:
                self.wandb = start_wandb(init)
            except RecipeError as error:
                log(f'W&B: grids are not logged there: {one_line(error)}')
        if self.wandb is not None:
            import wandb

            self.wandb.log({f'samples/{weights}': [wandb.Image(image)]}, step=batch)


def last_batch(recipe: Recipe, state: dict[str, Any]) -> int | None:
    """The batch that a run ends with; None if its length is in epochs and it has not finished one, so that nothing says how long they are.

    Args:
        state: of one of its checkpoints.
    """
    if recipe.train.duration.unit == 'ba':
        return length_in_batches(recipe, 0)
    now = state['timestamp']['Timestamp']
    return length_in_batches(recipe, (now['batch'] - now['batch_in_epoch']) // now['epoch']) if now['epoch'] else None


def log(line: str) -> None:
    print_message(f'watch: {line}')
