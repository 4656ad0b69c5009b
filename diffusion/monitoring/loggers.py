"""Loggers besides log.jsonl: Composer's own, by the names that `log.to` has for them. A new one is an entry in LOGGERS.

They get the metrics that are worth writing, and sample grids; never checkpoints, the source code or the environment. Nothing here imports torch
before a logger is built, so that a recipe that names a logger can be checked without it.
"""

from __future__ import annotations

import atexit
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diffusion.common.files import write_text
from diffusion.recipe.catalog import LOGGERS

if TYPE_CHECKING:
    from composer.core import State
    from composer.loggers import Logger, LoggerDestination

    from diffusion.recipe import AnyRecipe


def build(name: str, recipe: AnyRecipe, run_folder: Path) -> LoggerDestination:
    """Build a logger that writes what is worth writing."""
    import composer.loggers

    from diffusion.monitoring import wandb_start
    from diffusion.monitoring.metrics import worth_writing

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
                    run = wandb_start.start(self._init_kwargs)
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
