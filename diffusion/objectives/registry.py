"""Objectives by the name of their section in the recipe's `model`. A new one is a section in recipe/schema.py and a line here."""

from collections.abc import Callable
from typing import Any

from diffusion.objectives.diffusion import Diffusion
from diffusion.objectives.flow import Flow
from diffusion.objectives.objective import Objective
from diffusion.recipe.schema import Model

OBJECTIVES: dict[str, Callable[[Any], Objective]] = {'diffusion': Diffusion, 'flow': Flow}


def build_objective(model: Model) -> Objective:
    """The one whose section is not null, which the recipe's rules have made sure of."""
    return next(build(getattr(model, name)) for name, build in OBJECTIVES.items() if getattr(model, name) is not None)
