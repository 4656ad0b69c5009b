"""Done once a step, for all micro-batches: clipping, AdamW, the average of the weights. Each moves bytes and computes almost nothing."""

from functools import partial

import torch

from benchmarks import ema
from benchmarks.checking.cases import Case, Setting, Values
from benchmarks.timing import device, timed
from diffusion.families.registry import build_network
from diffusion.training.gradient_guard import clipping_divisor
from diffusion.training.sharding import gradient_norm

# Read and written per float32 parameter. The norm reads the gradient; AdamW reads weight, gradient and two moments, and writes all of
# them, the gradient because it divides it by what clips it.
NORM_BYTES, ADAM_BYTES = 4, 32


def cases(setting: Setting) -> list[Case]:
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
