"""Judge runs by the rules of MLPerf Training's Stable Diffusion benchmark, and write their logs in its format.

    composer train.py benchmarks/mlperf/stable-diffusion.yaml name=mlperf-0 seed=SEED data.streams.train.local=MOMENTS    train, ten times
    python -m diffusion.evaluate CHECKPOINT --protocol mlperf ... --out RUN/evaluations/NAME                             score its checkpoints
    python -m benchmarks.mlperf RUN [RUN ...] --out FOLDER [--division open] [--org NAME]                                 logs and verdict

FOLDER gets result_0.txt, result_1.txt ..., a log for each run, which python -m mlperf_logging.compliance_checker --ruleset 5.0.0 accepts. Printed
are the samples and minutes of each run to FID <= 90 and CLIP >= 0.15 and, of ten runs, the result and whether they converge no sooner than the
reference. The clock starts with the first process and stops at the first checkpoint that passes; restarts are on it. A run whose recipe is not
the benchmark's is refused with a list of what differs; --rehearsal takes it, to try the mode out, and gives no result.
"""

from pathlib import Path

from diffusion.common.command_line import CommandParser
from diffusion.common.text import print_page
from diffusion.contracts.errors import run_command


def main() -> int:
    parser = CommandParser('benchmarks.mlperf', __doc__)
    parser.add_argument('runs', nargs='+', type=Path, metavar='RUN', help='run folders: ten for a result')
    parser.add_argument('--out', required=True, type=Path, metavar='FOLDER', help='for the logs; those of an earlier call are replaced')
    parser.add_argument('--division', choices=('open', 'closed'), default='open', help='as which the logs are marked (default: %(default)s)')
    parser.add_argument('--org', default='', metavar='NAME', help='whose logs they are')
    parser.add_argument('--cache-cleared', action='store_true', help="the system's caches were cleared before each run, as the rules ask")
    parser.add_argument('--rehearsal', action='store_true', help='take any recipe, and give no result')
    args = parser.parse_args()

    def judge() -> None:
        from benchmarks.mlperf.log import Submission, log_lines
        from benchmarks.mlperf.runs import read_run
        from benchmarks.mlperf.verdict import verdict_on
        from diffusion.common.files import write_text

        runs = [read_run(folder, args.rehearsal) for folder in args.runs]
        text = verdict_on(runs, args.rehearsal)
        submission = Submission(args.division, args.org, args.cache_cleared)
        logs = ['\n'.join(log_lines(run, submission)) + '\n' for run in runs]
        args.out.mkdir(parents=True, exist_ok=True)
        for old in args.out.glob('result_*.txt'):
            old.unlink()
        for number, log in enumerate(logs):
            write_text(args.out / f'result_{number}.txt', log)
        print_page(text)

    return run_command(judge, out=args.out, remedy='name another FOLDER')


if __name__ == '__main__':
    raise SystemExit(main())
