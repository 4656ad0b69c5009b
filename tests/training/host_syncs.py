"""Counting the places where the host asks for a number that lies on the device: on a GPU each waits until all work before it is done."""

import itertools
import statistics
from collections.abc import Callable
from typing import Any
from unittest import mock

import composer
import torch
from composer.core import Callback, State
from composer.loggers import Logger
from torch.utils._python_dispatch import TorchDispatchMode

from diffusion.recipe import Recipe
from diffusion.training import builder as training


class HostSyncs(TorchDispatchMode):
    """Within the context `count` grows with each `item()`, `float(tensor)`, `if tensor`: what arrives as `aten._local_scalar_dense`.

    Counted the same without a GPU. Not counted: copies to the host as a whole, and the loader's own processes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


class SyncsByStep(Callback):
    """Host synchronizations before each step, and thus in each from its start to the next one's."""

    def __init__(self, syncs: HostSyncs):
        self.syncs = syncs
        self.counts: list[int] = []

    def batch_start(self, state: State, logger: Logger) -> None:
        self.counts.append(self.syncs.count)


def syncs_per_step(recipe: Recipe, trainer_class: Callable[..., composer.Trainer]) -> tuple[float, float]:
    """Return the host synchronizations of a step between two log records, and of one that logs: means over a short run of `recipe`."""
    with mock.patch.object(training, 'Trainer', trainer_class):
        trainer = training.build_trainer(recipe)
    with HostSyncs() as syncs:
        watch = SyncsByStep(syncs)
        trainer.state.callbacks.insert(0, watch)  # before those that log at a batch's start
        trainer.fit()
    trainer.close()
    of_step = {number: after - before for number, (before, after) in enumerate(itertools.pairwise(watch.counts), start=1)}
    logging = [count for number, count in of_step.items() if number % recipe.log.every == 0]
    between = [count for number, count in of_step.items() if number % recipe.log.every != 0]
    return statistics.mean(between), statistics.mean(logging)
