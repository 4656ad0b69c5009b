"""Optimizers by their section of the recipe: what each trains, how it is built, and the learning rate of each batch.

A new optimizer is a section next to MuonSettings in diffusion/recipe/techniques.py, which answers for its bytes and contradictions, a key of
`Optimizer` there, and an entry in OPTIMIZERS. As PyTorch's fused ones it must divide gradients by its attribute `grad_scale`, and leave all as it is
where its attribute `found_inf` is 1 (training/gradient_guard.py): both are None or () on the device.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from diffusion.families.adapters import trained_weights
from diffusion.recipe import AnyRecipe, Recipe
from diffusion.recipe.techniques import AdamWSettings, MuonSettings, Optimizer, OptimizerSettings, optimizer_of
from diffusion.training.muon import Muon

COOLDOWN_SHARE = 0.2  # of the run; arXiv 2405.18392, section 4: from 10 to 20 % on as good as a cosine

Groups = list[dict[str, Any]]


def parameter_groups(recipe: Recipe, model: Any) -> Groups:
    """Trained weights: the network, what methods add, and the adapters of text encoders with a rate and a weight decay of their own.

    An optimizer that treats matrices by themselves has those of the network first, in groups whose `stacked` is the number of them in each weight.
    """
    settings, adapter = recipe.optimizer, recipe.adapter
    weights = list(trained_weights(model.network).values())
    network = {'params': weights, 'lr': settings.lr, 'weight_decay': settings.weight_decay}
    groups = [network]
    if optimizer_of(recipe).trains_matrices:
        matrices: dict[Tensor, int] = model.family.matrices(model.network)
        by_stack = {number: [weight for weight, stacked in matrices.items() if stacked == number] for number in sorted(set(matrices.values()))}
        others = [weight for weight in weights if weight not in matrices]
        groups = [*({**network, 'params': params, 'stacked': number} for number, params in by_stack.items()), {**network, 'params': others}]
    added = [weight for method in model.methods.values() for weight in method.parameters()]
    if added:
        groups.append({'params': added, 'lr': settings.lr, 'weight_decay': 0.0})  # what they have to be is nowhere near zero
    if adapter is not None and adapter.text_encoders:
        decay = settings.weight_decay if adapter.text_weight_decay is None else adapter.text_weight_decay
        groups.append({'params': list(trained_weights(model.text_encoders).values()), 'lr': adapter.text_lr, 'weight_decay': decay})
    return groups


OPTIMIZERS: dict[type[OptimizerSettings], Callable[[Optimizer, Any, Groups], torch.optim.Optimizer]] = {
    AdamWSettings: lambda settings, _, groups: torch.optim.AdamW(groups, betas=settings.betas, eps=settings.eps, fused=True),
    MuonSettings: lambda settings, muon, groups: Muon(groups, settings.betas, settings.eps, muon.momentum, muon.steps),
}


def build_optimizer(recipe: AnyRecipe, groups: Groups) -> torch.optim.Optimizer:
    chosen = optimizer_of(recipe)
    return OPTIMIZERS[type(chosen)](recipe.optimizer, chosen, groups)


def build_scheduler(optimizer: torch.optim.Optimizer, settings: Optimizer, batches: int) -> LambdaLR:
    """The learning rates of a run of `batches`, to be stepped after each."""
    warmup = settings.warmup.batches

    def factor(batch: int) -> float:  # a plain function, which PyTorch leaves out of the checkpoint
        return lr_factor(batch, warmup, batches, settings.decay)

    return LambdaLR(optimizer, factor)


def lr_factor(batch: int, warmup: int, total: int, decay: str) -> float:
    """Share of `optimizer.lr` that a batch is trained with.

    Args:
        batch: its number, from 0.
        warmup: batches of linear warm-up: the first gets 1 / warmup, the last gets 1.
        total: batches of the run; `constant` does not depend on it.
        decay: after the warm-up: `constant`; `cosine`: half a cosine, which would be 0 in batch `total`; `cooldown`: constant, and in the last
            fifth of the run 1 - sqrt(share of it that is over) (arXiv 2405.18392, equation 1).
    """
    if batch < warmup:
        return (batch + 1) / warmup
    if decay == 'cosine':
        return 0.5 * (1 + math.cos(math.pi * _share_over(batch, warmup, total)))
    if decay == 'cooldown':
        return 1 - math.sqrt(_share_over(batch, max(warmup, total - round(COOLDOWN_SHARE * total)), total))
    return 1.0


def _share_over(batch: int, begin: int, end: int) -> float:
    """Share of [begin, end) that lies before `batch`, 0..1."""
    return min(max(batch - begin, 0) / max(end - begin, 1), 1.0)
