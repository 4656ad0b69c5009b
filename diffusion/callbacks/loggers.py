"""Where metrics go besides log.jsonl: Composer's own loggers, by the names that `log.to` has for them. A new one is an entry in LOGGERS.

They get the metrics that are worth writing, and sample grids; never checkpoints, the source code or the environment. Nothing here imports torch
before a logger is built, so that a recipe that names a logger can be checked without it.
"""

from __future__ import annotations

import atexit
import os
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diffusion.files import replacing

if TYPE_CHECKING:
    from composer.core import State
    from composer.loggers import Logger, LoggerDestination

    from diffusion.recipe.schema import Recipe


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
    arguments: Callable[[Recipe, Path, str], dict[str, Any]]


def _wandb(recipe: Recipe, run_folder: Path, run_id: str) -> dict[str, Any]:
    from diffusion.recipe import to_dict

    # A remote's URL may hold a token, a changed file anything; environment.json has the commit.
    # quiet: no table of last values at the end, which the report has.
    settings = {'disable_git': True, 'disable_code': True, 'quiet': True}
    init = {'config': to_dict(recipe), 'dir': str(run_folder), 'resume': 'allow', 'settings': settings, 'id': run_id}
    return {'project': recipe.log.project, 'name': recipe.name, 'init_kwargs': init}


def _tensorboard(recipe: Recipe, run_folder: Path, _: str) -> dict[str, Any]:
    return {'log_dir': str(run_folder / 'tensorboard'), 'flush_interval': recipe.log.every}


def _mlflow(recipe: Recipe, run_folder: Path, _: str) -> dict[str, Any]:
    tracking_uri = os.environ.get('MLFLOW_TRACKING_URI') or str(run_folder.resolve() / 'mlruns')
    return {
        'experiment_name': recipe.log.project, 'run_name': recipe.name, 'tracking_uri': tracking_uri, 'resume': True, 'log_system_metrics': False
    }  # fmt: skip


def _comet(recipe: Recipe, _: Path, __: str) -> dict[str, Any]:
    return {'project_name': recipe.log.project, 'name': recipe.name, 'exp_kwargs': {'log_env_details': False, 'log_git_metadata': False}}


def _neptune(recipe: Recipe, _: Path, run_id: str) -> dict[str, Any]:
    # The same custom id leads back to the same run.
    return {'project': recipe.log.project, 'name': recipe.name, 'custom_run_id': run_id, 'source_files': [], 'git_ref': False}


LOGGERS = {
    'wandb': Known('WandBLogger', 'wandb', None, True, _wandb),
    'tensorboard': Known('TensorboardLogger', 'tensorboard', 'tensorboard', False, _tensorboard),
    'mlflow': Known('MLFlowLogger', 'mlflow', 'mlflow', True, _mlflow),
    'comet': Known('CometMLLogger', 'comet_ml', 'comet', True, _comet),
    'neptune': Known('NeptuneLogger', 'neptune', 'neptune', True, _neptune),
}


def is_installed(name: str) -> bool:
    return find_spec(LOGGERS[name].package) is not None


def build(name: str, recipe: Recipe, run_folder: Path) -> LoggerDestination:
    """The logger, which writes what is worth writing."""
    import composer.loggers

    from diffusion.callbacks import wandb_start
    from diffusion.callbacks.metrics import worth_writing

    known = LOGGERS[name]
    base: Any = getattr(composer.loggers, known.composer_class)

    class Selective(base):
        """Composer's logger, with `log.every` and without what log.jsonl does not have either."""

        def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
            for batch, kept in worth_writing(metrics, step or 0, recipe.log.every).items():
                super().log_metrics(kept, batch)

        if name == 'wandb':

            def init(self, state: State, logger: Logger) -> None:
                """Composer's asks W&B for an address that an offline run has not, and by a method that W&B warns of."""
                if self._enabled:
                    run = wandb_start.start(self._init_kwargs)
                    self.run_dir, self.run_url = run.dir, None if run.offline else run.url
                    atexit.register(self._set_is_in_atexit)

        if name == 'tensorboard':
            writer: Any

            def _flush(self, _: Any) -> None:
                """Composer's closes the file each time, and the next metric begins another: thousands of files in a long run."""
                if self.writer is not None:
                    self.writer.flush()

            def close(self, *_: Any) -> None:
                if self.writer is not None:
                    self.writer.close()
                    self.writer = None

    return Selective(**known.arguments(recipe, run_folder, _run_id(name, run_folder)))


def _run_id(name: str, run_folder: Path) -> str:
    """Made once a run, by the first rank, which is the only one that logs."""
    from composer.utils import dist

    remembered = run_folder / f'{name}_id.txt'
    if dist.get_global_rank() == 0 and not remembered.exists():
        with replacing(remembered) as temporary:
            temporary.write_text(uuid.uuid4().hex[:12])
    return remembered.read_text() if remembered.exists() else ''
