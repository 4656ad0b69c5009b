"""Measure an EMA update against Composer's, on the same weights in the same run.

    python -m benchmarks.ema [--unet sd2-base] [--repeats 10] [--out ema.jsonl]

Time, memory traffic and memory. Composer 0.32 averages tensor by tensor with temporaries; ours is one `torch._foreach_lerp_`. Two counts of
memory, each beyond the weights themselves: what the average holds between updates, by its tensors' storages, and the highest that the
device's memory (the resident set on a CPU) rose above the start while the average was made and updated once.
Needs three copies of the weights and some: 11 GB for sd2-base.
"""

from __future__ import annotations

from benchmarks.measured import command
from diffusion.common.arguments import positive_int


def main() -> None:
    parser = command('ema', __doc__)
    parser.add_argument('--unet', default='sd2-base', help='configuration in diffusion/families/networks/ (default %(default)s)')
    parser.add_argument('--repeats', type=positive_int, default=10, help='updates to time (default %(default)s)')
    args = parser.parse_args()
    from benchmarks.measuring.ema import run  # imports torch, so after the arguments are read

    run(args)


if __name__ == '__main__':
    main()
