"""Memory of a GPU in training, by arithmetic: state, and the number of samples that fit next to it. No torch: a laptop can plan a run.

Activations are counted by families/counting/activations.py. The search on the GPU itself (`batch.micro_size: auto`) is in training/micro_batch.py.
"""

from diffusion.recipe.techniques import AdamWSettings, OptimizerSettings

MEMORY_SHARE = 0.94  # of a GPU; the rest is for fragments, NCCL and cuDNN's workspaces


def num_shards(sharding: str, world_size: int, local_world_size: int) -> int:
    """Return the number of GPUs among which the weights and their state are divided, by the recipe's `train.sharding`."""
    return {'ddp': 1, 'zero2': world_size, 'hsdp': local_world_size}[sharding]


def state_bytes(
    num_parameters: int,
    sharding: str,
    precision: str,
    num_gpus: int,
    gpus_per_node: int = 8,
    num_averages: int = 1,
    accumulates: bool = False,
    num_frozen: int = 0,
    optimizer: OptimizerSettings | None = None,
    num_in_matrices: int = 0,
) -> dict[str, int]:
    """Return what one GPU holds from step to step or for the length of one, apart from activations, by purpose.

    Args:
        num_parameters: that are trained.
        sharding, precision: the recipe's `train.sharding` and `train.precision`.
        num_averages: of the weights, on the GPU.
        accumulates: there are several micro-batches a step; FSDP2 keeps whole gradients until the last of them.
        num_frozen: parameters of the network that an adapter belongs to, in the precision that they are computed with.
        optimizer: what answers for it (`optimizer_of(recipe)`); None is AdamW.
        num_in_matrices: of the trained ones, parameters that it treats as matrices.
    """
    shards = num_shards(sharding, num_gpus, min(num_gpus, gpus_per_node))
    share = -(-num_parameters // shards)
    # In bf16, and under zero2 and hsdp without `bf16` the gathered fp32 weights.
    copies = {'amp_bf16': 2, 'bf16': 2, 'fp32': 0}[precision] + (4 if sharding != 'ddp' and precision != 'bf16' else 0)
    with_ddp = sharding == 'ddp' and precision != 'bf16' and num_gpus > 1  # it averages in buffers; FSDP2 reduces block by block instead
    return {
        'weights': 4 * share,
        'gradients': 4 * (num_parameters if accumulates else share),
        'optimizer state': (optimizer or AdamWSettings()).state_bytes(share, -(-num_in_matrices // shards)),
        'EMA': 4 * share * num_averages,
        'copies of the weights to compute with': copies * num_parameters,
        "DDP's buckets": 4 * num_parameters if with_ddp else 0,
        'frozen network': (4 if precision == 'fp32' else 2) * num_frozen,
    }


def divisors(number: int) -> list[int]:
    """Return all divisors, from the smallest."""
    return [size for size in range(1, number + 1) if number % size == 0]
