"""Do one job on this machine: the whole of a worker without a queue, for Kubernetes, Slurm, SkyPilot or a terminal.

    python -m diffusion.fleet run JOB.yaml --work DIR [--outputs URL-or-folder] [--gpus N] [--epoch N]

JOB.yaml is what `submit` takes. Inputs may be folders or files of this machine, by their paths from the folder of JOB.yaml:
`inputs: {subject: photos/timber}`; an address (`url`) has `sha256` and `bytes` besides, a folder has neither. `submit --keys` prints all keys.

Fetches the job's inputs, resumes from the newest published checkpoint, trains, publishes each new checkpoint, exports, draws `validation.prompts`,
and hands over the result below OUTPUTS/JOB, where JOB is the job's name or the file's. Run the same command again, on any machine, to resume.
SIGTERM saves first. If two run at the same time the older one ends with 73 when it wants to publish.

Exit codes are those of train.py: 0 finished (also if it already was), 64 the job is wrong, 65 its data are, 70 crash, 73 another attempt has begun,
75 stopped and saved, 76 stalled or storage failing: run it elsewhere, 77 the loss stayed NaN; docs/reliability.md says what to do.
"""

from collections.abc import Sequence
from pathlib import Path

from diffusion.common.arguments import CommandParser, positive_float, positive_int
from diffusion.common.text import print_message
from diffusion.contracts.errors import CRASH, STALLED, train_code


def main(arguments: Sequence[str]) -> int:
    parser = CommandParser('diffusion.fleet run', __doc__)
    parser.add_argument('job', type=Path, metavar='JOB.yaml', help='the job')
    parser.add_argument(
        '--work', type=Path, required=True, metavar='DIR', help='folder of this machine for files of the job, and for base models that stay'
    )
    parser.add_argument('--outputs', metavar='PREFIX', help="folder or URL that gets a folder JOB (default: the job's outputs.prefix)")
    parser.add_argument('--gpus', type=positive_int, default=1, metavar='N', help='processes, one a GPU (default %(default)s)')
    parser.add_argument(
        '--epoch', type=positive_int, metavar='N', help="the engine's number of this attempt, larger than of any before (default: the next one)"
    )
    parser.add_argument('--keep-gb', type=positive_float, default=50.0, metavar='GB', help='base models kept for later jobs (default %(default)g)')
    parser.add_argument('--recipes', type=Path, metavar='DIR', help="folder of recipes (default: this installation's)")
    args = parser.parse_args(arguments)

    from diffusion.fleet.attempts.attempt import Programs
    from diffusion.fleet.attempts.direct import RunOptions, run_job
    from diffusion.fleet.attempts.workplace import StopRequest
    from diffusion.fleet.jobs.checking import RECIPES

    options = RunOptions(args.job, args.work, args.outputs, args.epoch, args.recipes or RECIPES, args.keep_gb)
    stop = StopRequest()
    with stop.on_signals():
        try:
            return run_job(options, Programs.here(args.gpus), stop)
        except OSError as error:
            print_message(f'{args.work}: {error}')
            return STALLED
        except Exception as error:
            if (code := train_code(error)) == CRASH:
                raise
            print_message(error)
            return code
