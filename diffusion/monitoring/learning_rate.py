"""Log the learning rate that a batch is trained with."""

from composer.core import Callback, State
from composer.loggers import Logger


class LearningRate(Callback):
    """Log the rate before the step. Composer's LRMonitor reads it after the schedule has been stepped: the rate of the next batch."""

    def batch_start(self, state: State, logger: Logger) -> None:
        for optimizer in state.optimizers:
            for number, group in enumerate(optimizer.param_groups):
                logger.log_metrics({f'lr-{type(optimizer).__name__}/group{number}': group['lr']})
