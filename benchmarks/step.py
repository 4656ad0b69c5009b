"""Measure a training step, and what each optimization gains.

    python -m benchmarks.step [--unet sd2-base] [--resolution 256] [--micro-batch 64] [--kind latents] [--out step.jsonl]

An ablation: each row adds one optimization to the row above, from the loop of diffusers' own example (fp32 weights under autocast, NCHW, eager
attention, AdamW as PyTorch makes it) to what `train.py` does. Inside the step: text encoder (and with `--kind images` the VAE), noising,
U-Net forward and backward, clipping, AdamW, one micro-batch on one GPU; no loader. The weights and the data are random.

MFU = images/s x counted FLOP of the U-Net's forward and backward pass per image / dense 16-bit peak of the GPU; empty where that is unknown.
Compilation and the first steps are not timed. On a GPU each row runs by itself and is written to --out as soon as it is measured, and one that does
not fit stays in the table and says so; on a CPU the rows take turns and are written at the end.
OMP_NUM_THREADS=1 makes a CPU that others use too less noisy.
"""

from __future__ import annotations

from benchmarks.measured import add_by_device, add_setting, command
from benchmarks.optimizations import OPTIMIZATIONS
from diffusion.common.arguments import positive_int

DEFAULTS = {
    'cuda': {'unet': 'sd2-base', 'resolution': 256, 'micro_batch': 64, 'steps': 50, 'warmup': 10},
    'cpu': {'unet': 'tiny', 'resolution': 32, 'micro_batch': 16, 'steps': 50, 'warmup': 3},
}


def main() -> None:
    parser = command('step', __doc__)
    add_setting(parser, DEFAULTS)
    parser.add_argument('--kind', choices=('latents', 'images'), default='latents', help='images: the VAE runs in the step (default %(default)s)')
    parser.add_argument('--only', nargs='+', metavar='ROW', choices=[optimization.name for optimization in OPTIMIZATIONS], help='these rows')
    add_by_device(parser, DEFAULTS, '--steps', 'to measure', type=positive_int)
    add_by_device(parser, DEFAULTS, '--warmup', 'steps before, on a GPU', type=positive_int)
    parser.add_argument('--compile', action='store_true', help='compile also on a CPU: minutes a row')
    args = parser.parse_args()
    from benchmarks.measuring.step import run  # imports torch, so after the arguments are read
    from benchmarks.timing import fill_in

    fill_in(args, DEFAULTS)
    run(args)


if __name__ == '__main__':
    main()
