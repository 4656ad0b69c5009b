"""Give each batch its timesteps from a Sobol sequence, which only the processes together can do: its points are for a global batch."""

import torch
from composer.core import Algorithm, Event, State
from composer.loggers import Logger
from composer.utils import dist

from diffusion.objectives.objective import Objective
from diffusion.objectives.sobol import spread_points


class SpreadTimes(Algorithm):
    """Adds `timesteps` to the batch of each rank before it is split into micro-batches.

    The number of the batch comes from the trainer, which a resume restores, so there is no state to save. The keys are gathered
    and ranked on the device, where nothing waits for them: 24 bytes a sample.

    Args:
        seed: of the run.
        objective: what makes times of points.
    """

    def __init__(self, seed: int, objective: Objective):
        self.seed, self.objective = seed, objective

    def match(self, event: Event, state: State) -> bool:
        return event == Event.AFTER_DATALOADER

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        # The loader's batch is still on the CPU, where NCCL cannot gather. Composer moves the rest micro-batch by micro-batch.
        key = state.device.tensor_to_device(state.batch['sample_key'])
        everyones = torch.cat(list(dist.all_gather(key)))
        times = self.objective.times(spread_points(self.seed, everyones, state.timestamp.batch.value))
        state.batch = {**state.batch, 'timesteps': times.split(len(key))[dist.get_global_rank()]}
