"""Composer's Trainer, without the places where its loop waits for the GPU in every step.

Composer 0.32 fetches seven numbers from the device in each step: whether any rank has run out of batches, the batch size summed over the ranks,
the loss twice (before and after the optimizer), and the counts and wall time of the step. Each stops the host until the GPU is done, so
the GPU then waits for the host. Here all ranks have equally many batches of the size that the recipe says, the loss stays on the device until
a logger writes it, and the time is agreed on over the host's network.
"""

import datetime
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import composer
import torch
from composer.core import Event
from composer.trainer.trainer import TrainerMode
from composer.utils import dist, reproducibility
from torch import Tensor

from diffusion.checkpoints.completeness import refuse_incomplete, safe_loading
from diffusion.checkpoints.reading import load_safely
from diffusion.common.processes import failpoint
from diffusion.contracts.batch import Batch
from diffusion.contracts.errors import DataError
from diffusion.faults import preemption
from diffusion.faults.rollback import LeftOut
from diffusion.training.sharding import sync_gradients


class Trainer(composer.Trainer):
    """All ranks must have equally large batches in every step.

    Args:
        log_every: batches between two losses that are averaged over the ranks and logged.
        left_out: batches that are loaded and counted, and not trained on.
        composers: what Composer's Trainer takes.
    """

    def __init__(self, *, log_every: int, left_out: Sequence[LeftOut] = (), **composers: Any):
        self.log_every, self.left_out = log_every, left_out
        # The device's own group cannot send what lies in the host's memory.
        timeout = datetime.timedelta(seconds=composers['dist_timeout'])
        self._host_group = torch.distributed.new_group(backend='gloo', timeout=timeout) if dist.get_world_size() > 1 else None

        def load(path: Path, map_location: str) -> Any:
            content = load_safely(path, map_location, composers['load_path'])
            refuse_incomplete(content, self.state, composers['load_path'])
            return content

        with safe_loading(load):
            super().__init__(**composers)
        if not os.environ.get('ENGINE_DEBUG'):  # the variable that has Composer print them
            # Composer formats a text for each of a step's 170 calls of callbacks, 1 ms in all, before it asks whether anybody reads it.
            self.engine._debug_log = lambda event, msg: None  # type: ignore[method-assign]
        if self.state.device_mesh is not None:  # its groups have timeouts of their own: NCCL's 600 seconds
            for group in self.state.device_mesh.get_all_groups():
                torch.distributed.distributed_c10d._set_pg_timeout(timeout, group)
        for optimizer in self.state.optimizers:
            lay_out_like_weights(optimizer)

    def _use_closures(self) -> bool:
        """Composer's closure fetches the loss before the optimizer's step."""
        return False

    def _iter_dataloader(self, trainer_mode: TrainerMode) -> Iterator[Batch]:
        """Iterate as Composer, which before each batch fetches from the device whether any rank has come to its end: here all do at once.

        Raises:
            DataError: the epoch ends too soon.
        """
        state = self.state
        if trainer_mode != TrainerMode.TRAIN or state.dataloader_len is None:
            yield from super()._iter_dataloader(trainer_mode)
            return
        # A streaming dataset resumes where the checkpoint was taken; through the batches of others Composer spins.
        begun = state.timestamp.batch_in_epoch.value if 'train' in state.dataset_resumption else 0
        num_batches = int(state.dataloader_len) - begun
        batches = iter(state.dataloader if num_batches else ())  # a loader that is begun for nothing would be an epoch ahead
        for done in range(num_batches):
            if preemption.agreed():
                raise preemption.saved_after(state.timestamp.batch.value)
            self.engine.run_event(Event.BEFORE_DATALOADER)
            batch = next(batches, None)
            self._restore_rng()
            if batch is None:
                raise DataError(f'epoch {state.timestamp.epoch.value}: the training data ended after {done} of {num_batches} batches')
            yield batch
        if not getattr(state.dataloader, 'persistent_workers', False):  # loader processes that stay draw their seed once, with the first batch of all
            self._restore_rng()
        self.engine.run_event(Event.BEFORE_DATALOADER)
        self.engine.run_marker_only_event(Event.AFTER_DATALOADER)

    def _restore_rng(self) -> None:
        """Restore the random state once the loader has drawn the seed of its processes; Composer does so only where it skips batches itself."""
        if self._rng_state is not None and 'train' in self.state.dataset_resumption:
            reproducibility.load_rng_state(self._rng_state)
            self._rng_state = None

    def _run_evaluators(self, event: Event) -> None:
        if not preemption.agreed():  # or the grace period might end before the checkpoint is written
            super()._run_evaluators(event)

    def _train_batch(self, use_grad_scaling: bool) -> None:  # type: ignore[override]
        """Without the loss: Composer would fetch it."""
        failpoint('step')
        if any(self.state.timestamp.batch.value in batches for batches in self.left_out):
            return
        losses = super()._train_batch(use_grad_scaling)
        if (self.state.timestamp.batch.value + 1) % self.log_every == 0:
            values = {'total': losses['loss/train/total'][0]}
            for method in getattr(self._original_model, 'methods', {}).values():  # an autoencoder has none
                values |= method.log_values()
            for name, value in values.items():
                dist.all_reduce(value)
                self.logger.log_metrics({f'loss/train/{name}': value / dist.get_world_size()})  # type: ignore[dict-item]

    def _train_microbatches(self, microbatches: Sequence[Batch], total_loss_dict: dict[str, Tensor], ddp_sync: bool = True) -> Tensor:
        """Gradients of one rank's batch, a micro-batch at a time; each counts by its share of the samples."""
        state, total = self.state, total_loss_dict['loss/train/total']
        self.engine.run_event(Event.BEFORE_TRAIN_BATCH)
        for optimizer in state.optimizers:
            optimizer.zero_grad(set_to_none=True)
        batch, batch_size = state.batch, sum(len(part['sample_key']) for part in microbatches)
        for index, part in enumerate(microbatches):
            last = index == len(microbatches) - 1
            sync_gradients(self._original_model, last)
            state.batch = state.device.batch_to_device(part)
            total += self._train_microbatch(False, batch_size, last)['total']
        state.batch, state.loss = batch, total
        self.engine.run_event(Event.AFTER_TRAIN_BATCH)
        return total

    def _accumulate_time_across_ranks(
        self, num_samples: int | float, num_tokens: int, batch_time: datetime.timedelta
    ) -> tuple[int, int, datetime.timedelta]:
        """Counts of all ranks, the longest time, and whether any was asked to stop: ranks that disagree would not save in the same step."""
        world_size = dist.get_world_size()
        seconds, stop = batch_time.total_seconds(), preemption.received()
        if self._host_group is not None:
            agreed = torch.tensor([seconds, stop], dtype=torch.float64)
            torch.distributed.all_reduce(agreed, torch.distributed.ReduceOp.MAX, group=self._host_group)  # type: ignore[arg-type]
            seconds, stop = agreed[0].item(), bool(agreed[1])
        preemption.agree(stop)
        return int(num_samples) * world_size, num_tokens * world_size, datetime.timedelta(seconds=seconds)


@torch.no_grad()
def lay_out_like_weights(optimizer: torch.optim.Optimizer) -> None:
    """Give the optimizer's state the strides of its weights, which a checkpoint of a sharded run does not have: it is contiguous.

    Fused AdamW goes through memory in order: with other strides it would move each weight by another one's moments, silently on a CPU.
    """
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape and value.stride() != parameter.stride():
                state[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)
