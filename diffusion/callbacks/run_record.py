"""What the run was: its resolved recipe beside everything it writes, and inside each checkpoint."""

from __future__ import annotations

import json
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

from composer.core import Callback, State
from composer.loggers import Logger
from composer.utils import dist

from diffusion.hardware import device_name

PACKAGES = ('torch', 'mosaicml', 'mosaicml-streaming', 'diffusers', 'transformers')


def commit() -> str | None:
    """The commit of this checkout, `-dirty` if files differ from it; None outside a git checkout."""
    folder = Path(__file__).parent
    try:
        found = subprocess.run(['git', 'describe', '--always', '--dirty', '--abbrev=12'], cwd=folder, capture_output=True, text=True, check=True)  # noqa: S607
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.stdout.strip()


class RunRecord(Callback):
    """Writes `recipe.yaml` and `environment.json` to the run folder and gives each checkpoint the recipe.

    Args:
        recipe: the resolved recipe as YAML.
        folder: the run folder.
    """

    def __init__(self, recipe: str, folder: Path):
        self.recipe, self.folder = recipe, folder

    def fit_start(self, state: State, logger: Logger) -> None:
        if dist.get_global_rank() == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / 'recipe.yaml').write_text(self.recipe)
            environment: dict[str, Any] = {
                'device': device_name(),
                'num_gpus': dist.get_world_size(),
                'commit': commit(),
                'python': platform.python_version(),
                **{package: version(package) for package in PACKAGES},
            }
            (self.folder / 'environment.json').write_text(json.dumps(environment, indent=1) + '\n')

    def state_dict(self) -> dict[str, Any]:
        return {'recipe': self.recipe}
