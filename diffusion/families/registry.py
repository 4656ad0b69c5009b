"""Families by the name that a network's JSON gives. A new family is a file in this folder and a line in FAMILIES."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from diffusion.families.family import Family
from diffusion.families.networks import find_network
from diffusion.families.prx import Prx
from diffusion.families.sd2 import StableDiffusion2
from diffusion.recipe import Recipe, RecipeError

FAMILIES: dict[str, Family] = {'sd2': StableDiffusion2(), 'prx': Prx()}


def family_of(network: str) -> Family:
    """The family of a network by its name."""
    return FAMILIES[find_network(network).family]


def family_for(recipe: Recipe) -> Family:
    """The family of the recipe's network.

    Raises:
        RecipeError: the recipe trains it by another objective than the family has, or in a precision that it cannot take.
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
    return family


def build_network(name: str) -> Any:
    """A randomly initialised network; seed torch before to get the same one again."""
    return family_of(name).build(find_network(name).config)


@functools.lru_cache
def training_flops(name: str, latent_size: tuple[int, int], text_length: int) -> int:
    """FLOP of the network's forward and backward pass over latents of one (height, width), counted on the meta device (1 MAC = 2 FLOP).

    Counts convolutions, matrix products and attention; nothing flows back into latents or text.
    """
    family, config = family_of(name), find_network(name).config
    with torch.device('meta'):
        network = family.build(config)
        inputs = family.example(config, 1, latent_size, text_length)
        with FlopCounterMode(display=False) as counter:
            family.denoise(network, *inputs).sum().backward()
    return counter.get_total_flops()
