"""Ways to draw a batch's noise, and their share of a training step."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.ablation import build_step, possible, recipe_of
from benchmarks.levers import ladder
from benchmarks.measured import print_table, record
from benchmarks.timing import device, interleaved, timed
from diffusion.cost.hardware import device_name
from diffusion.datasets.keyed_random import Draw, normal
from diffusion.encoders.random_encoders import write_stand_in
from diffusion.training.compilation import compiled

DRAWS_PER_STEP = 2


def by_numpy(key: Tensor, shape: tuple[int, ...]) -> Tensor:
    """What a worker would do with NumPy: a Philox generator for each sample."""
    generators = (np.random.Philox(key=[epoch, sample_id], counter=[0, 0, 0, occurrence]) for epoch, sample_id, occurrence in key.tolist())
    samples = [np.random.Generator(one).standard_normal(shape, dtype=np.float32) for one in generators]
    return torch.from_numpy(np.stack(samples))


def by_torch(key: Tensor, shape: tuple[int, ...]) -> Tensor:
    """What a worker would do with PyTorch: its generator seeded for each sample."""
    generator = torch.Generator()
    seeds = [occurrence << 56 | epoch << 40 | sample_id for epoch, sample_id, occurrence in key.tolist()]
    return torch.stack([torch.randn(shape, generator=generator.manual_seed(seed)) for seed in seeds])


def ways(key: Tensor, shape: tuple[int, ...], may_compile: bool) -> dict[str, Callable[[], Tensor]]:
    """Each a function that draws (B, *shape) float32."""
    host_key, draw = key.cpu(), compiled(normal)
    found = {
        'torch.randn on the device': lambda: torch.randn(len(key), *shape, device=key.device),
        'keyed, on the device, eager': lambda: normal(0, key, Draw.NOISE, shape),
        'keyed, on the device, compiled': lambda: draw(0, key, Draw.NOISE, shape),
        'keyed, in one worker, numpy Philox': lambda: by_numpy(host_key, shape),
        'keyed, in one worker, torch generator': lambda: by_torch(host_key, shape),
    }
    if not may_compile:
        del found['keyed, on the device, compiled']
    return found


def run(args: argparse.Namespace) -> None:
    """Measure, print a table and record its rows."""
    on_gpu = device().type == 'cuda'
    setting = {'unet': args.unet, 'resolution': args.resolution, 'kind': 'latents', 'micro_batch': args.batch}
    switches = possible(ladder()['+ encoders in bf16'], device(), may_compile=False)
    with tempfile.TemporaryDirectory() as encoders:
        write_stand_in(Path(encoders), args.unet)
        recipe = recipe_of(switches, encoders=Path(encoders), device=device(), **setting)
        _, batch, step = build_step(switches, recipe, device())
        step_sec = timed(step, steps=10, warmup=3).median_sec
    channels, height, width = batch['moments'].shape[1:]
    shape = (channels // 2, height, width)  # of the latents
    timings = interleaved(ways(batch['sample_key'], shape, args.compile or on_gpu), args.rounds, block=10)
    rows = [
        {
            'benchmark': 'randomness',
            'way': way,
            **setting,
            **asdict(timing),
            'samples_per_sec': args.batch / timing.median_sec,
            'eager_step_sec': step_sec,
            'share_of_step': DRAWS_PER_STEP * timing.median_sec / step_sec,
        }
        for way, timing in timings.items()
    ]
    print(
        f'{shape} for {args.batch} samples, {device_name()}; an eager step of {args.unet} takes {step_sec * 1e3:.1f} ms, {DRAWS_PER_STEP} draws in it'
    )
    keys = ('way', 'samples_per_sec')
    lines = [[*(row[key] for key in keys), row['median_sec'] * 1e3, f'{row["spread"]:.0%}', f'{row["share_of_step"]:.1%}'] for row in rows]
    print_table(['', 'samples/s', 'ms a batch', 'spread', 'of a step'], lines)
    record(args.out, rows)
