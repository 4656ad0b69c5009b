"""Which attention a recipe's network computes, and by which kernels on this machine."""

from collections.abc import Sequence

import torch

from diffusion.encoders.frozen_part import KERNELS, AttentionError
from diffusion.families.networks import find_network
from diffusion.families.registry import family_of
from diffusion.recipe import Recipe
from diffusion.recipe.rules import PIXELS_PER_LATENT, TEXT_LENGTH


def shapes(recipe: Recipe) -> list[tuple[int, int, int]]:
    """(queries, keys, width of a head) of every attention of the recipe's network, over latents of its square resolution."""
    name = recipe.model.network
    return family_of(name).attention(find_network(name).config, recipe.data.resolution // PIXELS_PER_LATENT, TEXT_LENGTH)


def kernels_in_use(recipe: Recipe) -> str:
    """Names of the kernels that PyTorch picks for the recipe's network.

    Raises:
        AttentionError: as `kernels_for`.
    """
    return kernels_for(shapes(recipe), recipe.train.precision, family_of(recipe.model.network).masks_text)


def kernels_for(shapes: Sequence[tuple[int, int, int]], precision: str, masked: bool = False) -> str:
    """Names of the kernels that PyTorch picks, among those switched on, in a training step on this machine: mostly one, or several with a comma.

    Args:
        shapes: (queries, keys, width of a head) of every attention.
        precision: the recipe's `train.precision`.
        masked: it has a mask.

    Raises:
        AttentionError: none of them can compute one of the `shapes`.
    """
    device = 'cuda' if torch.cuda.is_available() else 'cpu'
    dtype = torch.float32 if precision == 'fp32' else torch.bfloat16
    names = {backend.value: name for name, (backend, _) in KERNELS.items()}
    chosen = set()
    for queries, keys, width in shapes:
        query, key = (torch.zeros(1, 1, tokens, width, device=device, dtype=dtype, requires_grad=True) for tokens in (queries, keys))
        try:
            mask = torch.ones(1, 1, 1, keys, dtype=torch.bool, device=device) if masked else None
            chosen.add(names[torch._fused_sdp_choice(query, key, key, mask)])
        except RuntimeError as error:
            raise AttentionError(
                f'cannot compute attention of {queries} to {keys} tokens in {precision} with heads of {width} on the {device}: {error}'
            ) from error
    return ', '.join(sorted(chosen))
