"""`torch.compile` of the network, by the recipe's `train.compile`: static shapes, and a graph break is an error.

    network  the whole network as one graph: the fastest, minutes to compile
    blocks   each residual and transformer block by itself: those of equal shape share their code, and FSDP can gather weights in between

Compiled in place: names of weights, checkpoints and exports do not change. Sampling and evaluation run without (`eager`): their
batches have other sizes, each of which would be compiled for a minute to be used for a second.
"""

import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from functools import partial
from pathlib import Path
from typing import ParamSpec, TypeVar

import torch
from torch import nn

from diffusion.common.text import one_line
from diffusion.recipe import RecipeError

P = ParamSpec('P')
Result = TypeVar('Result')

BACKEND = 'inductor'
MAX_SHAPES = 1024  # of one piece of code: SD2's residual blocks have 14 shapes, and each aspect bucket has as many; Dynamo's own limit is 8
MAX_SAID = 300  # characters of what the compiler says

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
