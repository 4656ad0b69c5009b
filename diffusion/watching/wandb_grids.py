"""Sample grids in Weights & Biases, next to the run that is watched.

W&B lets several processes write to one run in its experimental shared mode alone (0.28): all of them must be in it, the training process too, whose
metrics would then lose their batch (`step` is ignored), and offline there is no such mode. Two ordinary clients of one run overwrite each other's
history. So the grids are a run of their own, `NAME-watch`, in the group of the run that is watched, with an id made of its id: a later process
continues it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from diffusion.monitoring import wandb_start
from diffusion.recipe import Recipe

if TYPE_CHECKING:
    from wandb import Run

LOGGER = 'WandBLogger'  # by its name the checkpoint has the state of the run's own logger, which monitoring/loggers.py writes


def watched_run(state: dict[str, Any]) -> dict[str, Any] | None:
    """`entity`, `project`, `group` and `id` of the W&B run that a checkpoint names; None if it names none."""
    named = state.get('callbacks', {}).get(LOGGER)
    return named if isinstance(named, dict) and named.get('id') else None


def start(recipe: Recipe, watched: dict[str, Any], folder: Path | None) -> Run:
    """Start the run of the grids, or continue it.

    Args:
        folder: for W&B's local files; None leaves it to W&B (the current folder, or WANDB_DIR).

    Raises:
        RecipeError: W&B knows no credentials, or refuses them.
    """
    init = {
        **{name: watched[name] for name in ('entity', 'project', 'group')},
        'id': f'{watched["id"]}-watch',
        'name': f'{recipe.name}-watch',
        'job_type': 'watch',
        'config': {'watched_run': watched['id']},
        'resume': 'allow',
        'settings': {'disable_git': True, 'disable_code': True, 'quiet': True},
        **({} if folder is None else {'dir': str(folder)}),
    }
    return wandb_start.start(init)
