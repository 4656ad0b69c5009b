"""Ceilings of this machine, and what a step does once for all micro-batches and should run at that of memory: clipping, AdamW, the average."""

from collections.abc import Callable
from functools import partial

import torch

from benchmarks import ema
from benchmarks.checking.cases import Case, Setting, Values
from benchmarks.timing import device, on_gpu, timed
from diffusion.families.registry import build_network
from diffusion.training.gradient_guard import clipping_divisor
from diffusion.training.sharding import gradient_norm

# Read and written per float32 parameter. The norm reads the gradient; AdamW reads weight, gradient and two moments, and writes all of
# them, the gradient because it divides it by what clips it.
NORM_BYTES, ADAM_BYTES = 4, 32


def seconds(call: Callable[[], object]) -> float:
    """Median seconds of a call; many calls of microseconds are timed together."""
    return timed(call, *((100, 5) if on_gpu() else (3, 1))).median_sec


def ceilings(setting: Setting) -> list[Case]:
    return [Case('matmul', partial(matmul, 512 if setting.tiny else 8192)), Case('copy', partial(copy, 1 << (22 if setting.tiny else 30)))]


def matmul(side: int) -> Values:
    """Square, in bf16 on a GPU: the highest rate that any layer can reach."""
    dtype = torch.bfloat16 if on_gpu() else torch.float32
    a, b = (torch.randn(side, side, device=device(), dtype=dtype) for _ in range(2))
    sec = seconds(lambda: a @ b)
    return {'side': side, 'dtype': str(dtype), 'median_sec': sec, 'tflop_per_sec': 2 * side**3 / sec / 1e12}


def copy(count: int) -> Values:
    """Reads and writes each of `count` float32 once."""
    source = torch.randn(count, device=device())
    target = torch.empty_like(source)
    sec = seconds(lambda: target.copy_(source))
    return {'bytes': 8 * count, 'median_sec': sec, 'gb_per_sec': 8 * count / sec / 1e9}


def once_a_step(setting: Setting) -> list[Case]:
    return [
        Case('clipping + AdamW', partial(clip_and_step, setting), setting.sec(15)),
        Case('EMA', partial(average, setting), setting.sec(15)),
    ]


def clip_and_step(setting: Setting) -> Values:
    with torch.device(device()):
        unet = build_network(setting.network).to(memory_format=torch.channels_last)
    for parameter in unet.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer = torch.optim.AdamW(unet.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        optimizer.grad_scale = clipping_divisor(gradient_norm([optimizer]), 1.0)  # type: ignore[attr-defined]
        optimizer.step()

    timing = timed(step, *((2, 1) if setting.tiny else (50, 5)))
    num_bytes = (NORM_BYTES + ADAM_BYTES) * sum(parameter.numel() for parameter in unet.parameters())
    return {'ms': timing.median_sec * 1e3, 'spread': timing.spread, 'traffic_bytes': num_bytes, 'gb_per_sec': num_bytes / timing.median_sec / 1e9}


def average(setting: Setting) -> Values:
    """Our update, next to Composer's."""
    composers, ours = ema.measure(setting.network, 2 if setting.tiny else 20)
    return {
        'ms': ours['median_sec'] * 1e3,
        'spread': ours['spread'],
        'composer_ms': composers['median_sec'] * 1e3,
        'traffic_bytes': ours['traffic_bytes'],
        'gb_per_sec': ours['bytes_per_sec'] / 1e9,
        'copies_held': ours['copies_held'],
    }
