"""What happens in the processes of a point: the very trainer of `train.py` takes steps until their rate is steady; then the loader runs alone.

Time is rank 0's wall clock from one synchronisation with the GPU to the next, whole windows of steps apart: loader, logging and callbacks are in
it. No window is left out between the first that counts and the last, so images/s x seconds = images that were trained on.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from typing import Any

import torch
from composer.core import Callback, State
from composer.loggers import Logger
from composer.utils import dist

from benchmarks.sweeping.steadiness import steady_from
from benchmarks.sweeping.sweep import LONGEST_LOADING, Method, first_boundary
from benchmarks.timing import Timing, synchronize
from diffusion.checkpoints.saver import CheckpointSaver
from diffusion.common.collective import of_first_rank
from diffusion.cost.hardware import device_name, mfu, peak_flops, peak_memory_bytes
from diffusion.families.attention import kernels_in_use
from diffusion.monitoring.throughput import flop_per_image
from diffusion.recipe import Recipe
from diffusion.training.builder import build_trainer
from diffusion.training.trainer import Trainer


class Windows(Callback):
    """Times whole windows of steps and ends training when enough of them are steady, or after `max_steps`.

    Stands behind all other callbacks, whose work thus counts.

    Args:
        method: how long, and how steady.
        global_size: images of a step, over all ranks.
    """

    def __init__(self, method: Method, global_size: int):
        self.method, self.global_size = method, global_size
        self.window_sec: list[float] = []
        self.wait_sec: list[float] = []  # of each window, this rank's wait for data
        self.flop_per_image = 0.0
        self.first: int | None = None  # window that counts
        self.began_sec: float | None = None
        self.waited_sec = 0.0

    def before_dataloader(self, state: State, logger: Logger) -> None:
        self.asked_sec = time.perf_counter()

    def after_dataloader(self, state: State, logger: Logger) -> None:
        self.waited_sec += time.perf_counter() - self.asked_sec

    def batch_start(self, state: State, logger: Logger) -> None:
        if not self.flop_per_image:
            self.flop_per_image = flop_per_image(state)

    def batch_end(self, state: State, logger: Logger) -> None:
        batch = state.timestamp.batch.value
        if batch % self.method.steps_per_window or batch < self.method.warmup_steps:
            return
        synchronize()
        now = time.perf_counter()
        if self.began_sec is not None:
            self.window_sec.append(now - self.began_sec)
            self.wait_sec.append(self.waited_sec)
        self.began_sec, self.waited_sec = now, 0.0
        # The clocks of the ranks differ, and they must end in the same step.
        self.first = of_first_rank(lambda: steady_from(self.rates, self.method.windows, self.method.steady_within))
        if self.first is not None or batch + self.method.steps_per_window > self.method.max_steps:
            state.stop_training()

    @property
    def rates(self) -> list[float]:
        """Images per second of each window."""
        return [self.method.steps_per_window * self.global_size / sec for sec in self.window_sec]

    def result(self) -> dict[str, Any]:
        """Of the windows that count: the steady ones, or if there are none the last `windows`."""
        first = len(self.window_sec) - self.method.windows if self.first is None else self.first
        rates, measured_sec = self.rates[first:], sum(self.window_sec[first:])
        measured_steps = len(rates) * self.method.steps_per_window
        return {
            'status': 'unsteady' if self.first is None else 'measured',
            'reason': self._why_unsteady() if self.first is None else None,
            'images_per_sec': measured_steps * self.global_size / measured_sec,
            'images_per_sec_spread': Timing.of(rates).spread,
            'windows_images_per_sec': rates,
            'step_sec': measured_sec / measured_steps,
            # All ranks wait for the slowest.
            'data_wait_share': max(dist.all_gather_object(sum(self.wait_sec[first:]))) / measured_sec,
            'warmup_steps': first_boundary(self.method) + first * self.method.steps_per_window,
            'measured_steps': measured_steps,
            'measured_sec': measured_sec,
        }

    def _why_unsteady(self) -> str:
        return (
            f'no {self.method.windows} windows up to step {self.method.max_steps} were within {self.method.steady_within:.0%} of their median '
            '(steady_within); the numbers are of the last ones'
        )


def measure(recipe: Recipe, method: Method) -> tuple[dict[str, Any], Trainer]:
    """Train, then run the loader alone; returns what the point's row takes from it, and the trainer to be closed. All ranks must call it."""
    trainer = build_trainer(recipe)
    windows = Windows(method, recipe.batch.global_size)
    trainer.state.callbacks = [
        *(callback for callback in trainer.state.callbacks if not isinstance(callback, CheckpointSaver)),  # it would save the last step
        windows,
    ]
    trainer.fit()
    num_gpus = dist.get_world_size()
    micro_size = int(trainer.state.device_train_microbatch_size or recipe.batch.global_size // num_gpus)
    on_gpu = torch.cuda.is_available()
    model: Any = getattr(trainer.state.model, 'module', trainer.state.model)
    row = {
        'device': device_name(),
        'num_parameters': sum(parameter.numel() for parameter in model.network.parameters()),
        'micro_size': micro_size,  # of `auto`, what was found
        'accumulation': recipe.batch.global_size // num_gpus // micro_size,
        'attention': kernels_in_use(recipe),
        **windows.result(),
        'flop_per_image': windows.flop_per_image,
        'peak_allocated_bytes': max(dist.all_gather_object(peak_memory_bytes())),
        'peak_reserved_bytes': max(dist.all_gather_object(torch.cuda.max_memory_reserved())) if on_gpu else None,
    }
    row['images_per_sec_per_gpu'] = row['images_per_sec'] / num_gpus
    row['mfu'] = mfu(row['images_per_sec_per_gpu'], windows.flop_per_image, peak_flops(device_name()))
    if method.loader_sec:
        row['loader_images_per_sec'] = sum(dist.all_gather_object(loader_images_per_sec(trainer, method.loader_sec)))
        row['loader_ratio'] = row['loader_images_per_sec'] / row['images_per_sec']
    return row, trainer


def loader_images_per_sec(trainer: Trainer, seconds: float) -> float:
    """Images that this rank's loader gives in a second while nothing else runs, at the same time as the others'.

    What its processes had prepared when the clock began would look like speed, so as many batches are left out first as they may hold.
    """
    loader: Any = trainer.state.train_dataloader
    batches = _endless(loader)
    dist.barrier()
    end_sec = time.perf_counter() + (LONGEST_LOADING - 1) * seconds  # a slow loader is not waited for
    for _ in range(max(1, loader.num_workers * (loader.prefetch_factor or 0))):
        next(batches)
        if time.perf_counter() > end_sec:
            break
    start_sec = now_sec = time.perf_counter()
    num_images = 0
    while now_sec < start_sec + seconds:
        num_images += len(next(batches)['sample_key'])
        now_sec = time.perf_counter()
    batches.close()
    return num_images / (now_sec - start_sec)


def _endless(loader: Any) -> Generator[Any, None, None]:
    while True:
        yield from loader
