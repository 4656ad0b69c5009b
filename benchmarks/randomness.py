"""Where should a batch's noise be drawn? What each way costs, and which share of a training step that is.

    python -m benchmarks.randomness [--unet sd2-base] [--resolution 256] [--batch 64] [--out randomness.jsonl]

Noise of a sample that is a function of (seed, epoch, sample id) leaves nothing to save and nothing that the number of GPUs could change. It can be
drawn on the device (as training does: eagerly, or compiled into one kernel), or in the loader's workers by a generator that is seeded
for each sample. `torch.randn` is the floor: fast, and keyed by nothing. A step needs two draws, the VAE's posterior and the noise.
"""

from __future__ import annotations

from benchmarks.measured import add_by_device, command
from diffusion.common.arguments import positive_int
from diffusion.encoders.sizes import KINDS

DEFAULTS = {
    'cuda': {'unet': 'sd2-base', 'resolution': 256, 'batch': 64},
    'cpu': {'unet': 'shapes', 'resolution': 64, 'batch': 16},
}


def main() -> None:
    parser = command('randomness', __doc__)
    add_by_device(parser, DEFAULTS, '--unet', 'whose step is the measure', choices=sorted(KINDS))
    add_by_device(parser, DEFAULTS, '--resolution', 'px', type=positive_int)
    add_by_device(parser, DEFAULTS, '--batch', 'samples', type=positive_int)
    parser.add_argument('--rounds', type=positive_int, default=20, help='of ten draws each (default %(default)s)')
    parser.add_argument('--compile', action='store_true', help='compile also on a CPU: half a minute')
    args = parser.parse_args()
    from benchmarks.measuring.randomness import run  # imports torch, so after the arguments are read
    from benchmarks.timing import fill_in

    fill_in(args, DEFAULTS)
    run(args)


if __name__ == '__main__':
    main()
