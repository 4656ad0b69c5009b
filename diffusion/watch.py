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
from typing import Literal

from pydantic import PositiveFloat, PositiveInt

from diffusion.common.command_line import Guidance, Prompts, Seed, option, positional
from diffusion.common.processes import quick_imports
from diffusion.contracts.errors import INTERRUPTED, run_command
from diffusion.faults import preemption


class WatchRequest(Prompts):
    """Run to follow, and what to draw from its checkpoints."""

    run: str = positional('RUN', 'run folder, checkpoint folder, or URL')
    out: str | None = option(None, 'folder or URL for the grids (default: `samples`, next to `checkpoints`)', 'FOLDER')
    weights: Literal['ema', 'training'] = option('ema', 'which weights (default ema; as trained until there is an EMA)')
    guidance: Guidance | None = option(None, "guidance scale (default: the recipe's)")
    steps: PositiveInt | None = option(None, "sampling steps (default: the recipe's)")
    seed: Seed | None = option(None, "starting noise (default: the recipe's)")
    every_sec: PositiveFloat = option(60.0, 'seconds between looks', 'SEC')
    once: bool = option(False, 'draw the newest checkpoint and end')
    overrides: list[str] = positional(
        'key=value', "changes to the run's recipe, such as model.encoders.source=FOLDER if it is elsewhere here", default=[]
    )


def main() -> int:
    args = WatchRequest.parse('diffusion.watch', __doc__)

    def work() -> None:
        prompts = args.prompts()
        with preemption.kept(), quick_imports():  # of torch, so after the arguments are read
            from diffusion.watching.watcher import Watcher

        numbered = {f'p{number}': prompt for number, prompt in enumerate(prompts, start=1)}
        asked = {'prompts': numbered or None, 'guidance': args.guidance, 'steps': args.steps, 'seed': args.seed}
        samples = {name: value for name, value in asked.items() if value is not None}
        watcher = Watcher(args.run, args.out, samples, args.weights, args.every_sec, args.overrides)
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
