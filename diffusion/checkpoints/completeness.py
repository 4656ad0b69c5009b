"""Completeness: a run resumes from all of a checkpoint, or not at all.

Composer 0.32 loads what it finds: a missing optimizer, schedule or random state is a warning at most, a missing weight nothing. An algorithm
that the file names and the run lacks would even be made by `eval` of what the file says. Composer also unpickles all of it: `safe_loading` keeps it
from that.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from composer.core import State
from composer.loggers import LoggerDestination
from composer.utils import checkpoint
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

from diffusion.checkpoints.reading import load_safely
from diffusion.contracts.errors import CheckpointError

NUM_NAMED = 3  # differences in a message
ANY = None  # in what is expected: a plain value, or what a part looks after by itself


@runtime_checkable
class SavesTensors(Protocol):
    """An algorithm whose state in a checkpoint holds tensors, which are compared too."""

    def saved_tensors(self, model: nn.Module, batch: int) -> dict[str, Any]:
        """Contents of its state after `batch` batches, by name: tensors, or dictionaries of them, of the right shapes and dtypes."""


def refuse_incomplete(content: Any, state: State, source: str) -> None:
    """Compare a checkpoint with what `state` would save: names of all parts, and shapes of tensors. Nothing is loaded yet.

    Args:
        content: of the file.
        state: of the trainer that will load it; its model, optimizer, algorithms and callbacks are those of the recipe.
        source: of the content, for messages.

    Raises:
        CheckpointError: a part is missing, unexpected or misshapen.
    """
    batch, num_ranks = _number(content, 'state', 'timestamp', 'Timestamp', 'batch'), _number(content, 'state', 'metadata', 'world_size')
    found = list(differences(_expected(state, batch, num_ranks), _comparable(content, state))) or list(_unusable(content['rng']))
    if found:
        more = f' and {len(found) - NUM_NAMED} more' if len(found) > NUM_NAMED else ''
        raise CheckpointError(
            f'{source}: not the checkpoint of such a run: {"; ".join(found[:NUM_NAMED])}{more}. Nothing was loaded. Move it away to resume from the '
            'one before it, or start a new run from its weights with load_path'
        )


def differences(expected: Any, found: Any, path: str = '') -> Iterator[str]:
    """Yield a line for each part of `found` that is missing, unexpected or of another type, shape or dtype; `ANY` fits all."""
    if expected is ANY:
        return
    if isinstance(expected, Tensor):
        if not isinstance(found, Tensor):
            yield f'{path} is {_kind(found)}, not a tensor'
        elif found.shape != expected.shape:
            yield f'{path} has the shape {tuple(found.shape)}, not {tuple(expected.shape)}'
        elif found.dtype != expected.dtype:
            yield f'{path} is {found.dtype}, not {expected.dtype}'
        return
    if not isinstance(found, type(expected)):
        yield f'{path or "the file"} is {_kind(found)}, not {_kind(expected)}'
        return
    if isinstance(expected, dict):
        yield from (f'{_join(path, key)} is missing' for key in expected if key not in found)
        yield from (f'{_join(path, key)} is unexpected' for key in found if key not in expected)
        for key in expected:
            if key in found:
                yield from differences(expected[key], found[key], _join(path, key))
    elif isinstance(expected, list):
        if len(found) != len(expected):
            yield f'{path} has {len(found)} entries, not {len(expected)}'
        for index, (one, other) in enumerate(zip(expected, found, strict=False)):
            yield from differences(one, other, f'{path}[{index}]')


def _expected(state: State, batch: int, num_ranks: int) -> dict[str, Any]:
    """Return what a file of `num_ranks` ranks after `batch` batches must hold: names, and tensors of the right shapes and dtypes."""
    tensors = {type(one).__qualname__: one.saved_tensors(state.model, batch) for one in state.algorithms if isinstance(one, SavesTensors)}
    return {
        'state': {
            # Of sharded models the shards, which have the shapes of the whole: nothing is gathered.
            'model': dict(get_model_state_dict(state.model)),
            'optimizers': {type(one).__qualname__: get_optimizer_state_dict(state.model, one) for one in state.optimizers},
            'schedulers': {type(one).__qualname__: _public(one.state_dict()) for one in state.schedulers},
            'algorithms': {type(one).__qualname__: _names(one.state_dict()) | tensors.get(type(one).__qualname__, {}) for one in state.algorithms},
            'callbacks': {name: _names(own) for name, own in _with_state(state).items()},
            'timestamp': {'Timestamp': state.timestamp.state_dict()},
            'dataset_state': {name: _names(own) for name, own in state._dataset_state_dict().items()},
            **dict.fromkeys(('scaler', 'rank_zero_seed', 'run_name', 'integrations', 'metadata'), ANY),
        },
        'rng': [{'python': ANY, 'numpy': ANY, 'torch': torch.get_rng_state()}] * num_ranks,
    }


def _unusable(rng: list[dict[str, Any]]) -> Iterator[str]:
    """Yield a line for each random state that its generator does not accept."""
    for rank, states in enumerate(rng):
        takes: dict[str, Callable[[Any], object]] = {
            'python': random.Random().setstate,
            'numpy': np.random.RandomState().set_state,
            'torch': torch.Generator().set_state,
        }
        for name, take in takes.items():
            try:
                take(states[name])
            except Exception as error:  # TypeError, ValueError, RuntimeError ...
                yield f"rng[{rank}].{name} is no state of {name}'s random numbers ({error})"


def _comparable(content: Any, state: State) -> Any:
    """Return the content without parts that may differ: callbacks, which come and go with `log` and `eval`, the state of a GPU, and what a
    version of PyTorch notes of a scheduler and another does not (`_is_initial` since 2.9)."""
    try:
        parts, needed = content['state'], _with_state(state)
        return {
            'state': {
                **parts,
                'schedulers': {name: _public(own) for name, own in parts['schedulers'].items()},
                'algorithms': dict(parts['algorithms']),
                'callbacks': {name: own for name, own in parts['callbacks'].items() if name in needed},
            },
            'rng': [{name: one for name, one in rank.items() if name != 'cuda'} for rank in content['rng']],
        }
    except (KeyError, TypeError, ValueError, AttributeError):
        return content  # whatever it is, `differences` says so


def _with_state(state: State) -> dict[str, dict[str, Any]]:
    """Return the state of callbacks that save something. Loggers may change on resuming."""
    saved = {type(one).__qualname__: one.state_dict() for one in state.callbacks if not isinstance(one, LoggerDestination)}
    return {name: own for name, own in saved.items() if own}


def _number(content: Any, *path: str) -> int:
    """Return a number of the checkpoint; 1 if it is missing, which `differences` reports."""
    try:
        for name in path:
            content = content[name]
        return int(content)
    except (KeyError, TypeError, ValueError, IndexError):
        return 1


def _names(part: Any) -> Any:
    return dict.fromkeys(part, ANY) if isinstance(part, dict) else ANY


def _public(scheduler: dict[str, Any]) -> dict[str, Any]:
    return {name: ANY for name in scheduler if not name.startswith('_')}


def _join(path: str, key: object) -> str:
    return f'{path}.{key}' if path else str(key)


def _kind(value: object) -> str:
    return f'a {type(value).__name__}'


@contextmanager
def safe_loading(load: Callable[[Path, str], Any] = load_safely) -> Iterator[None]:
    """Make Composer load checkpoints as the rest of the project does: 0.32 loads every one, ours on resuming too, with full pickle. It looks its
    loader up in its module at each call, so it can be replaced.

    Args:
        load: the content of a file (its path, and the device that tensors go to). Composer gives it a temporary link to the checkpoint.
    """
    stock = checkpoint._torch_load_with_validation
    checkpoint._torch_load_with_validation = lambda checkpoint_filepath, map_location: load(Path(checkpoint_filepath), map_location)
    try:
        yield
    finally:
        checkpoint._torch_load_with_validation = stock
