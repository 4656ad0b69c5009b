"""Families by the name that a network's JSON gives, and what is asked of a network by its name: FLOP, methods, kernels of attention.

A new family is a file in this folder and a line in FAMILIES.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from diffusion.encoders.frozen_part import KERNELS, AttentionError
from diffusion.families.adapters import add_adapter, let_gradients_reach
from diffusion.families.family import Config, Family
from diffusion.families.flux2 import Flux2Klein
from diffusion.families.networks import find_network
from diffusion.families.prx import Prx
from diffusion.families.sd2 import StableDiffusion2
from diffusion.families.sd3 import StableDiffusion3
from diffusion.families.sdxl import StableDiffusionXL
from diffusion.families.z_image import ZImage
from diffusion.methods.method import MethodContext, Target, TrainingMethod, attach
from diffusion.recipe import Recipe, RecipeError
from diffusion.recipe.rules import PIXELS_PER_LATENT, TEXT_LENGTH
from diffusion.recipe.schema import Adapter
from diffusion.recipe.techniques import Methods, switched_on

NO_METHODS = Methods()
FAMILIES: dict[str, Family] = {
    'sd2': StableDiffusion2(),
    'sdxl': StableDiffusionXL(),
    'sd3': StableDiffusion3(),
    'flux2': Flux2Klein(),
    'z-image': ZImage(),
    'prx': Prx(),
}


def family_of(network: str) -> Family:
    """The family of a network by its name."""
    return FAMILIES[find_network(network).family]


def family_for(recipe: Recipe) -> Family:
    """The family of the recipe's network.

    Raises:
        RecipeError: the recipe trains it by another objective than the family has, in a precision that it cannot take, or with a method that works
            on tokens, which this family has not or does not name (`token_arguments`).
    """
    name = recipe.model.network
    family = family_of(name)
    if getattr(recipe.model, family.objective) is None:
        raise RecipeError(
            recipe.name,
            [f'model.{family.objective}: is null, and the network {name} is trained by it; fill it in and set the other objective to null'],
        )
    if recipe.train.precision == 'bf16' and not family.takes_bf16:
        error = f'train.precision: bf16 would round the times that {name} is given to 8 bits; set train.precision=amp_bf16'
        raise RecipeError(recipe.name, [error])
    for key, settings in switched_on(recipe.methods).items():
        if settings.blocks() and not family.token_arguments:
            able = ', '.join(kind for kind, each in FAMILIES.items() if each.token_arguments)
            raise RecipeError(
                recipe.name,
                [f'methods.{key}: works on the tokens of {able}, and {name} is a network of {find_network(name).family}; set methods.{key}=null'],
            )
    return family


def build_network(name: str) -> Any:
    """A randomly initialised network; seed torch before to get the same one again."""
    return family_of(name).build(find_network(name).config)


@functools.lru_cache
def training_flops(name: str, latent_size: tuple[int, int], text_length: int, adapter: Adapter | None = None, methods: Methods = NO_METHODS) -> int:
    """FLOP of the network's forward and backward pass over latents of one (height, width), counted on the meta device (1 MAC = 2 FLOP).

    Counts convolutions, matrix products and attention; nothing flows back into latents or text, unless text encoders have adapters too. With an
    adapter frozen layers have no gradients of their weights, about a third of the whole. Methods count with what they add or leave out: tokens that
    skip blocks, and both networks of an alignment.

    Raises:
        RecipeError: a method does not fit the network.
    """
    family, config = family_of(name), find_network(name).config
    with torch.device('meta'):
        network = family.build(config)
        inputs = family.example(config, 1, latent_size, text_length)
        if adapter is not None:
            add_adapter(network, adapter, family.adapter_targets[adapter.targets], seed=0)
            let_gradients_reach(inputs[2], adapter)
        attached = attach_methods(methods, family, config, network, end=1.0, target=lambda *_: inputs[0], seed=0).values()
        for method in attached:
            method.begin({'tokens': {}, 'sample_key': torch.zeros(1, 3, dtype=torch.int64)})
        with FlopCounterMode(display=False) as counter:
            family.denoise(network, *inputs).sum().backward()
    return counter.get_total_flops() + sum(method.flops(latent_size) for method in attached)


def attach_methods(
    methods: Methods, family: Family, config: Config, network: Any, end: float, target: Target, seed: int
) -> dict[str, TrainingMethod]:
    """The methods of a recipe by name, hooked to a network of the family; `end`, `target`, `seed`: see MethodContext.

    Raises:
        RecipeError: a method does not fit the network, or its feature network cannot be read.
    """
    tokens = family.token_blocks(network), family.token_arguments, family.token_width(config), family.patch(config)
    return attach(methods, MethodContext(*tokens, end, target, seed))


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
