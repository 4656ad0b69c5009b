"""Read what training saved, without Composer and without running code that hides in a pickle."""

import datetime
import pickle
import re
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from diffusion.checkpoints.manifest import OURS, CheckpointManifest, batches_of, file_of, find_damage, manifest_of
from diffusion.checkpoints.uploading import log
from diffusion.common.text import counted, first_line, one_line
from diffusion.contracts.errors import CheckpointError
from diffusion.encoders.pretrained import not_finite

# All that a Composer 0.32 checkpoint holds besides tensors and plain containers.
ALLOWED = [
    datetime.timedelta,
    np.ndarray,
    np.dtype,
    np._core.multiarray._reconstruct,  # type: ignore[attr-defined]
    torch.torch_version.TorchVersion,
    *(cls for cls in vars(np.dtypes).values() if isinstance(cls, type) and issubclass(cls, np.dtype)),
]

TEXT_ENCODERS = 'text_encoders.'  # what names of their adapters begin with
UNKNOWN_GLOBAL = re.compile(r'GLOBAL ([\w.]{1,100})')  # in PyTorch's message: a class or function that a pickle asks for
PICKLE = (
    'a pickle of somebody else, which could run code: take weights from safetensors, such as a folder that python -m diffusion.export or diffusers '
    'wrote, or a checkpoint of this project'
)


def find_checkpoint(path: Path) -> Path:
    """`path` itself if it is a file; the newest whole checkpoint if it is a run folder or its `checkpoints/`.

    As when a run resumes, a newer one that is not whole is passed over and named, on stderr.

    Raises:
        CheckpointError: there is none, or the file is not what the manifest next to it says.
    """
    if path.is_file():
        check_against_manifest(path, path.with_suffix('.json'))
        return path
    flaws = []
    for folder in (path, path / 'checkpoints'):
        for batch in reversed(batches_of(entry.name for entry in folder.iterdir()) if folder.is_dir() else []):
            file = folder / file_of(batch)
            try:
                check_against_manifest(file, folder / manifest_of(batch))
            except CheckpointError as error:
                flaws.append(str(error))
            else:
                for flaw in flaws:
                    log(flaw)
                if flaws:
                    log(f'{file} is the newest whole one, and is taken')
                return file
    if flaws:
        raise CheckpointError(f'{path}: none of the {len(flaws)} checkpoints is whole: {"; ".join(flaws)}')
    raise CheckpointError(f'{path}: no checkpoint; name a .pt file, or the run folder of a run that has saved one')


def check_against_manifest(file: Path, manifest: Path) -> None:
    """Raise CheckpointError if `file` is damaged, or its manifest is; nothing if there is no manifest of this project."""
    match = OURS.fullmatch(manifest.name)
    if match is None or not manifest.exists():
        return
    try:
        wrong = find_damage(file, CheckpointManifest.parse(manifest.read_bytes(), int(match[1])).content)
    except (OSError, ValueError) as error:
        wrong = str(error)
    if wrong is not None:
        raise CheckpointError(f'{file}: not whole: {wrong}')


def read_checkpoint(path: Path) -> dict[str, Any]:
    """The `state` of a Composer checkpoint, on the CPU.

    Raises:
        CheckpointError: not a file of this project, or one that holds more than tensors and plain values.
    """
    content = load_safely(path)
    if not isinstance(content, dict) or not isinstance(content.get('state'), dict):
        raise CheckpointError(f'{path}: not a checkpoint of this project: it has no `state`')
    return content['state']


def load_safely(path: Path, map_location: str = 'cpu', source: str | None = None) -> Any:
    """torch.load without code from a pickle. Tensors stay in the file until they are used: it may be deleted after, not written to.

    Args:
        source: what messages call it; the path unless this is a copy.

    Raises:
        CheckpointError: torn, or it holds more than tensors and plain values.
    """
    source = source or str(path)
    if path.is_file() and not zipfile.is_zipfile(path):
        raise CheckpointError(f'{source}: not a checkpoint of this project: not an archive as torch.save writes it. It is damaged, or {PICKLE}')
    try:
        with torch.serialization.safe_globals(ALLOWED):
            return torch.load(path, map_location=map_location, weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        what = UNKNOWN_GLOBAL.search(str(error))
        raise CheckpointError(
            f'{source}: refused, nothing was loaded: besides weights and plain values it holds {what[1] if what else "other objects"}. It is {PICKLE}'
        ) from None  # PyTorch's message explains how to load it all the same
    except Exception as error:  # of zip files, of pickles, of numbers in them: each kind of damage has its own
        raise CheckpointError(f'{source}: not a checkpoint of this project, or a damaged one: {first_line(error, limit=200)}') from error


def load_strictly(network: nn.Module, weights: dict[str, Tensor], source: str) -> None:
    """Load all weights of `network`, no more and no fewer; raise CheckpointError if `source` holds another network."""
    if any('.lora_A.' in name for name in weights):
        raise CheckpointError(f'{source}: holds an adapter, not a network; python -m diffusion.export RUN OUT --merged writes a whole one, name that')
    wrong = not_finite(weights)
    if wrong:
        raise CheckpointError(f'{source}: {counted(len(wrong), "weight")} NaN or infinite, such as {wrong[0]}; take an earlier checkpoint')
    try:
        network.load_state_dict(weights, strict=True)
    except RuntimeError as error:
        raise CheckpointError(f'{source}: holds another network than model.network: {one_line(error, 300)}') from error


def training_weights(state: dict[str, Any]) -> dict[str, Tensor]:
    """The network as it is being trained; of an adapter, what it adds to the network. Raises CheckpointError if the state holds no weights."""
    return _network(_part(state, 'model'), 'model')


def ema_weights(state: dict[str, Any]) -> dict[str, Tensor] | None:
    """The average of the network, or None if averaging had not begun; raises CheckpointError if something else is in its place."""
    average = _average(state)
    return None if average is None else _network(average, 'EMA.average')


def num_averages(state: dict[str, Any]) -> int:
    """How many averages the state holds: 0 before the first update."""
    average = _average(state)
    return 0 if average is None else 1 + len(_part(_algorithms(state), 'EMA').get('others', []))


def weights_by_part(state: dict[str, Any], component: str, average: bool, number: int = 0) -> dict[str, dict[str, Tensor]] | None:
    """The trained weights, or their average (None if averaging had not begun), by the part that they belong to: an adapter's may have several.

    Args:
        component: what the network is called among the parts, such as `unet`; text encoders have their own names.
        number: of the average, where the run keeps several.

    Raises:
        CheckpointError: the state holds something else in their place.
    """
    weights = _average(state, number) if average else _part(state, 'model')
    if weights is None:
        return None
    parts: dict[str, dict[str, Tensor]] = {component: _network(_part(state, 'model'), 'model')}
    if average:
        parts[component] |= _network(weights, 'EMA.average')  # all that is trained; buffers, such as positions, are those of the model
    for name, tensor in weights.items():
        if name.startswith(TEXT_ENCODERS):
            part, _, own = name.removeprefix(TEXT_ENCODERS).partition('.')
            parts.setdefault(part, {})[own] = tensor
    return parts


def _average(state: dict[str, Any], number: int = 0) -> Any:
    if 'EMA' not in _algorithms(state):
        return None
    ema = _part(_algorithms(state), 'EMA')
    return ema['others'][number - 1] if number else ema.get('average')


def recipe_yaml(state: dict[str, Any]) -> str:
    """The resolved recipe that the run was started with."""
    try:
        return str(state['callbacks']['RunRecord']['recipe'])
    except (KeyError, TypeError):
        raise CheckpointError('the checkpoint carries no recipe: it was not written by train.py of this project') from None


def zeros_for_empty(state: dict[str, Any]) -> bool:
    """Whether guidance leads away from zeros, as in the published model that the run began from; False of one that does not say."""
    return bool(state.get('callbacks', {}).get('DrawingRecord', {}).get('zeros_for_empty', False))


def batches_trained(state: dict[str, Any]) -> int:
    """Raises CheckpointError: the state does not say."""
    try:
        return int(_part(_part(state, 'timestamp'), 'Timestamp')['batch'])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f'the checkpoint does not say how many batches were trained: {error!r}') from None


def _algorithms(state: dict[str, Any]) -> dict[str, Any]:
    try:
        return dict(state['algorithms'])
    except (KeyError, TypeError, ValueError):
        raise CheckpointError('the checkpoint lists no algorithms: it was not written by train.py of this project') from None


def _part(state: dict[str, Any], name: str) -> dict[str, Any]:
    part = state.get(name)
    if not isinstance(part, dict):
        raise CheckpointError(f'the checkpoint has {"nothing" if part is None else f"a {type(part).__name__}"} in the place of `{name}`')
    return part


def _network(weights: Any, what: str) -> dict[str, Tensor]:
    """Drop wrappers' prefixes and everything before the network's own names."""
    if not isinstance(weights, dict) or not all(isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in weights.items()):
        raise CheckpointError(f'the checkpoint has something else than weights by name in the place of `{what}`')
    return {name.split('network.', 1)[1]: tensor for name, tensor in weights.items() if 'network.' in name}
