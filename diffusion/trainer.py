"""Composer's Trainer, without the places where its loop waits for the GPU in every step.

Composer 0.32 fetches seven numbers from the device in each step: whether any rank has run out of batches, the batch size summed over the ranks,
the loss twice (before and after the optimizer), and the counts and wall time of the step. Each stops the host until the GPU is done, so
the GPU then waits for the host. Here all ranks have equally many batches of the size that the recipe says, the loss stays on the device until
a logger writes it, and the time is agreed on over the host's network.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterator, Sequence
from typing import Any

import composer
import torch
from composer.core import Event
from composer.trainer.trainer import TrainerMode
from composer.utils import dist, format_name_with_dist
from torch import Tensor

from diffusion.datasets.batch import Batch
from diffusion.errors import DataError
from diffusion.sharding import sync_gradients


class Trainer(composer.Trainer):
    """All ranks must have equally large batches in every step.

    Args:
        log_every: batches between two losses that are averaged over the ranks and logged.
        composers: what Composer's Trainer takes.
    """

    def __init__(self, *, log_every: int, **composers: Any):
        self.log_every = log_every
        # The device's own group cannot send what lies in the host's memory.
        self._host_group = torch.distributed.new_group(backend='gloo') if dist.get_world_size() > 1 else None
        super().__init__(**composers)
        for optimizer in self.state.optimizers:
            lay_out_like_weights(optimizer)

    def _use_closures(self) -> bool:
        """Composer's closure fetches the loss before the optimizer's step."""
        return False

    def _iter_dataloader(self, trainer_mode: TrainerMode) -> Iterator[Batch]:
        """As Composer's, which before each batch fetches from the device whether any rank has come to its end: here all do at once.

        Raises:
            DataError: the epoch ends too soon.
        """
        state = self.state
        if trainer_mode != TrainerMode.TRAIN or state.dataloader_len is None:
            yield from super()._iter_dataloader(trainer_mode)
            return
        # A streaming data set goes on where the checkpoint was taken; through the batches of others Composer spins.
        begun = state.timestamp.batch_in_epoch.value if 'train' in state.dataset_resumption else 0
        num_batches = int(state.dataloader_len) - begun
        batches = iter(state.dataloader)
        for done in range(num_batches):
            self.engine.run_event(Event.BEFORE_DATALOADER)
            batch = next(batches, None)
            if batch is None:
                raise DataError(f'epoch {state.timestamp.epoch.value}: the training data ended after {done} of {num_batches} batches')
            yield batch
        self.engine.run_event(Event.BEFORE_DATALOADER)
        self.engine.run_marker_only_event(Event.AFTER_DATALOADER)

    def _train_batch(self, use_grad_scaling: bool) -> None:  # type: ignore[override]
        """Without the loss: Composer would fetch it."""
        losses = super()._train_batch(use_grad_scaling)
        if (self.state.timestamp.batch.value + 1) % self.log_every == 0:
            loss = losses['loss/train/total']
            dist.all_reduce(loss)
            self.logger.log_metrics({'loss/train/total': loss[0] / dist.get_world_size()})  # type: ignore[dict-item]

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
        state.batch = batch
        self.engine.run_event(Event.AFTER_TRAIN_BATCH)
        return total

    def _get_autoresume_checkpoint(
        self, save_folder: str, save_latest_filename: str, save_latest_remote_file_name: str, loggers: Any, load_progress_bar: bool
    ) -> str | None:
        """As Composer's, which waits by means of a file of one name for all nodes: on a disk that they share the second to delete it fails."""
        run = self.state.run_name
        path = os.path.abspath(os.path.join(format_name_with_dist(save_folder, run), format_name_with_dist(save_latest_filename, run)))
        names = [path, format_name_with_dist(save_latest_remote_file_name, run)]
        dist.broadcast_object_list(names, src=0)
        path, remote = names
        if dist.get_local_rank() == 0 and not os.path.exists(path):
            os.makedirs(os.path.dirname(path), exist_ok=True)
            self._try_checkpoint_download(path, remote, loggers, load_progress_bar)
        dist.barrier()
        present = dist.all_gather_object(os.path.exists(path))
        if present[0] and not all(present):
            raise RuntimeError(f'{path}: is there on the first machine and not on all; put checkpoint.folder on a disk that they share')
        return path if present[0] else None

    def _accumulate_time_across_ranks(
        self, num_samples: int | float, num_tokens: int, batch_time: datetime.timedelta
    ) -> tuple[int, int, datetime.timedelta]:
        """Counts of all ranks, and rank 0's time: ranks that disagree on it would not save in the same step."""
        world_size = dist.get_world_size()
        if self._host_group is not None:
            seconds = torch.tensor([batch_time.total_seconds()], dtype=torch.float64)
            torch.distributed.broadcast(seconds, src=0, group=self._host_group)
            batch_time = datetime.timedelta(seconds=seconds.item())
        return int(num_samples) * world_size, num_tokens * world_size, batch_time


@torch.no_grad()
def lay_out_like_weights(optimizer: torch.optim.Optimizer) -> None:
    """Give the optimizer's state the strides of its weights, which a checkpoint of a sharded run does not have: it is contiguous.

    Fused AdamW goes through memory in order: with other strides it would move each weight by another one's moments, on a CPU without a word.
    """
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape and value.stride() != parameter.stride():
                state[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)
