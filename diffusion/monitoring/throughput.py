"""Callbacks that measure steps: images per second, MFU, memory, time and dollars, where the time goes, and what else is logged about each step.

All images/s are taken from one clock, the stopwatch of the process (diffusion/common/stopwatch.py), between two synchronizations with the GPU:
those of the log here, those of sweeps from events.jsonl. The micro-benchmarks, which have no run, wait for the GPU by the same `synchronize`.
"""

import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

import torch
from composer.core import Callback, State, Time
from composer.loggers import Logger
from composer.utils import dist

from diffusion.common.collective import unwrap_model
from diffusion.common.files import read_json_lines
from diffusion.common.ray_cluster import disconnect
from diffusion.common.stopwatch import TRAINING, WAITING, Stopwatch
from diffusion.cost.formulas import SEC_PER_HOUR, hours
from diffusion.cost.hardware import device_name, mfu, peak_flops, peak_memory_bytes
from diffusion.cost.prices import Price
from diffusion.monitoring.time_accounts import EARLY, account, propose, read_events, summary
from diffusion.online.pool import Pool
from diffusion.recipe import AnyRecipe

WARMUP = 2  # batches in which PyTorch compiles and tunes, and the loader first fills its queues


def synchronize() -> None:
    """Wait until the GPU has done what it was asked to do; the host runs ahead of it."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class Throughput(Callback):
    """Logs every `every` batches, over the last `window` batches of pure training (evaluation, sampling and saving excluded).

    MFU = images/s/GPU x network FLOP per image (forward and backward, no recompute) / dense 16-bit peak. Dollars count the time of this process and
    of those before it, including all that they did: it is paid for too. What a killed process did after its last line in events.jsonl is not known.
    Memory is what the device must hold, evaluation and sampling included. `cost/flop` is the counted FLOP of the network in all batches so far,
    each as large as the first. Stands before Goodput, which tells the stopwatch what the run is doing.

    Args:
        price: of a GPU-hour; None reports no money.
        every: batches between two records.
        watch: the stopwatch of the process; its file knows how long earlier processes took, also after their last checkpoint.
        window: batches that a rate is averaged over, in whole records.
    """

    def __init__(self, price: Price | None, every: int, watch: Stopwatch, window: int = 50):
        self.price = price
        self.every = every
        self.watch = watch
        self.marks: deque[tuple[int, float, float]] = deque(maxlen=1 + max(1, window // every))  # (batches, seconds of training, of waiting) so far
        # Of the processes before this one, which may have had another number of GPUs.
        lines = read_events(watch.path) if watch.path is not None else ()
        earlier = account(line for line in lines if line['process'] != watch.process)
        self.earlier_sec, self.earlier_gpu_hours = earlier.running_sec, earlier.gpu_hours
        self.num_batches = 0
        self.peak_flops = peak_flops(device_name())  # None on a CPU and on a GPU that is not listed
        self.flops_per_image: float | None = None

    def batch_start(self, state: State, logger: Logger) -> None:
        if self.flops_per_image is None:
            self.flops_per_image = flop_per_image(state)

    def batch_end(self, state: State, logger: Logger) -> None:
        self.num_batches += 1
        is_record = state.timestamp.batch.value % self.every == 0
        if is_record:
            synchronize()
        if self.num_batches == WARMUP or (is_record and self.num_batches > WARMUP):
            self.watch.switch(self.watch.now_in)
            spent = self.watch.total_sec
            self.marks.append((self.num_batches, sum(spent[phase] for phase in TRAINING), spent[WAITING]))
        if is_record and len(self.marks) > 1:
            logger.log_metrics(self.measure(state))

    def measure(self, state: State) -> dict[str, float]:
        """The record. `state.batch` is one rank's share of a batch; all ranks run in step."""
        num_gpus = dist.get_world_size()
        batches, train_sec, wait_sec = (last - first for first, last in zip(self.marks[0], self.marks[-1], strict=True))
        done = state.get_elapsed_duration()
        global_size = len(state.batch['sample_key']) * num_gpus
        images_per_sec = global_size * batches / train_sec
        elapsed_sec = self.elapsed_sec()
        metrics = {
            'throughput/images_per_sec': images_per_sec,
            'throughput/images_per_sec_per_gpu': images_per_sec / num_gpus,
            'throughput/data_wait_share': wait_sec / train_sec,
            'throughput/peak_memory_gb': peak_memory_bytes() / 1e9,
            'time/elapsed_hours': elapsed_sec / SEC_PER_HOUR,
            'cost/gpu_hours': self.gpu_hours(),
        }
        if torch.cuda.is_available():
            metrics['throughput/reserved_memory_gb'] = torch.cuda.max_memory_reserved() / 1e9
        if self.flops_per_image is not None:
            metrics['cost/flop'] = self.flops_per_image * global_size * state.timestamp.batch.value
            utilisation = mfu(images_per_sec / num_gpus, self.flops_per_image, self.peak_flops)
            if utilisation is not None:
                metrics['throughput/mfu'] = utilisation
        if done is not None and done.value > 0:
            steps = state.timestamp.batch.value
            metrics['time/remaining_hours'] = hours(steps * (1 / done.value - 1) * global_size, images_per_sec)
        if self.price is not None:
            metrics['cost/dollars_so_far'] = metrics['cost/gpu_hours'] * self.price.dollars
            if 'time/remaining_hours' in metrics:
                metrics['cost/dollars_to_go'] = metrics['time/remaining_hours'] * num_gpus * self.price.dollars
        return metrics

    def elapsed_sec(self) -> float:
        return self.earlier_sec + self.watch.elapsed_sec

    def gpu_hours(self) -> float:
        return self.earlier_gpu_hours + self.watch.elapsed_sec / SEC_PER_HOUR * dist.get_world_size()

    def state_dict(self) -> dict[str, Any]:
        return {'elapsed_sec': self.elapsed_sec(), 'gpu_hours': self.gpu_hours()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.earlier_sec = max(self.earlier_sec, state['elapsed_sec'])
        self.earlier_gpu_hours = max(self.earlier_gpu_hours, state['gpu_hours'])


class Goodput(Callback):
    """A line of events.jsonl every `log.every` batches; saves, sample grids and evaluations have lines of their own.

    Stands behind Throughput, which in the batches that both write in waits for the GPU.

    Args:
        recipe: the resolved recipe.
        watch: the stopwatch of the process.
    """

    def __init__(self, recipe: AnyRecipe, watch: Stopwatch):
        self.recipe, self.watch = recipe, watch
        self.total: Time | None = None
        self.closed = False

    def after_load(self, state: State, logger: Logger) -> None:
        self.total = state.max_duration  # what stops a run early shortens it

    def fit_start(self, state: State, logger: Logger) -> None:
        self.watch.batch = state.timestamp.batch.value

    def before_dataloader(self, state: State, logger: Logger) -> None:
        if self.watch.now_in != 'start':  # the loader's first fill is part of it
            self.watch.switch('data wait')

    def after_dataloader(self, state: State, logger: Logger) -> None:
        if self.watch.now_in == 'start':
            self.watch.write('begin')
        self.watch.switch('compute')

    def batch_end(self, state: State, logger: Logger) -> None:
        batch = state.timestamp.batch.value
        self.watch.step(batch)
        self.watch.switch('other')
        if batch % self.recipe.log.every == 0:
            self.watch.write('steps')

    def eval_before_all(self, state: State, logger: Logger) -> None:
        self.watch.switch('evaluation')

    def eval_after_all(self, state: State, logger: Logger) -> None:
        self.watch.switch('other')
        self.watch.write('evaluation')

    def close(self, state: State, logger: Logger) -> None:
        if self.closed:  # Composer closes again when Python ends
            return
        self.closed = True
        self.watch.end(self._reason(state))
        if self.watch.path is not None and self.watch.batch is not None:  # not where the run was already finished
            accounts = account(read_events(self.watch.path))
            print(summary(accounts, propose(accounts, self.recipe.checkpoint.every, self.recipe.faults.gpu_hours_between_failures)), file=sys.stderr)

    def _reason(self, state: State) -> str:
        error = sys.exc_info()[0] or getattr(sys, 'last_type', None)
        if error is not None:
            return error.__name__
        if self.total is None or state.timestamp.get(self.total.unit) >= self.total:
            return 'finished'
        return EARLY if state.max_duration is not None and state.timestamp >= state.max_duration else 'stopped'


class LearningRate(Callback):
    """Log the rate before the step. Composer's LRMonitor reads it after the schedule has been stepped: the rate of the next batch."""

    def batch_start(self, state: State, logger: Logger) -> None:
        for optimizer in state.optimizers:
            for number, group in enumerate(optimizer.param_groups):
                logger.log_metrics({f'lr-{type(optimizer).__name__}/group{number}': group['lr']})


class BadSamplesLog(Callback):
    """Log `data/bad_samples`, the length of the list that the loader's processes write, when it grows.

    Args:
        path: of the list.
        every: batches between two looks at its size.
    """

    def __init__(self, path: Path, every: int):
        self.path, self.every = path, every
        self.num_bytes = 0

    def batch_end(self, state: State, logger: Logger) -> None:
        if dist.get_global_rank() != 0 or state.timestamp.batch.value % self.every or not self.path.exists():
            return
        num_bytes = self.path.stat().st_size
        if num_bytes != self.num_bytes:
            self.num_bytes = num_bytes
            logger.log_metrics({'data/bad_samples': sum(1 for _ in read_json_lines(self.path))})


class EncodersLog(Callback):
    """Logs, as the first rank sees them: encoders that serve, those that were replaced, images/s of each, and the share of the time that was waited
    for them and not for the loader.

    Args:
        every: batches between two records.
    """

    def __init__(self, pool: Pool, every: int):
        self.pool, self.every = pool, every
        self.last: tuple[float, int, float] | None = None  # when, images, seconds waited

    def batch_end(self, state: State, logger: Logger) -> None:
        if dist.get_global_rank() != 0 or state.timestamp.batch.value % self.every:
            return
        pool, last = self.pool, self.last
        self.last = now = time.monotonic(), pool.num_images, pool.waited_sec
        metrics: dict[str, float] = {'encoders/serving': pool.num_serving, 'encoders/replaced': pool.num_replaced}
        if last is not None:
            seconds, images, waited_sec = (later - earlier for earlier, later in zip(last, now, strict=True))
            metrics['encoders/images_per_sec_per_encoder'] = images * dist.get_world_size() / seconds / len(pool.members)
            metrics['encoders/wait_share'] = waited_sec / seconds
        logger.log_metrics(metrics)

    def close(self, state: State, logger: Logger) -> None:
        """Leave the cluster before this process ends or restarts: the encoders end with the first rank's connection."""
        disconnect()


def flop_per_image(state: State) -> float:
    """Return the counted FLOP of the network's forward and backward pass for one image of the batch that `state` holds."""
    return unwrap_model(state).flops_per_batch(state.batch) / len(state.batch['sample_key'])
