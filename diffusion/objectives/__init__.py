"""Objectives: what a network is trained to predict, from what, and how images are sampled from it. Functions of tensors.

A new objective is a section in recipe/schema.py, a file here, and a line in OBJECTIVES.
"""

from collections.abc import Callable
from typing import Any

from diffusion.objectives.diffusion import Diffusion
from diffusion.objectives.flow import Flow
from diffusion.objectives.objective import Objective
from diffusion.recipe.schema import Model

OBJECTIVES: dict[str, Callable[[Any], Objective]] = {'diffusion': Diffusion, 'flow': Flow}
"""Classes by the name of their section in the recipe's `model`."""


def build_objective(model: Model) -> Objective:
    """The one whose section is not null, which the recipe's rules have made sure of."""
    return next(build(getattr(model, name)) for name, build in OBJECTIVES.items() if getattr(model, name) is not None)
