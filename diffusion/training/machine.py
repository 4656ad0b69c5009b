"""Check what this machine can do for a recipe, before photos, drawn images and data are prepared."""

import os
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

from diffusion.contracts.errors import InputError
from diffusion.cost.hardware import own_device
from diffusion.encoders.frozen_part import AttentionError, use_attention
from diffusion.recipe import AnyRecipe, RecipeError
from diffusion.recipe.rules import without_gpu
from diffusion.training.compilation import compiled, refuse_if_uncompiled

COMPILES_ON_GPU = 'about 3 minutes for Stable Diffusion 2 on an H200 (planned), longer where other processes use the CPU'
COMPILES_ON_CPU = "2 minutes for the demo's (measured on two cores) and 13 or more for Stable Diffusion 2; train.compile=null starts at once"


def fit_machine(recipe: AnyRecipe, kernels: Callable[[], str], trains: bool = True) -> str:
    """Switch on the kernels of convolutions and attention that the recipe asks for, and return the names of the latter.

    Args:
        kernels: names those that compute the network's attention here; raises AttentionError.
        trains: a run follows; where the recipe compiles, say how long that takes and try the compiler, for seconds.

    Raises:
        RecipeError: everything in the recipe that this machine cannot do, in its `errors`.
    """
    train, errors, chosen = recipe.train, [], ''
    try:
        device = own_device()  # current from here on: or every rank would take memory of the first GPU
    except InputError as error:
        raise RecipeError(recipe.name, [str(error)]) from None  # nothing else can be asked of it
    if device.type == 'cpu':
        errors += without_gpu(recipe)[0]
    torch.backends.cudnn.benchmark = train.cudnn_benchmark
    try:
        use_attention(train.attention)
        chosen = kernels()
    except AttentionError as error:
        errors.append(f'train.attention: {train.attention} {error}; set train.attention=auto')
    if errors:
        raise RecipeError(recipe.name, errors)
    if trains and train.compile is not None:
        _try_compiler(train.compile, Path(recipe.run_folder), device)
    return chosen


@cache
def _try_compiler(mode: str, run_folder: Path, device: torch.device) -> None:
    """Announce the compilation of the first step, and compile a small function, which finds a machine without a compiler before all else."""
    if os.environ.get('LOCAL_RANK', '0') == '0':
        duration = COMPILES_ON_CPU if device.type == 'cpu' else COMPILES_ON_GPU
        print(f'train.compile={mode}: the first step compiles the network, {duration}', file=sys.stderr, flush=True)
    try:
        compiled(lambda values: (2 * values).sum())(torch.ones(8, device=device, requires_grad=True)).backward()
    except Exception as error:
        refuse_if_uncompiled(error, mode, run_folder)
        raise
