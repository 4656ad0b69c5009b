"""How much faster is our EMA update than Composer's, on the same weights in the same run?

    python -m benchmarks.ema [--unet sd2-base] [--repeats 10]

Composer 0.32 updates tensor by tensor with temporaries (36 bytes of memory traffic per parameter); ours is one
`torch._foreach_lerp_` (12 bytes). Prints both times, their ratio, and the hardware; runs on the GPU if there is one.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from composer.algorithms.ema.ema import EMAParameters, compute_ema

from diffusion.algorithms.ema import EMA
from diffusion.hardware import device_name
from diffusion.models.unet import build_unet


def median_sec(update: Callable[[], None], repeats: int) -> float:
    """Median wall time of an update, after one to warm up."""
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        update()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def main() -> None:
    parser = argparse.ArgumentParser(prog='python -m benchmarks.ema', description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--unet', default='sd2-base', help='configuration in diffusion/models/unets/ (default %(default)s)')
    parser.add_argument('--repeats', type=int, default=10, help='updates to time (default %(default)s)')
    args = parser.parse_args()
    device = 'cuda' if torch.cuda.is_available() else 'cpu'
    with torch.device(device):
        unet = build_unet(args.unet)
    num_parameters = sum(parameter.numel() for parameter in unet.parameters())
    ours, composers = EMA(half_life='6931ba'), EMAParameters(unet)
    ours.update(unet)
    our_sec = median_sec(lambda: ours.update(unet), args.repeats)
    composer_sec = median_sec(lambda: compute_ema(unet, composers, smoothing=0.9999), args.repeats)
    print(f'{args.unet}, {num_parameters:,} parameters, {device_name()}, torch {torch.__version__}')
    print(f'Composer {composer_sec * 1e3:.1f} ms, ours {our_sec * 1e3:.1f} ms, ratio {composer_sec / our_sec:.2f}')


if __name__ == '__main__':
    main()
