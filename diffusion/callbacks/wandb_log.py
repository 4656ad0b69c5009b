"""Weights & Biases, for metrics, sample grids and the recipe; never for checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from composer.loggers import WandBLogger

from diffusion.recipe import Recipe, to_dict


class WandBLog(WandBLogger):
    """Composer's logger, with the resolved recipe as the run's config."""

    def __init__(self, recipe: Recipe, run_folder: Path):
        run_folder.mkdir(parents=True, exist_ok=True)
        super().__init__(project=recipe.log.wandb, name=recipe.name, init_kwargs={'config': to_dict(recipe), 'dir': str(run_folder)})

    def download_file(self, remote_file_name: str, *args: Any, **kwargs: Any) -> None:
        """Composer's autoresume asks every logger for a checkpoint; W&B would ask for an API key, which offline runs have none of."""
        raise FileNotFoundError(f'{remote_file_name}: checkpoints are not kept in W&B')
