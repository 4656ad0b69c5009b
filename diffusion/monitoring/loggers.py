"""Loggers besides log.jsonl: Composer's own, by the names that `log.to` has for them. A new one is an entry in LOGGERS.

They get the metrics that are worth writing, and sample grids; never checkpoints, the source code or the environment. Nothing here imports torch
before a logger is built, so that a recipe that names a logger can be checked without it.
"""

from __future__ import annotations

import atexit
import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diffusion.common.files import write_text
from diffusion.common.text import print_message
from diffusion.recipe import RecipeError
from diffusion.recipe.catalog import LOGGERS

if TYPE_CHECKING:
    from composer.core import State
    from composer.loggers import Logger, LoggerDestination
    from wandb import Run

    from diffusion.recipe import AnyRecipe

WANDB_TIMEOUT = 'WANDB_INIT_TIMEOUT'
WANDB_ANSWER_SEC = 60.0  # W&B's own default is 90, and it retries silently


def build(name: str, recipe: AnyRecipe, run_folder: Path) -> LoggerDestination:
    """Build a logger that writes what is worth writing."""
    import composer.loggers

    from diffusion.monitoring.records import worth_writing

    known = LOGGERS[name]
    base: Any = getattr(composer.loggers, known.composer_class)

    class Selective(base):
        """Composer's logger, with `log.every` and without metrics that log.jsonl leaves out too."""

        def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
            for batch, kept in worth_writing(metrics, step or 0, recipe.log.every).items():
                super().log_metrics(kept, batch)

        if name == 'wandb':
            in_checkpoint: dict[str, Any] = {}

            def state_dict(self) -> dict[str, Any]:
                """Name the W&B run, for those who find the checkpoint on another machine (`diffusion.watch`)."""
                return self.in_checkpoint

            def init(self, state: State, logger: Logger) -> None:
                """Start W&B here: Composer would ask for an address that an offline run does not have, by a deprecated method."""
                if self._enabled:
                    run = start_wandb(self._init_kwargs)
                    self.in_checkpoint = {'entity': run.entity or None, 'project': run.project, 'group': run.group, 'id': run.id}
                    self.run_dir, self.run_url = run.dir, None if run.offline else run.url
                    atexit.register(self._set_is_in_atexit)

        if name == 'tensorboard':
            writer: Any

            def _flush(self, _: Any) -> None:
                """Flush only: Composer closes the file each time, and the next metric begins another: thousands of files in a long run."""
                if self.writer is not None:
                    self.writer.flush()

            def close(self, *_: Any) -> None:
                if self.writer is not None:
                    self.writer.close()
                    self.writer = None

    Selective.__qualname__ = known.composer_class  # by which Composer keeps its state in checkpoints
    return Selective(**known.arguments(recipe, run_folder, _run_id(name, run_folder)))


def _run_id(name: str, run_folder: Path) -> str:
    """Return the id of the run; the first rank, which is the only one that logs, makes it once."""
    from composer.utils import dist

    remembered = run_folder / f'{name}_id.txt'
    if dist.get_global_rank() == 0 and not remembered.exists():
        write_text(remembered, uuid.uuid4().hex[:12])
    return remembered.read_text() if remembered.exists() else ''


def start_wandb(init: Mapping[str, Any]) -> Run:
    """Start a W&B run without questions and print its address: wait a minute at most, and log offline if the server does not answer.

    Args:
        init: arguments of wandb.init.

    Raises:
        RecipeError: W&B knows no credentials, or refuses them.
    """
    import wandb
    from wandb.errors import AuthenticationError, CommError, UsageError

    # Without hints and headers, for which this has a line, and without the questions at a terminal, for whose answer all GPUs would wait.
    quiet = wandb.Settings(show_info=False)  # warnings and errors stay
    settings = wandb.setup(quiet).settings
    mode = settings.mode
    if mode not in ('offline', 'dryrun', 'disabled'):
        seconds = float(os.environ.get(WANDB_TIMEOUT, WANDB_ANSWER_SEC))
        print_message(f'W&B: connecting to {settings.base_url}, for {seconds:g} s at most')
        try:
            run = wandb.init(**{**init, 'settings': {**init.get('settings', {}), 'init_timeout': seconds}})
            print_message(f'W&B: {run.url or "connected"}')
            return run
        except (AuthenticationError, UsageError) as error:
            remedy = 'Set WANDB_API_KEY, or WANDB_MODE=offline, or leave wandb out of log.to'
            raise RecipeError(str(init.get('name')), [f'log.to: wandb: {error} {remedy}']) from error
        except CommError as error:
            print_message(f'W&B: its server cannot be used: {error}')
        wandb.teardown()  # or the number of the run would still be in use
        wandb.setup(quiet)
        mode = 'offline'
    # Offline nothing is known that could be resumed, and W&B would warn of it.
    run = wandb.init(**{**{name: value for name, value in init.items() if name != 'resume'}, 'mode': mode})
    if mode != 'disabled':
        print_message(f'W&B: offline; to upload: wandb sync {Path(run.dir).parent}')
    return run
