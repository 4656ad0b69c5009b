"""Records that a run keeps of itself: log.jsonl, its resolved recipe and environment, and what its checkpoints say of it."""

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from composer.core import Callback, State
from composer.loggers import Logger, LoggerDestination
from composer.utils import dist

from diffusion.common.collective import unwrap_model
from diffusion.common.environment import environment
from diffusion.common.files import append_json_line, open_to_append, write_text
from diffusion.cost.hardware import device_name
from diffusion.cost.prices import Price
from diffusion.recipe import AnyRecipe, to_yaml

# Logged before Composer counts the batch, and written every `log.every` batches; the rest is logged after, and written when it comes.
BEFORE_THE_COUNT = ('loss/train/', 'grad_norm', 'lr-')
# Composer's own counters and settings, which say what the batch number and the recipe say.
REPEATED = ('time/', 'trainer/')
OUR_TIMES = ('time/elapsed_hours', 'time/remaining_hours')


def worth_writing(metrics: Mapping[str, Any], step: int, every: int) -> dict[int, dict[str, Any]]:
    """Return the metrics to keep, by the number of finished batches that they describe. The local log and all other loggers ask here."""
    kept: dict[int, dict[str, Any]] = {}
    for name, value in metrics.items():
        batch = step + 1 if name.startswith(BEFORE_THE_COUNT) else step
        repeated = name.startswith(REPEATED) and name not in OUR_TIMES
        between = name.startswith(BEFORE_THE_COUNT) and batch % every != 0
        if not repeated and not between:
            kept.setdefault(batch, {})[name] = value
    return kept


class JsonlLog(LoggerDestination):
    """Append `{"batch": 120, "loss/train/total": 0.31, ...}` on rank 0; metrics of the same batch share a line.

    Training metrics are written every `every` batches, everything else (evaluation, throughput) when it comes. What is not
    finite becomes null. After a resume some batches appear twice: the later line is the one that counts.
    """

    def __init__(self, path: Path, every: int):
        self.path, self.every = path, every
        self.pending: dict[str, Any] = {}
        self.pending_batch = 0
        self.file: BinaryIO | None = None

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        if dist.get_global_rank() != 0 or step is None:
            return
        for batch, kept in worth_writing(metrics, step, self.every).items():
            if batch != self.pending_batch:
                self.flush()
                self.pending_batch = batch
            self.pending.update({name: value for name, value in kept.items() if isinstance(value, (int, float, torch.Tensor))})

    def flush(self) -> None:
        if not self.pending:
            return
        if self.file is None:
            self.file = open_to_append(self.path)
        # Only here are tensors fetched from the device: not in every batch.
        values = {name: float(value) for name, value in self.pending.items()}
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        append_json_line(self.file, {'batch': self.pending_batch, **finite})
        self.pending = {}

    def fit_end(self, state: State, logger: Logger) -> None:
        self.flush()

    def close(self, state: State, logger: Logger) -> None:
        self.flush()
        if self.file is not None:
            self.file.close()
            self.file = None


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
        model = unwrap_model(state)
        model.zeros_for_empty = self.zeros_for_empty = self.zeros_for_empty or getattr(model, 'zeros_for_empty', False)

    def state_dict(self) -> dict[str, Any]:
        return {'zeros_for_empty': True} if self.zeros_for_empty else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.zeros_for_empty = state.get('zeros_for_empty', False)
