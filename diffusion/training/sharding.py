"""How the weights, gradients and optimizer state are spread over the GPUs, by the recipe's `train.sharding`.

    ddp     every GPU holds everything; gradients are averaged
    zero2   gradients, optimizer state, EMA and fp32 weights are divided among all GPUs (FSDP2, weights kept gathered from forward to backward)
    hsdp    as zero2 among the GPUs of a node, and the nodes are replicas: only 1/GPUs-per-node of the gradients crosses the network

`precision: bf16` needs FSDP2 also with `ddp`: its fp32 weights are the masters, and what forward and backward see is a bf16 copy that is
made once a step.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from composer.utils import FSDP2Config, dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from diffusion.cost.facts import num_shards


@dataclass
class HybridShard(FSDP2Config):
    """Composer's FSDP2 with a second dimension of the mesh, which its own configuration has no field for."""

    replicas: int = 1

    @property
    def data_parallel_replicate_degree(self) -> int | None:
        return self.replicas if self.replicas > 1 else None


def uses_fsdp(sharding: str, precision: str) -> bool:
    """Whether FSDP2 holds the weights, rather than the module itself."""
    return sharding != 'ddp' or precision == 'bf16'


def parallelism_config(sharding: str, precision: str, world_size: int, local_world_size: int) -> dict[str, Any] | None:
    """Argument of Composer's Trainer; None for DDP.

    It must be an FSDP2Config under the key `fsdp`: a dictionary there means FSDP1, and Composer 0.32 silently ignores the key `fsdp2`.
    """
    if not uses_fsdp(sharding, precision):
        return None
    config = HybridShard(
        replicas=world_size // num_shards(sharding, world_size, local_world_size),
        reshard_after_forward=False,  # ZeRO-2: gathering again for the backward pass saves memory that 866 M parameters do not need
        mixed_precision='DEFAULT' if precision == 'bf16' else 'FULL',
        state_dict_type='full',  # one file, which any other sharding, world size and `diffusion.export` can read
    )
    return {'fsdp': config}


def sync_gradients(model: nn.Module, sync: bool) -> None:
    """Whether the next backward pass of a sharded model ends in communication; of several micro-batches only the last needs to."""
    for module in model.children():
        if isinstance(module, FSDPModule):
            module.set_requires_gradient_sync(sync)
            module.set_reshard_after_backward(sync)  # until then the gathered weights serve the next micro-batch


def reshard(model: nn.Module) -> None:
    """Let go of gathered weights, which a forward pass without a backward pass leaves behind: they would not see a change of the weights."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def local(tensor: Tensor) -> Tensor:
    """This rank's shard, or the tensor itself; shares its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def gathered(shard: Tensor, like: Tensor) -> Tensor:
    """The whole of which `shard` is this rank's part, if `like` is divided in that way; a collective then."""
    if not isinstance(like, DTensor):
        return shard
    whole = DTensor.from_local(shard, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride())
    return whole.full_tensor()


def scattered(whole: Tensor, like: Tensor) -> Tensor:
    """This rank's part of what every rank has as a `whole`, divided and laid out as `like` is; on its device. No communication."""
    if not isinstance(like, DTensor):
        return torch.empty_like(like, dtype=whole.dtype).copy_(whole)
    return distribute_tensor(whole.to(like.device), like.device_mesh, like.placements, src_data_rank=None).to_local()


def gradient_norm(optimizers: Iterable[torch.optim.Optimizer]) -> Tensor:
    """Return the global norm of the gradients of all ranks' shards of what `optimizers` train, () on the device, without waiting for it."""
    weights = (weight for optimizer in optimizers for group in optimizer.param_groups for weight in group['params'])
    norm = torch.nn.utils.get_total_norm([weight.grad for weight in weights if weight.grad is not None])
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def all_finite(parameters: Iterable[nn.Parameter]) -> bool:
    """Whether every weight of every rank's shards is finite; waits for the device, and every rank must call it."""
    finite = torch.stack([torch.isfinite(local(parameter.detach())).all() for parameter in parameters]).all().float()
    dist.all_reduce(finite, 'MIN')
    return bool(finite)
