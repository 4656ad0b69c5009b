"""The record of a run: its resolved recipe and environment, next to everything it writes and inside each checkpoint."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from composer.core import Callback, State
from composer.loggers import Logger
from composer.utils import dist

from diffusion.common.environment import environment
from diffusion.common.files import write_text
from diffusion.cost.hardware import device_name
from diffusion.cost.prices import Price
from diffusion.recipe import AnyRecipe, to_yaml


class RunRecord(Callback):
    """Write `recipe.yaml` and `environment.json` to the run folder and put the recipe into each checkpoint.

    Args:
        recipe: the resolved recipe.
        folder: the run folder.
        price: of a GPU-hour, kept for the report, which must not change with the list of prices.
        encoders: SHA-256 of the frozen encoders' weights, by name.
        attention: kernels that compute the network's attention here.
    """

    def __init__(self, recipe: AnyRecipe, folder: Path, price: Price | None, encoders: Mapping[str, str], attention: str):
        self.recipe, self.folder, self.price, self.encoders, self.attention = recipe, folder, price, dict(encoders), attention

    def after_load(self, state: State, logger: Logger) -> None:
        """Write the recipe; also that of a finished run, which does not train again, if its copy was damaged."""
        if dist.get_global_rank() == 0:
            write_text(self.folder / 'recipe.yaml', to_yaml(self.recipe))

    def fit_start(self, state: State, logger: Logger) -> None:
        if dist.get_global_rank() == 0:
            record: dict[str, Any] = {
                **environment(),
                'device': device_name(),
                'num_gpus': dist.get_world_size(),
                'attention': self.attention,
                'micro_batch': state.device_train_microbatch_size,
                'price': dataclasses.asdict(self.price) if self.price is not None else None,
                'encoders': self.encoders,
            }
            write_text(self.folder / 'environment.json', json.dumps(record, indent=1) + '\n')

    def state_dict(self) -> dict[str, Any]:
        return {'recipe': to_yaml(self.recipe)}


class DrawingRecord(Callback):
    """Keep in checkpoints how the model that a run began from is drawn with (`DrawingSettings.zeros_for_empty`): that model may be gone by then.

    Without zeros there is no state, as in checkpoints of earlier versions, which a run resumes from.
    """

    zeros_for_empty = False

    def after_load(self, state: State, logger: Logger) -> None:
        model: Any = getattr(state.model, 'module', state.model)
        model.zeros_for_empty = self.zeros_for_empty = self.zeros_for_empty or getattr(model, 'zeros_for_empty', False)

    def state_dict(self) -> dict[str, Any]:
        return {'zeros_for_empty': True} if self.zeros_for_empty else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.zeros_for_empty = state.get('zeros_for_empty', False)
