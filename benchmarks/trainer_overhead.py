"""What do Composer, the callbacks and the loader add to a step?

    python -m benchmarks.trainer_overhead [--unet shapes] [--micro-batch 8] [--rounds 6] [--out trainer_overhead.jsonl]

Three ways to take the same step (model, batch size, clipping, AdamW, EMA): a bare loop on one batch; our Trainer as `train.py` builds it, with its
callbacks, loggers and the loader on synthetic latents; and the same with stock `composer.Trainer` in its place. They take turns, a segment
of steps each. The overhead is the median over the rounds of the difference to the bare loop. Beside it stand that of the fastest segments, since
other work on the machine can only add, and that of the host: the processor's time for the thread that trains, which other work hardly changes.
Start and end of a segment, where epochs begin and checkpoints are written, are not timed.

Host synchronisations are counted apart, in steps between two log records and in those that log: on a GPU each makes the host wait.
"""

from __future__ import annotations

from benchmarks.measured import add_by_device, add_setting, command
from diffusion.common.arguments import positive_int

DEFAULTS = {
    'cuda': {'unet': 'sd2-base', 'resolution': 256, 'micro_batch': 64, 'steps': 20},
    'cpu': {'unet': 'shapes', 'resolution': 64, 'micro_batch': 8, 'steps': 8},
}


def main() -> None:
    parser = command('trainer_overhead', __doc__)
    add_setting(parser, DEFAULTS)
    add_by_device(parser, DEFAULTS, '--steps', 'of a segment', type=positive_int)
    parser.add_argument('--rounds', type=positive_int, default=6, help='segments of each way (default %(default)s)')
    parser.add_argument('--workers', type=int, default=1, help='loader processes (default %(default)s)')
    args = parser.parse_args()
    from benchmarks.measuring.trainer_overhead import run  # imports torch, so after the arguments are read
    from benchmarks.timing import fill_in

    fill_in(args, DEFAULTS)
    run(args)


if __name__ == '__main__':
    main()
