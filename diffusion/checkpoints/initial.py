"""The weights that a new run starts from (`load_path`), or that its adapter belongs to: found, fetched, loaded strictly, and named in a line."""

import inspect
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from composer.utils import dist, get_file
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from diffusion.checkpoints.manifest import OURS, sha256_of
from diffusion.checkpoints.reading import batches_trained, find_checkpoint, load_strictly, read_checkpoint, training_weights, zeros_for_empty
from diffusion.common.collective import on_first_rank_of_node
from diffusion.common.files import read_json
from diffusion.common.text import first_line, print_message
from diffusion.contracts.errors import CheckpointError
from diffusion.encoders.pretrained import hub_problem
from diffusion.families.pipeline import SCHEDULER, DrawingSettings
from diffusion.families.registry import family_of
from diffusion.objectives import build_objective
from diffusion.recipe import Recipe
from diffusion.recipe.keys import hub_source
from diffusion.recipe.schema import Model

WEIGHTS = 'diffusion_pytorch_model.safetensors'
INDEX, SHARDS = f'{WEIGHTS}.index.json', 'diffusion_pytorch_model-*-of-*.safetensors'  # of a network that lies in several files
# Entries of a sampler that say how its network was trained.
OF_TRAINING = (
    *('num_train_timesteps', 'beta_schedule', 'beta_start', 'beta_end', 'trained_betas', 'prediction_type', 'rescale_betas_zero_snr'),
    *('shift', 'use_dynamic_shifting'),
)
# Entries of a network's configuration that change neither what its weights are nor what it computes from them, but for rounding.
INDIFFERENT = (
    *('sample_size', 'dropout', 'upcast_attention', 'scaling_factor', 'shift_factor', 'latents_mean', 'latents_std', 'force_upcast'),
    'axes_lens',  # how far a table of positions reaches
)


def base_of(recipe: Recipe) -> str:
    """Source of an adapter's frozen network, as `load_path` would name it."""
    encoders = recipe.model.encoders
    return recipe.load_path or (encoders.source if encoders.revision is None else f'{encoders.source}@{encoders.revision}')


def load_base(network: nn.Module, recipe: Recipe) -> DrawingSettings:
    """Load the frozen network of an adapter, from `load_path` or, if that is null, from `model.encoders.source`; return how it is drawn with.

    Raises:
        CheckpointError: as `load_weights`; or the source has no network.
    """
    path = base_of(recipe)
    component = family_of(recipe.model.network).component
    if recipe.load_path is None and Path(path).is_dir() and not _weight_files(Path(path, component)):
        raise CheckpointError(
            f'model.encoders.source: {path} has no {component}/{WEIGHTS}, which the adapter would belong to; name a whole pipeline in the '
            'diffusers layout, or the network with load_path'
        )
    key = 'load_path' if recipe.load_path is not None else 'model.encoders.source'
    try:
        return load_weights(network, path, recipe.model, key, same_objective=True)
    except CheckpointError as error:
        raise CheckpointError(f'{key}: {str(error).removeprefix("load_path: ")}') from error


def load_weights(network: nn.Module, path: str, model: Model | None, key: str = 'load_path', same_objective: bool = False) -> DrawingSettings:
    """Start from a checkpoint (the weights as trained, not the EMA), or from a diffusers folder here or on the Hub (whatever it holds); return how
    images were drawn with it.

    The first rank prints what was loaded: file, batch, which weights, SHA-256.

    Args:
        path: a run folder, a `.pt` file, a diffusers folder, the URL of a `.pt` file in object storage, or `OWNER/NAME@COMMIT` on the Hub.
        model: the recipe's section; a sampler in the diffusers folder that says the network was trained otherwise is mentioned. None: an autoencoder.
        key: of the recipe that names the path, for the line that is printed.
        same_objective: refuse a network that was trained otherwise, as its sampler says: an adapter cannot learn another objective, and what the
            network draws with another sampler is noise.

    Raises:
        CheckpointError: it cannot be fetched or read, or holds another network.
    """
    component, scheduler = 'vae', None
    if model is not None:
        family = family_of(model.network)
        component, scheduler = family.component, family.scheduler(build_objective(model))
    settings = DrawingSettings()
    with _local_copy(path, [*(f'{component}/{name}' for name in (WEIGHTS, INDEX, SHARDS, 'config.json')), SCHEDULER, 'model_index.json']) as local:
        files = _weight_files(local / component)
        if files:
            weights, what = _from_diffusers(network, local, files, path, scheduler, same_objective)
            settings = settings if scheduler is None else DrawingSettings.read(local)
        elif not local.exists():
            raise CheckpointError(
                f'load_path: {path}: no such file or folder, so no checkpoint; name a run folder, a .pt file, an exported folder, or a model '
                'on the Hub with the 40 hex digits of its commit: OWNER/NAME@COMMIT'
            )
        else:
            try:
                files = [find_checkpoint(local)]
                state = read_checkpoint(files[0])
                settings = DrawingSettings(zeros_for_empty(state))
                weights, what = training_weights(state), f'batch {batches_trained(state):,}, weights as trained (not the EMA)'
            except CheckpointError as error:  # of a temporary copy, perhaps, whose name helps nobody
                raise CheckpointError(f'load_path: {path}: {str(error).replace(str(local), path).removeprefix(f"{path}: ")}') from error
        load_strictly(network, weights, f'load_path: {path}')
        if dist.get_global_rank() == 0:
            names = ' and '.join(str(file.relative_to(local)) if file != local else file.name for file in files)
            shown = path if path.endswith(files[0].name) else f'{path}, {names}'
            print_message(f'{key}: starting from {shown}: {what}; SHA-256 {", ".join(map(sha256_of, files))}')
    return settings


def _weight_files(folder: Path) -> list[Path]:
    """Files of a network's weights in the diffusers layout: one, or those that its index lists; empty if there are none."""
    if (folder / WEIGHTS).exists():
        return [folder / WEIGHTS]
    listed = _json(folder / INDEX).get('weight_map')
    return sorted({folder / Path(str(name)).name for name in listed.values()}) if isinstance(listed, dict) else []


def _from_diffusers(
    network: nn.Module, folder: Path, files: list[Path], path: str, scheduler: Any, same_objective: bool
) -> tuple[dict[str, Tensor], str]:
    """The weights of a network in the diffusers layout, and what they are."""
    _refuse_other_network(network, _json(files[0].with_name('config.json')), path)
    weights = dict[str, Tensor]()
    for file in files:
        try:
            weights |= load_file(file)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f'load_path: {file} is damaged: {error}; download or export the folder again') from error
    exported = _json(folder / 'export.json')
    if exported:
        batches = exported.get('batches')
        what = f'batch {batches:,}' if isinstance(batches, int) else 'an export'
        what += ', EMA weights' if exported.get('weights') == 'ema' else ', weights as trained (not the EMA)'
    else:
        what = 'published weights (the folder does not say whether they are an EMA)'
    if scheduler is None:
        return weights, what
    theirs, ours = _json(folder / SCHEDULER), scheduler.config
    different = [name for name in OF_TRAINING if name in theirs and name in ours and theirs[name] != ours[name]]
    if different:
        named = (', '.join(f'{name} {config[name]}' for name in different) for config in (theirs, ours))
        named_both = 'its sampler is set to {}, and this run trains with {}'.format(*named)
        if same_objective:
            raise CheckpointError(f"load_path: {path}: {named_both}; set the recipe's objective (model.diffusion, model.flow) to its own")
        what += f'; {named_both}'
    return weights, what


def _json(file: Path) -> dict[str, Any]:
    """The object in a file; empty if there is no such file."""
    return read_json(file, dict[str, Any], CheckpointError, 'download or export the folder of load_path again') if file.exists() else {}


def _refuse_other_network(network: Any, config: Mapping[str, Any], path: str) -> None:
    """Networks whose weights have equal shapes may still compute something else, with another number of attention heads for example."""
    if not config:
        return
    defaults = {name: parameter.default for name, parameter in inspect.signature(type(network).__init__).parameters.items() if name != 'self'}
    differences = [
        f'{name}: {config.get(name, default)} there, {network.config[name]} here'
        for name, default in defaults.items()
        if name not in INDIFFERENT and _plain(config.get(name, default)) != _plain(network.config[name])
    ]
    if differences:
        raise CheckpointError(f'load_path: {path}: holds another network than model.network: {"; ".join(differences)}')


def _plain(value: Any) -> Any:
    """A list in which all entries are equal means the same as the entry alone."""
    if isinstance(value, list | tuple):
        entries = [_plain(entry) for entry in value]
        return entries[0] if entries and all(entry == entries[0] for entry in entries) else entries
    return value


@contextmanager
def _local_copy(path: str, files: list[str]) -> Iterator[Path]:
    """The path itself, the Hub's cache on this machine, or a download that the processes of a node share and that is removed at the end."""
    hub = hub_source(path)
    if hub is not None:
        yield on_first_rank_of_node(partial(_from_hub, *hub, files))
        return
    if '://' not in path:
        yield Path(path)
        return
    local = on_first_rank_of_node(partial(_fetched, path))
    try:
        yield local
    finally:
        dist.barrier()
        if dist.get_local_rank() == 0:
            shutil.rmtree(local.parent, ignore_errors=True)


def _from_hub(name: str, commit: str, files: list[str]) -> Path:
    """The `files` that there are, in the cache of huggingface_hub; with its own login where the model needs one."""
    from huggingface_hub import snapshot_download

    def snapshot(cached: bool) -> Path:
        return Path(snapshot_download(name, revision=commit, allow_patterns=files, local_files_only=cached))

    problem = hub_problem()
    try:
        try:
            folder = snapshot(cached=False)
        except (OSError, ValueError):  # huggingface_hub 1 does not look into its cache by itself when the Hub cannot be reached
            folder = snapshot(cached=True)
    except (OSError, ValueError) as error:  # HTTP errors, no network and no such repository among them
        answer = error.__context__ or error  # the Hub's own, not that the cache has nothing
        remedy = f'hf download {name} --revision {commit} fills the cache' if problem else 'if it needs a login: hf auth login'
        raise CheckpointError(
            f'load_path: {name} at commit {commit} cannot be fetched from the Hub: {problem or first_line(answer)}; {remedy}'
        ) from error
    if not _weight_files((folder / files[0]).parent):
        raise CheckpointError(f'load_path: {name} at commit {commit} has no {files[0]}: only safetensors are read')
    return folder


def _fetched(path: str) -> Path:
    """A copy in a temporary folder of its own, its manifest next to it."""
    local = Path(tempfile.mkdtemp(prefix='load-')) / path.rpartition('/')[2]
    try:
        get_file(path, str(local), overwrite=True)
        if OURS.fullmatch(local.name):
            with suppress(FileNotFoundError):
                get_file(f'{path.removesuffix(".pt")}.json', str(local.with_suffix('.json')), overwrite=True)
    except Exception as error:  # each object store raises its own
        shutil.rmtree(local.parent, ignore_errors=True)
        raise CheckpointError(f'load_path: {path} cannot be fetched: {type(error).__name__}: {error}') from error
    return local
