"""Weights & Biases, for metrics, sample grids and the recipe; never for checkpoints."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

from composer.loggers import WandBLogger
from composer.utils import dist

from diffusion.callbacks.metrics import worth_writing
from diffusion.files import replacing
from diffusion.recipe import Recipe, to_dict

# A remote's URL may hold a token, a changed file anything; environment.json has the commit.
NOT_SENT = {'disable_git': True, 'disable_code': True}


class WandBLog(WandBLogger):
    """Composer's logger with the resolved recipe as the run's config, `log.every`, and one W&B run however often it resumes."""

    def __init__(self, recipe: Recipe, run_folder: Path):
        self.every = recipe.log.every
        init: dict[str, Any] = {'config': to_dict(recipe), 'dir': str(run_folder), 'resume': 'allow', 'settings': NOT_SENT}
        if dist.get_global_rank() == 0:  # the only rank that logs
            remembered = run_folder / 'wandb_id.txt'
            if not remembered.exists():
                with replacing(remembered) as temporary:
                    temporary.write_text(uuid.uuid4().hex[:12])
            init['id'] = remembered.read_text()
        super().__init__(project=recipe.log.wandb, name=recipe.name, init_kwargs=init)

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        for batch, kept in worth_writing(metrics, step or 0, self.every).items():
            super().log_metrics(kept, batch)
