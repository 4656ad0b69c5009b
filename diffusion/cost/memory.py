"""Memory of a GPU in training, by arithmetic: state, and the number of samples that fit next to it. No torch: a laptop can plan a run.

Activations are counted by families/counting/activations.py. The search on the GPU itself (`batch.micro_size: auto`) is in training/micro_batch.py.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

MEMORY_SHARE = 0.94  # of a GPU; the rest is for fragments, NCCL and cuDNN's workspaces


def num_shards(sharding: str, world_size: int, local_world_size: int) -> int:
    """Return the number of GPUs among which the weights and their state are divided, by the recipe's `train.sharding`."""
    return {'ddp': 1, 'zero2': world_size, 'hsdp': local_world_size}[sharding]


@dataclass(frozen=True)
class State:
    """Bytes that one GPU holds from step to step or for the length of one, apart from activations."""

    weights: int
    gradients: int
    adam: int
    ema: int
    working_copies: int
    """bf16 copies of the weights that forward and backward compute with, and under zero2 and hsdp without `bf16` the gathered fp32 weights."""
    buckets: int
    """Buffers in which DDP averages gradients."""

    @property
    def total(self) -> int:
        return sum(asdict(self).values())


def state(
    num_parameters: int, sharding: str, precision: str, num_gpus: int, gpus_per_node: int = 8, averaged: bool = True, accumulates: bool = False
) -> State:
    """Compute the state by the recipe's `train.sharding` and `train.precision`.

    Args:
        averaged: the average of the weights is on the GPU.
        accumulates: there are several micro-batches a step; FSDP2 keeps whole gradients until the last of them.
    """
    shards = num_shards(sharding, num_gpus, min(num_gpus, gpus_per_node))
    share = -(-num_parameters // shards)
    copies = {'amp_bf16': 2, 'bf16': 2, 'fp32': 0}[precision] + (4 if sharding != 'ddp' and precision != 'bf16' else 0)
    with_ddp = sharding == 'ddp' and precision != 'bf16' and num_gpus > 1  # FSDP2 reduces block by block instead
    return State(
        weights=4 * share,
        gradients=4 * (num_parameters if accumulates else share),
        adam=8 * share,
        ema=4 * share if averaged else 0,
        working_copies=copies * num_parameters,
        buckets=4 * num_parameters if with_ddp else 0,
    )


def fitting(gpu_gb: float, held_bytes: int, per_sample_bytes: int) -> int:
    """Return the largest micro-batch for which state and activations fit, or 0."""
    return max(0, int((gpu_gb * 1e9 * MEMORY_SHARE - held_bytes) // per_sample_bytes))


def divisors(number: int) -> list[int]:
    """Return all divisors, from the smallest."""
    return [size for size in range(1, number + 1) if number % size == 0]
