"""What this machine can do for a recipe: asked before photos, drawn images and data are prepared."""

from __future__ import annotations

from collections.abc import Callable

import torch

from diffusion.cost.hardware import gpu_without_kernels
from diffusion.encoders.attention import AttentionError, use_attention
from diffusion.recipe import AnyRecipe, RecipeError


def fit_machine(recipe: AnyRecipe, kernels: Callable[[], str]) -> str:
    """Switch on the kernels of convolutions and attention that the recipe asks for, and return the names of the latter.

    Args:
        kernels: names those that compute the network's attention here; raises AttentionError.

    Raises:
        RecipeError: everything in the recipe that this machine cannot do, in its `errors`.
    """
    train, errors, chosen = recipe.train, [], ''
    if not torch.cuda.is_available():
        if train.precision != 'fp32':
            errors.append(f'train.precision: {train.precision} needs a GPU, and this machine has none; try train.precision=fp32')
        if train.cudnn_benchmark:
            errors.append('train.cudnn_benchmark: needs a GPU, and this machine has none; leave it out')
    elif lacking := gpu_without_kernels():
        raise RecipeError(recipe.name, [lacking])  # nothing else can be asked of it
    torch.backends.cudnn.benchmark = train.cudnn_benchmark
    try:
        use_attention(train.attention)
        chosen = kernels()
    except AttentionError as error:
        errors.append(f'train.attention: {train.attention} {error}; set train.attention=auto')
    if errors:
        raise RecipeError(recipe.name, errors)
    return chosen
