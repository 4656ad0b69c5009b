"""Updates of an average by Composer and by ours, and the memory that they take."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from typing import Any

import torch
from composer.algorithms.ema.ema import EMAParameters, compute_ema
from diffusers import UNet2DConditionModel
from torch import Tensor

from benchmarks.measured import print_table, record
from benchmarks.timing import device, forget_peak_memory, free_memory, interleaved, memory_bytes, peak_memory_bytes
from diffusion.cost.hardware import device_name
from diffusion.families.registry import build_network
from diffusion.training.ema import EMA

HALF_LIFE, SMOOTHING = 6931, 0.9999
# Of an update, each operation reading its operands and writing its result, 4 bytes an element:
# e * s (8), p * (1 - s) (8), their sum (12), copy_ (8); and lerp_ reads two and writes one.
BYTES_PER_PARAMETER = {'Composer': 36, 'ours': 12}


def composers(unet: UNet2DConditionModel) -> tuple[Callable[[], None], Iterable[Tensor]]:
    """An update by Composer, and the tensors that it keeps."""
    average = EMAParameters(unet)
    tensors = [*average.named_parameters_dict.values(), *average.named_buffers_dict.values()]
    return lambda: compute_ema(unet, average, SMOOTHING), tensors


def ours(unet: UNet2DConditionModel) -> tuple[Callable[[], None], Iterable[Tensor]]:
    """An update by `diffusion.training.ema`, and the tensors that it keeps."""
    ema = EMA(HALF_LIFE)
    ema.update(unet, SMOOTHING)
    assert ema.average is not None
    return lambda: ema.update(unet, SMOOTHING), ema.average.values()


WAYS = {'Composer': composers, 'ours': ours}


def extra_memory(way: str, unet: UNet2DConditionModel) -> dict[str, int]:
    """Bytes held by the average, and the peak above what was there before."""
    free_memory()
    before = memory_bytes()
    forget_peak_memory()
    update, tensors = WAYS[way](unet)
    update()
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return {'held_bytes': sum(storages.values()), 'peak_extra_bytes': peak_memory_bytes() - before}


def measure(unet_name: str, repeats: int) -> list[dict[str, Any]]:
    """A row for each way."""
    with torch.device(device()):
        unet = build_network(unet_name)
    num_parameters = sum(parameter.numel() for parameter in unet.parameters())
    memory = {way: extra_memory(way, unet) for way in WAYS}
    timings = interleaved({way: make(unet)[0] for way, make in WAYS.items()}, repeats)
    rows: list[dict[str, Any]] = []
    for way, timing in timings.items():
        traffic_bytes = BYTES_PER_PARAMETER[way] * num_parameters
        row = {'benchmark': 'ema', 'way': way, 'unet': unet_name, 'num_parameters': num_parameters, 'median_sec': timing.median_sec}
        row |= {'spread': timing.spread, 'repeats': repeats, 'times_as_fast': timings['Composer'].median_sec / timing.median_sec}
        row |= {'traffic_bytes': traffic_bytes, 'bytes_per_sec': traffic_bytes / timing.median_sec, **memory[way]}
        rows.append(row | {'copies_held': row['held_bytes'] / (4 * num_parameters), 'copies_peak': row['peak_extra_bytes'] / (4 * num_parameters)})
    return rows


def run(args: argparse.Namespace) -> None:
    """Measure, print a table and record its rows."""
    rows = measure(args.unet, args.repeats)
    print(f'{args.unet}, {rows[0]["num_parameters"]:,} parameters, {device_name()}, torch {torch.__version__}')
    header = ['', 'ms', 'spread', 'times as fast', 'GB moved', 'GB/s', 'copies held', 'copies at peak']
    keys = ('times_as_fast', 'traffic_bytes', 'bytes_per_sec', 'copies_held', 'copies_peak')
    scale = {'traffic_bytes': 1e-9, 'bytes_per_sec': 1e-9}
    print_table(
        header, [[row['way'], row['median_sec'] * 1e3, f'{row["spread"]:.0%}', *(row[key] * scale.get(key, 1.0) for key in keys)] for row in rows]
    )
    record(args.out, rows)
