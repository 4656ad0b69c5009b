"""Measure an EMA update against Composer's, on the same weights in the same run.

    python -m benchmarks.ema [--network sd2-base] [--repeats 10] [--out ema.jsonl]

Time, memory traffic and memory. Composer 0.32 averages tensor by tensor with temporaries; ours is one `torch._foreach_lerp_`. Two counts of
memory, each beyond the weights themselves: what the average holds between updates, by its tensors' storages, and the highest that the
device's memory (the resident set on a CPU) rose above the start while the average was made and updated once.
Needs three copies of the weights and some: 11 GB for sd2-base.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from benchmarks.measured import command, print_table, record
from diffusion.common.arguments import positive_int

if TYPE_CHECKING:  # imported by the functions that use it: --help answers at once
    from torch import Tensor, nn

HALF_LIFE, SMOOTHING = 6931, 0.9999
# Of an update, each operation reading its operands and writing its result, 4 bytes an element:
# e * s (8), p * (1 - s) (8), their sum (12), copy_ (8); and lerp_ reads two and writes one.
BYTES_PER_PARAMETER = {'Composer': 36, 'ours': 12}


def composers(network: nn.Module) -> tuple[Callable[[], None], Iterable[Tensor]]:
    """An update by Composer, and the tensors that it keeps."""
    from composer.algorithms.ema.ema import EMAParameters, compute_ema

    average = EMAParameters(network)
    tensors = [*average.named_parameters_dict.values(), *average.named_buffers_dict.values()]
    return lambda: compute_ema(network, average, SMOOTHING), tensors


def ours(network: nn.Module) -> tuple[Callable[[], None], Iterable[Tensor]]:
    """An update by `diffusion.training.ema`, and the tensors that it keeps."""
    from diffusion.recipe.averaging import Profile
    from diffusion.training.ema import EMA

    ema = EMA([Profile.of_half_life(HALF_LIFE)])
    ema.update(network, SMOOTHING)
    return lambda: ema.update(network, SMOOTHING), ema.average.values()


WAYS = {'Composer': composers, 'ours': ours}


def extra_memory(way: str, network: nn.Module) -> dict[str, int]:
    """Bytes held by the average, and the peak above what was there before."""
    from benchmarks.timing import forget_peak_memory, free_memory, memory_bytes, peak_memory_bytes

    free_memory()
    before = memory_bytes()
    forget_peak_memory()
    update, tensors = WAYS[way](network)
    update()
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return {'held_bytes': sum(storages.values()), 'peak_extra_bytes': peak_memory_bytes() - before}


def measure(name: str, repeats: int) -> list[dict[str, Any]]:
    """A row for each way, of a network by its name."""
    import torch

    from benchmarks.timing import device, interleaved
    from diffusion.families.registry import build_network

    with torch.device(device()):
        network = build_network(name)
    num_parameters = sum(parameter.numel() for parameter in network.parameters())
    memory = {way: extra_memory(way, network) for way in WAYS}
    timings = interleaved({way: make(network)[0] for way, make in WAYS.items()}, repeats)
    rows: list[dict[str, Any]] = []
    for way, timing in timings.items():
        traffic_bytes = BYTES_PER_PARAMETER[way] * num_parameters
        row = {'benchmark': 'ema', 'way': way, 'network': name, 'num_parameters': num_parameters, 'median_sec': timing.median_sec}
        row |= {'spread': timing.spread, 'repeats': repeats, 'times_as_fast': timings['Composer'].median_sec / timing.median_sec}
        row |= {'traffic_bytes': traffic_bytes, 'bytes_per_sec': traffic_bytes / timing.median_sec, **memory[way]}
        rows.append(row | {'copies_held': row['held_bytes'] / (4 * num_parameters), 'copies_peak': row['peak_extra_bytes'] / (4 * num_parameters)})
    return rows


def main() -> None:
    parser = command('ema', __doc__)
    parser.add_argument('--network', default='sd2-base', help='configuration in diffusion/families/networks/ (default %(default)s)')
    parser.add_argument('--repeats', type=positive_int, default=10, help='updates to time (default %(default)s)')
    args = parser.parse_args()
    import torch

    from diffusion.cost.hardware import device_name

    rows = measure(args.network, args.repeats)
    print(f'{args.network}, {rows[0]["num_parameters"]:,} parameters, {device_name()}, torch {torch.__version__}')
    lines = [
        [row['way'], row['median_sec'] * 1e3, f'{row["spread"]:.0%}', row['times_as_fast'], row['traffic_bytes'] / 1e9, row['bytes_per_sec'] / 1e9,
         row['copies_held'], row['copies_peak']]
        for row in rows
    ]  # fmt: skip
    print_table(['', 'ms', 'spread', 'times as fast', 'GB moved', 'GB/s', 'copies held', 'copies at peak'], lines)
    record(args.out, rows)


if __name__ == '__main__':
    main()
