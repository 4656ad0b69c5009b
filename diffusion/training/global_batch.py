"""Entries of a batch that only the processes together can make, added before it is split into micro-batches.

Each is made of the whole global batch, gathered on the device, so that the number of GPUs and the micro-batch change nothing.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from composer.core import Algorithm, Event, State
from composer.loggers import Logger
from composer.utils import dist
from torch import Tensor

from diffusion.methods.method import TrainingMethod
from diffusion.objectives.objective import Objective, spread_points
from diffusion.recipe import Recipe


class GlobalBatchAlgorithm(Algorithm):
    """Saves nothing: what it needs is the number of the batch, which a resume restores. Checkpoints have the names of the subclasses."""

    def match(self, event: Event, state: State) -> bool:
        return event == Event.AFTER_DATALOADER

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        def everyones(name: str) -> Tensor:
            # The loader's batch is still on the CPU, where NCCL cannot gather. Composer moves the rest micro-batch by micro-batch.
            return torch.cat(list(dist.all_gather(state.device.tensor_to_device(state.batch[name]))))

        size = len(state.batch['sample_key'])
        begin = dist.get_global_rank() * size
        state.batch = {**state.batch, **self.added(everyones, slice(begin, begin + size), state.timestamp.batch.value)}

    @abstractmethod
    def added(self, everyones: Callable[[str], Tensor], mine: slice, batch_index: int) -> dict[str, Tensor]:
        """This rank's part of what is added; `everyones`, `mine`: see TrainingMethod.from_global_batch."""


class SpreadTimes(GlobalBatchAlgorithm):
    """Adds `timesteps` from a Sobol sequence. The keys are ranked on the device, where nothing waits for them: 24 bytes a sample.

    Args:
        seed: of the run.
        objective: what makes times of points.
    """

    def __init__(self, seed: int, objective: Objective):
        self.seed, self.objective = seed, objective

    def added(self, everyones: Callable[[str], Tensor], mine: slice, batch_index: int) -> dict[str, Tensor]:
        return {'timesteps': self.objective.times(spread_points(self.seed, everyones('sample_key'), batch_index))[mine]}


class GiveOthers(GlobalBatchAlgorithm):
    """Adds what methods make of the samples of all ranks."""

    def __init__(self, methods: Sequence[TrainingMethod]):
        self.methods = methods

    def added(self, everyones: Callable[[str], Tensor], mine: slice, batch_index: int) -> dict[str, Tensor]:
        return {name: tensor for method in self.methods for name, tensor in method.from_global_batch(everyones, mine).items()}


def global_batch_algorithms(recipe: Recipe, model: Any) -> list[Algorithm]:
    """Algorithms that the recipe's timesteps and methods need."""
    algorithms: list[Algorithm] = [SpreadTimes(recipe.seed, model.objective)] if recipe.model.timesteps == 'sobol' else []
    asking = [method for method in model.methods.values() if type(method).from_global_batch is not TrainingMethod.from_global_batch]
    return [*algorithms, GiveOthers(asking)] if asking else algorithms
