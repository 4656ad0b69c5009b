"""Read what training saved, without Composer and without running code that hides in a pickle."""

from __future__ import annotations

import datetime
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from diffusion.checkpoints.manifest import OURS, Manifest, batches_of, file_of, flaw, manifest_of
from diffusion.errors import CheckpointError

# All that a Composer 0.32 checkpoint holds besides tensors and plain containers.
ALLOWED = [
    datetime.timedelta,
    np.ndarray,
    np.dtype,
    np._core.multiarray._reconstruct,  # type: ignore[attr-defined]
    torch.torch_version.TorchVersion,
    *(cls for cls in vars(np.dtypes).values() if isinstance(cls, type) and issubclass(cls, np.dtype)),
]


def find_checkpoint(path: Path) -> Path:
    """`path` itself if it is a file; the newest whole checkpoint if it is a run folder or its `checkpoints/`.

    Raises:
        CheckpointError: there is none, or the file is not what the manifest beside it says.
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
                return file
    if flaws:
        raise CheckpointError(f'{path}: none of the {len(flaws)} checkpoints is whole: {"; ".join(flaws)}')
    raise CheckpointError(f'{path}: no checkpoint; name a .pt file, or the run folder of a run that has saved one')


def check_against_manifest(file: Path, manifest: Path) -> None:
    """Nothing if there is no manifest of ours.

    Raises:
        CheckpointError: `file` is damaged, or its manifest is.
    """
    match = OURS.fullmatch(manifest.name)
    if match is None or not manifest.exists():
        return
    try:
        wrong = flaw(file, Manifest.parse(manifest.read_bytes(), int(match[1])).content)
    except (OSError, ValueError) as error:
        wrong = str(error)
    if wrong is not None:
        raise CheckpointError(f'{file}: not whole: {wrong}')


def read_checkpoint(path: Path) -> dict[str, Any]:
    """The `state` of a Composer checkpoint, on the CPU.

    Raises:
        CheckpointError: not a file of ours, or one that holds more than tensors and plain values.
    """
    try:
        return load_safely(path)['state']
    except (KeyError, TypeError) as error:
        raise CheckpointError(f'{path}: not a checkpoint of this project: {error}') from error


def load_safely(path: Path, map_location: str = 'cpu') -> Any:
    """torch.load without code from a pickle. Tensors stay in the file until they are used: it may be deleted after, not written to.

    Raises:
        CheckpointError: torn, or it holds more than tensors and plain values.
    """
    try:
        with torch.serialization.safe_globals(ALLOWED):
            return torch.load(path, map_location=map_location, weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(f'{path}: refused, it holds more than weights and plain values: {str(error).splitlines()[0]}') from error
    except (OSError, RuntimeError, EOFError) as error:
        raise CheckpointError(f'{path}: not a checkpoint of this project, or a damaged one: {str(error).splitlines()[0]}') from error


def load_strictly(unet: nn.Module, weights: dict[str, Tensor], source: str) -> None:
    """Load all weights of `unet`, no more and no fewer.

    Raises:
        CheckpointError: `source` holds another network.
    """
    try:
        unet.load_state_dict(weights, strict=True)
    except RuntimeError as error:
        raise CheckpointError(f'{source}: holds another network than model.unet: {" ".join(str(error).split())[:300]}') from error


def training_weights(state: dict[str, Any]) -> dict[str, Tensor]:
    """The U-Net as it is being trained."""
    return _unet(state['model'])


def ema_weights(state: dict[str, Any]) -> dict[str, Tensor] | None:
    """The average of the U-Net, or None if averaging had not begun."""
    algorithms = dict(state['algorithms'])
    average = algorithms.get('EMA', {}).get('average')
    return None if average is None else _unet(average)


def recipe_yaml(state: dict[str, Any]) -> str:
    """The resolved recipe that the run was started with."""
    try:
        return state['callbacks']['RunRecord']['recipe']
    except (KeyError, TypeError):
        raise CheckpointError('the checkpoint carries no recipe: it was not written by train.py of this project') from None


def batches_trained(state: dict[str, Any]) -> int:
    return int(state['timestamp']['Timestamp']['batch'])


def _unet(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Drop wrappers' prefixes and everything before the U-Net's own names."""
    return {name.split('unet.', 1)[1]: tensor for name, tensor in weights.items() if 'unet.' in name}
