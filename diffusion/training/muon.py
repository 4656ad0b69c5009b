"""Muon: momentum whose matrices are orthogonalized before each step, for the weights of the network's blocks; AdamW for everything else.

A weight matrix W of gradient G takes the step of Keller Jordan's Muon (kellerjordan.github.io/posts/muon) with the scale and the weight decay of
Moonlight (arXiv 2502.16982, section 2.2):

    M <- momentum M + G,    O = orthogonalize(G + momentum M),    W <- (1 - lr weight_decay) W - lr 0.2 sqrt(max(rows, columns)) O

O is U V^T of the singular value decomposition U S V^T, roughly. The factor gives it the root mean square of AdamW's updates, 0.2, so that one
`optimizer.lr` and one `optimizer.weight_decay` serve both.

A weight that several matrices share, one below another (PRX's img_qkv_proj, txt_kv_proj and modulation, the values and gates of a U-Net's MLPs:
`Family.stacked`), is taken apart, because language models were reported to need that (verenalabs.com/posts/evaluating_muon__moe_in_llms): of
matrices that are orthogonalized together none is orthogonal by itself.

`torch.optim.Muon` computes the same of one plain matrix (`adjust_lr_fn='match_rms_adamw'`; a test holds that), and no more: stacked matrices as one,
sharded ones whole on every rank, no `found_inf`, and a momentum 1 - momentum times as large as that of our checkpoints.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from diffusion.training.sharding import local

QUINTIC = (3.4445, -4.7750, 2.0315)  # of Newton-Schulz: steep at 0, and around 1 it stays within 0.68 .. 1.2
RMS_OF_ADAMW = 0.2  # arXiv 2502.16982, equation 4
TINY = 1e-7  # below any gradient's norm: a matrix of zeros stays one


class Muon(torch.optim.Optimizer):
    """One optimizer for both rules: a group that says `stacked` is Muon's and holds 2-D weights of so many matrices each; others are fused AdamW's.

    Where weights are sharded (FSDP2) or several GPUs hold the same ones (DDP), the matrices are dealt out: each is orthogonalized once, whole.
    As fused AdamW it divides gradients by its attribute `grad_scale` and leaves all as it is where `found_inf` is 1 (both () on the device).

    Args:
        groups: with `params`, `lr`, `weight_decay`, and `stacked` for Muon's.
        betas, eps: AdamW's.
        momentum: of Muon, 0 .. 1.
        steps: of Newton-Schulz.
    """

    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None

    def __init__(self, groups: list[dict[str, Any]], betas: tuple[float, float], eps: float, momentum: float, steps: int):
        # `fused` also tells PyTorch to load AdamW's step counts as float32 onto the device.
        both = {'lr': 0.0, 'weight_decay': 0.0, 'stacked': 0, 'fused': True}
        super().__init__(groups, {**both, 'betas': betas, 'eps': eps, 'momentum': momentum, 'steps': steps})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        assert closure is None, 'the trainer has none: it would fetch the loss'
        for group in self.param_groups:
            weights = [weight for weight in group['params'] if weight.grad is not None]
            if weights and group['stacked']:
                self._step_of_muon(group, weights)
            elif weights:
                self._step_of_adamw(group, weights)

    def _step_of_muon(self, group: dict[str, Any], weights: list[Tensor]) -> None:
        for weight in weights:
            if not self.state[weight]:
                self.state[weight]['momentum'] = torch.zeros_like(weight, memory_format=torch.preserve_format)
        gradients = [local(weight.grad) for weight in weights if weight.grad is not None]
        momenta = [local(self.state[weight]['momentum']) for weight in weights]
        momentum, decay = group['momentum'], 1 - group['lr'] * group['weight_decay']
        factors: tuple[float | Tensor, ...] = (momentum, decay, 1.0)
        if self.grad_scale is not None:
            torch._foreach_div_(gradients, self.grad_scale)
        if self.found_inf is not None:  # on the device, so no host waits: with gradients of 0 and factors of 1 and 0 nothing changes
            skip = self.found_inf.bool()
            for gradient in gradients:
                gradient.masked_fill_(skip, 0)
            factors = tuple(torch.where(skip, still, factor) for still, factor in ((1.0, momentum), (1.0, decay), (0.0, 1.0)))
        carried, decayed, taken = factors
        torch._foreach_mul_(momenta, carried)
        torch._foreach_add_(momenta, gradients)
        ahead = torch._foreach_add(gradients, momenta, alpha=momentum)  # Nesterov
        for index, direction in orthogonalized(ahead, weights, group['steps'], group['stacked']):
            weight = weights[index]
            scale = RMS_OF_ADAMW * math.sqrt(max(weight.shape[0] // group['stacked'], weight.shape[1]))
            local(weight).mul_(decayed).add_(direction.to(weight.dtype) * taken, alpha=-group['lr'] * scale)

    def _step_of_adamw(self, group: dict[str, Any], weights: list[Tensor]) -> None:
        """Step as torch.optim.AdamW(fused=True) does, to the bit: the same function and the same state."""
        for weight in weights:
            state = self.state[weight]
            if not state:
                state['step'] = torch.zeros((), dtype=torch.float32, device=weight.device)
                for name in ('exp_avg', 'exp_avg_sq'):
                    state[name] = torch.zeros_like(weight, memory_format=torch.preserve_format)
        adamw(
            weights,
            [weight.grad for weight in weights if weight.grad is not None],
            exp_avgs=[self.state[weight]['exp_avg'] for weight in weights],
            exp_avg_sqs=[self.state[weight]['exp_avg_sq'] for weight in weights],
            max_exp_avg_sqs=[],
            state_steps=[self.state[weight]['step'] for weight in weights],
            fused=True,
            grad_scale=self.grad_scale,
            found_inf=self.found_inf,
            amsgrad=False,
            beta1=group['betas'][0],
            beta2=group['betas'][1],
            lr=group['lr'],
            weight_decay=group['weight_decay'],
            eps=group['eps'],
            maximize=False,
        )


def newton_schulz(matrix: Tensor, steps: int) -> Tensor:
    """Return `matrix` (rows, columns) with singular values of about 1: after 5 steps 0.68 .. 1.2 where they were above 0.2 % of its norm.

    Computed in its dtype; bf16 is exact enough, singular values differ by more anyway.
    """
    a, b, c = QUINTIC
    # No singular value is above the root of the sum of all squares.
    x = matrix / (torch.linalg.vector_norm(matrix) + TINY)
    wide = x.mT if x.shape[0] > x.shape[1] else x  # the smaller Gram matrix
    for _ in range(steps):
        gram = wide @ wide.mT
        polynomial = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        wide = torch.addmm(wide, polynomial, wide, beta=a)
    return wide.mT if x.shape[0] > x.shape[1] else wide


def orthogonalized(shards: Sequence[Tensor], weights: Sequence[Tensor], steps: int, stacked: int = 1) -> Iterator[tuple[int, Tensor]]:
    """Yield index and orthogonalized matrix for each of `weights`, whose directions are `shards`: of sharded weights this rank's rows, in and out.

    The matrices are dealt out to the ranks, the largest first, in rounds of one for each rank among which weights are divided. Such a round belongs
    to one replica: its ranks exchange their rows so that each gets a whole matrix, and hand the result to the other replicas, where each rank hands
    out the rows again. So each matrix is orthogonalized once, in all. All ranks must call it alike.

    Args:
        shards: float32.
        weights: parameters, all divided in the same way: by rows over one dimension of a mesh, or not at all.
        steps: of Newton-Schulz.
        stacked: matrices in each weight, one below another.
    """
    rows_group, replica_group = groups_of(weights[0])
    num_parts, part = (rows_group.size(), rows_group.rank()) if rows_group is not None else (1, 0)
    num_replicas, replica = (replica_group.size(), replica_group.rank()) if replica_group is not None else (1, 0)
    dtype = torch.bfloat16 if shards[0].is_cuda else torch.float32
    order = sorted(range(len(weights)), key=lambda index: (-weights[index].numel(), index))
    rounds = [order[start : start + num_parts] for start in range(0, len(order), num_parts)]
    done: dict[int, Tensor] = {}  # this rank's matrices, by round
    for number, indices in enumerate(rounds):
        if number % num_replicas == replica:
            sent = [shards[index].to(dtype) for index in indices]
            whole = sent[0] if rows_group is None else _gather_rows(sent, [weights[index].shape for index in indices], rows_group, part)
            if whole is not None:
                done[number] = torch.cat([newton_schulz(matrix, steps) for matrix in whole.chunk(stacked)])
    for number, indices in enumerate(rounds):
        result = done.pop(number, None)
        if replica_group is not None and part < len(indices):
            if result is None:
                result = torch.empty(weights[indices[part]].shape, dtype=dtype, device=shards[0].device)
            distributed.broadcast(result, group=replica_group, group_src=number % num_replicas)
        if rows_group is None:
            assert result is not None
            yield indices[0], result
        else:
            yield from zip(indices, _scatter_rows(result, [shards[index] for index in indices], dtype, rows_group), strict=True)


def groups_of(weight: Tensor) -> tuple[distributed.ProcessGroup | None, distributed.ProcessGroup | None]:
    """Return the ranks that hold the rows of a weight together, and those that hold the same; None in place of a group of one."""
    if isinstance(weight, DTensor):
        mesh, placements = weight.device_mesh, weight.placements
        assert all(placement.is_replicate() or placement.is_shard(0) for placement in placements), 'FSDP2 divides weights by rows'
        groups = {placement.is_shard(): mesh.get_group(dim) for dim, placement in enumerate(placements) if mesh.size(dim) > 1}
        return groups.get(True), groups.get(False)
    several = distributed.is_initialized() and distributed.get_world_size() > 1
    return None, distributed.group.WORLD if several else None


def rows_by_part(num_rows: int, num_parts: int) -> list[int]:
    """How many rows each rank has of a matrix that FSDP2 divides: equally many, rounded up, and the last ones what is left."""
    most = -(-num_rows // num_parts)
    return [min(most, max(0, num_rows - part * most)) for part in range(num_parts)]


def _gather_rows(shards: Sequence[Tensor], shapes: Sequence[torch.Size], group: distributed.ProcessGroup, part: int) -> Tensor | None:
    """Return the `part`-th of several matrices, whole, of which each rank has the rows in `shards`; None if there are fewer."""
    given = [shards[index].numel() if index < len(shards) else 0 for index in range(group.size())]
    taken = [0] * group.size()
    if part < len(shapes):
        taken = [rows * shapes[part][1] for rows in rows_by_part(shapes[part][0], group.size())]
    whole = shards[0].new_empty(sum(taken))
    distributed.all_to_all_single(whole, torch.cat([shard.flatten() for shard in shards]), taken, given, group=group)
    return whole.view(shapes[part]) if part < len(shapes) else None


def _scatter_rows(whole: Tensor | None, like: Sequence[Tensor], dtype: torch.dtype, group: distributed.ProcessGroup) -> list[Tensor]:
    """Return this rank's rows of each matrix, with the shapes of `like`; the inverse of `_gather_rows`."""
    given = [0] * group.size() if whole is None else [rows * whole.shape[1] for rows in rows_by_part(whole.shape[0], group.size())]
    taken = [like[index].numel() if index < len(like) else 0 for index in range(group.size())]
    sent = like[0].new_empty(0, dtype=dtype) if whole is None else whole.flatten()
    shards = like[0].new_empty(sum(taken), dtype=dtype)
    distributed.all_to_all_single(shards, sent, taken, given, group=group)
    return [shard.view_as(one) for shard, one in zip(shards.split(taken[: len(like)]), like, strict=True)]
