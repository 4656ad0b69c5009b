"""Follow a run from another process and draw sample grids from its checkpoints, so that training need not stop for them.

    python -m diffusion.watch RUN [--prompt "an owl at dusk" ...] [--prompts-file FILE] [--out FOLDER] [key=value ...]

RUN is a run folder, its checkpoint folder, or the URL of its checkpoint folder. From each new whole checkpoint a grid is drawn, `ba00001000-ema.png`,
with the prompts and settings of the recipe's log.samples unless told otherwise: the same images that the run itself would draw. Grids go to `samples`
next to `checkpoints`, in object storage too, where `diffusion.report` finds them; and to W&B if the run logs there, as a run of their own in its
group. The checkpoint folder is only read. Set log.samples.every=null in the training run: it then never waits for a grid.

Of several new checkpoints the newest is drawn and the others are counted. Ends by itself when the run's last checkpoint is drawn (of a run whose
length is one epoch: with Ctrl-C). The same command again continues.

Exit codes: 0 the last checkpoint is drawn, or with --once the newest; 2 the input is wrong; 3 with --once: no checkpoint yet, or the storage does not
answer; 130 stopped by Ctrl-C or SIGTERM.
"""

import signal
import sys

from diffusion.common.arguments import CommandParser, add_prompts, asked_prompts, guidance_scale, positive_float, positive_int, seed_number
from diffusion.common.processes import quick_imports
from diffusion.contracts.errors import INTERRUPTED, run_command
from diffusion.faults import preemption


def main() -> int:
    parser = CommandParser('diffusion.watch', __doc__)
    parser.add_argument('run', metavar='RUN', help='run folder, checkpoint folder, or URL')
    add_prompts(parser)
    parser.add_argument('--out', metavar='FOLDER', help='folder or URL for the grids (default: `samples`, next to `checkpoints`)')
    parser.add_argument(
        '--weights', choices=('ema', 'training'), default='ema', help='which weights (default %(default)s; as trained until there is an EMA)'
    )
    parser.add_argument('--guidance', type=guidance_scale, help="guidance scale (default: the recipe's)")
    parser.add_argument('--steps', type=positive_int, help="sampling steps (default: the recipe's)")
    parser.add_argument('--seed', type=seed_number, help="starting noise (default: the recipe's)")
    parser.add_argument('--every-sec', type=positive_float, default=60.0, metavar='SEC', help='seconds between looks (default %(default)g)')
    parser.add_argument('--once', action='store_true', help='draw the newest checkpoint and end')
    parser.add_argument(
        'overrides', nargs='*', metavar='key=value', help="changes to the run's recipe, such as model.encoders.source=FOLDER if it is elsewhere here"
    )
    args = parser.parse_intermixed_args()

    def work() -> None:
        prompts = asked_prompts(args)
        with preemption.kept(), quick_imports():  # of torch, so after the arguments are read
            from diffusion.watching.painting import Asked
            from diffusion.watching.watcher import Watcher

        asked = Asked(prompts, args.guidance, args.steps, args.seed)
        watcher = Watcher(args.run, args.out, asked, args.weights, args.every_sec, args.overrides)
        try:
            watcher.once() if args.once else watcher.follow()
        finally:
            watcher.close()
            if watcher.folder is not None:
                print(watcher.summary())

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the same as Ctrl-C
    try:
        return run_command(work, also=(OSError,))
    except KeyboardInterrupt:
        print('stopped; the same command continues', file=sys.stderr)
        return INTERRUPTED


if __name__ == '__main__':
    raise SystemExit(main())
