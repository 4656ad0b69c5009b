"""Images per second, MFU, memory, time and dollars: so far and to go.

All images/s are taken from one clock, the stopwatch of the process (diffusion/common/stopwatch.py), between two synchronizations with the GPU:
those of the log here, those of sweeps from events.jsonl. The micro-benchmarks, which have no run, wait for the GPU by the same `synchronize`.
"""

from collections import deque
from typing import Any

import torch
from composer.core import Callback, State
from composer.loggers import Logger
from composer.utils import dist

from diffusion.common.stopwatch import TRAINING, WAITING, Stopwatch
from diffusion.cost.formulas import SEC_PER_HOUR, hours
from diffusion.cost.hardware import device_name, mfu, peak_flops, peak_memory_bytes
from diffusion.cost.prices import Price
from diffusion.monitoring.time_accounts import account, read_events

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


def flop_per_image(state: State) -> float:
    """Return the counted FLOP of the network's forward and backward pass for one image of the batch that `state` holds."""
    model: Any = getattr(state.model, 'module', state.model)
    return model.flops_per_batch(state.batch) / len(state.batch['sample_key'])
