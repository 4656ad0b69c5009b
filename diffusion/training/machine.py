"""Demands of a recipe on the machine: kernels, checked before photos, drawn images and data are prepared, and the compilation of the step.

`train.compile` is static shapes, and a graph break is an error:

    network  the whole network as one graph: the fastest, minutes to compile
    blocks   each residual and transformer block by itself: those of equal shape share their code, and FSDP can gather weights in between

Compiled in place: names of weights, checkpoints and exports do not change. Sampling and evaluation run without (`eager`): their
batches have other sizes, each of which would be compiled for a minute to be used for a second.
"""

import os
import sys
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from functools import cache, partial
from pathlib import Path
from typing import ParamSpec, TypeVar

import torch
from torch import nn

from diffusion.common.text import one_line
from diffusion.contracts.errors import InputError
from diffusion.cost.hardware import own_device
from diffusion.encoders.frozen_part import AttentionError, use_attention
from diffusion.recipe import AnyRecipe, RecipeError
from diffusion.recipe.rules import without_gpu

P = ParamSpec('P')
Result = TypeVar('Result')
BACKEND = 'inductor'
MAX_SHAPES = 1024  # of one piece of code: SD2's residual blocks have 14 shapes, and each aspect bucket has as many; Dynamo's own limit is 8
MAX_SAID = 300  # characters of what the compiler says

COMPILES_ON_GPU = 'under 3 minutes for Stable Diffusion 2 on an H200 with 16 cores, longer where other processes use the CPU'
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


eager: Callable[[], AbstractContextManager] = partial(torch.compiler.set_stance, 'force_eager')


def compile_network(network: nn.Module, mode: str, blocks: tuple[type[nn.Module], ...]) -> None:
    """Mark the network for compilation, which happens in its first forward pass.

    Args:
        mode: the recipe's `train.compile`.
        blocks: classes of what `blocks` compiles.

    Raises:
        RecipeError: `blocks`, and the network has none of them.
    """
    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = MAX_SHAPES
    # DDPOptimizer cuts graphs where DDP's buckets end, so that gradients are sent before the last is there; it cannot cut checkpointed ones
    # (pytorch#104674).
    torch._dynamo.config.optimize_ddp = not network.is_gradient_checkpointing
    modules = {'network': [network], 'blocks': [module for module in network.modules() if isinstance(module, blocks)]}[mode]
    if not modules:
        names = ', '.join(block.__name__ for block in blocks)
        raise RecipeError(
            'train.compile', [f'train.compile: blocks compiles nothing: {type(network).__name__} has no {names}; set train.compile=network or null']
        )
    for module in modules:
        module.compile(fullgraph=True, dynamic=False, backend=BACKEND)


def refuse_if_uncompiled(error: Exception, mode: str, run_folder: Path) -> None:
    """Judge an error of a compiled step. That of the compiler goes to the run folder, with its traceback: what there is to do is to train without.

    Args:
        mode: the recipe's `train.compile`.

    Raises:
        RecipeError: the compiler failed.
    """
    if not isinstance(error, torch._dynamo.exc.TorchDynamoException):
        return
    log = run_folder / 'compile-error.txt'
    with suppress(OSError):  # the message alone is enough to go on
        run_folder.mkdir(parents=True, exist_ok=True)
        log.write_text(''.join(traceback.format_exception(error)))
    said = f'{type(error).__name__}: {one_line(error).partition(" Set TORCHDYNAMO_VERBOSE")[0][:MAX_SAID]}'
    raise RecipeError(
        'train.compile',
        [f'train.compile: {mode} does not compile on this machine: {said}; set train.compile=null (the traceback is in {log})'],
    ) from error


def compiled(function: Callable[P, Result]) -> Callable[P, Result]:
    """The function as one graph: its pointwise operations become few kernels."""
    return torch.compile(function, fullgraph=True, dynamic=False, backend=BACKEND)
