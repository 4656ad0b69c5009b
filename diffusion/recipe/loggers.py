"""The loggers that `log.to` may name, each with what it needs from a recipe. A new one is an entry in LOGGERS; monitoring/loggers.py builds them."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from diffusion.recipe.autoencoder import AnyRecipe


@dataclass(frozen=True)
class Known:
    """One of Composer's loggers.

    Args:
        composer_class: its name in composer.loggers.
        package: what it imports.
        extra: of setup.py, which installs that; None: it comes with the rest.
        has_projects: it needs `log.project`.
        arguments: of its constructor, from the recipe, its run folder, and an id that stays the same however often the run resumes.
    """

    composer_class: str
    package: str
    extra: str | None
    has_projects: bool
    arguments: Callable[[AnyRecipe, Path, str], dict[str, Any]]


def _wandb(recipe: AnyRecipe, run_folder: Path, run_id: str) -> dict[str, Any]:
    from diffusion.recipe import to_dict

    # A remote's URL may hold a token, a changed file anything; environment.json has the commit.
    # quiet: no table of last values at the end, which the report has.
    settings = {'disable_git': True, 'disable_code': True, 'quiet': True}
    init = {'config': to_dict(recipe), 'dir': str(run_folder), 'resume': 'allow', 'settings': settings, 'id': run_id}
    init['group'] = os.environ.get('WANDB_RUN_GROUP', recipe.name)  # with the grids of diffusion.watch, which are a run of their own
    return {'project': recipe.log.project, 'name': recipe.name, 'init_kwargs': init}


def _tensorboard(recipe: AnyRecipe, run_folder: Path, _: str) -> dict[str, Any]:
    return {'log_dir': str(run_folder / 'tensorboard'), 'flush_interval': recipe.log.every}


def _mlflow(recipe: AnyRecipe, run_folder: Path, _: str) -> dict[str, Any]:
    tracking_uri = os.environ.get('MLFLOW_TRACKING_URI') or str(run_folder.resolve() / 'mlruns')
    return {
        'experiment_name': recipe.log.project, 'run_name': recipe.name, 'tracking_uri': tracking_uri, 'resume': True, 'log_system_metrics': False
    }  # fmt: skip


def _comet(recipe: AnyRecipe, _: Path, __: str) -> dict[str, Any]:
    return {'project_name': recipe.log.project, 'name': recipe.name, 'exp_kwargs': {'log_env_details': False, 'log_git_metadata': False}}


LOGGERS = {
    'wandb': Known('WandBLogger', 'wandb', None, True, _wandb),
    'tensorboard': Known('TensorboardLogger', 'tensorboard', 'tensorboard', False, _tensorboard),
    'mlflow': Known('MLFlowLogger', 'mlflow', 'mlflow', True, _mlflow),
    'comet': Known('CometMLLogger', 'comet_ml', 'comet', True, _comet),
}


def is_installed(name: str) -> bool:
    return find_spec(LOGGERS[name].package) is not None
