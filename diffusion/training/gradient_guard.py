"""Between the backward pass and the optimizer: clip the gradients, and keep those that are not finite from the weights.

Whether a step is finite is decided on the device, for all ranks together, and given to the fused optimizer as its `found_inf`: it then leaves
weights, moments and its step count as they are. So no rank waits for the answer. It is read every `log_every` batches and before every
checkpoint, and only then does the recipe's policy act: until then nothing has happened that would have to be undone.

Clipping rides in the same pass over memory: the optimizer divides each gradient by its `grad_scale` as it reads it.
"""

from typing import Any

import torch
from composer.core import Algorithm, Event, State
from composer.loggers import Logger
from composer.utils import dist
from torch import Tensor

from diffusion.contracts.errors import NonFinite
from diffusion.faults.rollback import RollBack
from diffusion.recipe.schema import Faults
from diffusion.training.sharding import all_finite, gradient_norm


def clipping_divisor(norm: Tensor, max_norm: float) -> Tensor:
    """Divisor of gradients of this global norm that makes it `max_norm` at most; () float32. As torch.nn.utils.clip_grad_norm_ multiplies."""
    return ((norm.float() + 1e-6) / max_norm).clamp(min=1.0)


class GradientGuard(Algorithm):
    """Logs the gradient norm as it was before clipping; batches left out are counted in the log and in checkpoints.

    Args:
        max_norm: largest global gradient norm; None does not clip.
        log_every: batches between two looks at the device.
        faults: the recipe's policy.

    Raises:
        NonFinite: on all ranks alike: the policy is `stop`, or more than `max_skipped` batches in a row were not finite, or the weights are not.
        RollBack: the policy is `rollback`.
    """

    def __init__(self, max_norm: float | None, log_every: int, faults: Faults):
        self.max_norm, self.log_every, self.faults = max_norm, log_every, faults
        self.num_skipped = 0
        self.num_in_a_row = 0
        self.safe_batch = 0  # what a rollback goes back to: the last batch after which a checkpoint was due, or that the run resumed at
        self._unread: dict[int, Tensor] = {}  # by number of the batch, since the last look; () float32 on the device: 1 if not finite

    def match(self, event: Event, state: State) -> bool:
        return event in (Event.FIT_START, Event.AFTER_TRAIN_BATCH) or (event == Event.BATCH_END and state.timestamp.batch.value % self.log_every == 0)

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        if event == Event.AFTER_TRAIN_BATCH:
            self.guard(state, logger)
            return
        if event == Event.FIT_START:
            self.safe_batch = state.timestamp.batch.value
        elif self.look() or self.num_in_a_row:
            logger.log_metrics({'faults/skipped_batches': self.num_skipped})

    def guard(self, state: State, logger: Logger) -> None:
        """Tell the optimizer what to divide the gradients by, and whether to take the step."""
        # From the optimizers: to list a model's parameters takes the host milliseconds.
        norm = gradient_norm(state.optimizers)
        assert isinstance(state.loss, Tensor)  # of this rank's batch
        finite = torch.isfinite(norm) & torch.isfinite(state.loss).all()
        found_inf = finite.logical_not().float()
        if dist.get_world_size() > 1:  # Composer asks the group of one too
            dist.all_reduce(found_inf, 'MAX')
        for optimizer in state.optimizers:
            optimizer.found_inf = found_inf  # type: ignore[attr-defined]
            optimizer.grad_scale = None if self.max_norm is None else clipping_divisor(norm, self.max_norm)  # type: ignore[attr-defined]
        self._unread[state.timestamp.batch.value + 1] = found_inf
        if (state.timestamp.batch.value + 1) % self.log_every == 0:
            logger.log_metrics({'grad_norm': norm})  # type: ignore[dict-item]

    def look(self) -> int:
        """How many of the batches since the last look were left out; the policy acts here."""
        if not self._unread:
            return 0
        found = dict(zip(self._unread, torch.stack(list(self._unread.values())).tolist(), strict=True))
        self._unread.clear()
        for number, not_finite in found.items():
            self.num_in_a_row = self.num_in_a_row + 1 if not_finite else 0
            self.num_skipped += bool(not_finite)
            if not_finite:
                self._act(number)
        return int(sum(found.values()))

    def _act(self, batch: int) -> None:
        what = f'batch {batch:,}: the loss or the gradient norm is not finite; the weights have not taken the step'
        if self.faults.non_finite == 'rollback':
            raise RollBack(self.safe_batch, batch, what)
        if self.faults.non_finite == 'stop':
            raise NonFinite(
                f'{what}, and no checkpoint holds it. The same command would come to it again: look at the loss and grad_norm before it, lower '
                'optimizer.lr in a new run, or resume with faults.non_finite=skip or faults.non_finite=rollback'
            )
        if self.num_in_a_row > self.faults.max_skipped:
            raise NonFinite(
                f'{what}, nor those of the {self.num_in_a_row - 1} batches before it; faults.max_skipped is {self.faults.max_skipped}. So many in '
                'a row are divergence, not bad data: try faults.non_finite=rollback, or lower optimizer.lr in a new run'
            )

    def before_save(self, state: State) -> None:
        """To be called on all ranks before a checkpoint is made of `state`."""
        batch = state.timestamp.batch.value
        self.look()
        if not all_finite(weight for weight in state.model.parameters() if weight.requires_grad):
            raise NonFinite(f'batch {batch:,}: the weights are not finite although every step was; no checkpoint holds them. Is this machine sound?')
        self.safe_batch = batch

    def state_dict(self) -> dict[str, Any]:
        return {'num_skipped': self.num_skipped, 'num_in_a_row': self.num_in_a_row}

    def load_state_dict(self, state: dict[str, Any], strict: bool = False) -> None:
        self.num_skipped, self.num_in_a_row = state['num_skipped'], state['num_in_a_row']
