"""Write an HTML report of a run so far: samples, losses, throughput, time and money; or a comparison of several runs.

    python -m diffusion.report RUN_FOLDER
    python -m diffusion.report RUN_FOLDER RUN_FOLDER ... [--out FILE]

Reads `recipe.yaml`, `environment.json`, `log.jsonl`, `events.jsonl`, `samples/` and, where they exist, `export/`, `generated/` and `judge.json`.
One run: writes RUN_FOLDER/report.html. Several: overlays their curves, shows their samples side by side and lists the fields in which their
recipes differ, in FILE (default: comparison.html next to the first run's folder).
The page is one file. Works while a run trains. Exit code 2 if a RUN_FOLDER is not the folder of a run.
"""

from __future__ import annotations

from pathlib import Path

from diffusion.common.arguments import CommandParser
from diffusion.contracts.endings import run_command


def main() -> int:
    parser = CommandParser('diffusion.report', __doc__)
    parser.add_argument('runs', type=Path, nargs='+', metavar='RUN_FOLDER')
    parser.add_argument('--out', type=Path, metavar='FILE', help='the page of a comparison')
    args = parser.parse_args()
    if args.out is not None and len(args.runs) == 1:
        parser.error('--out is for a comparison of several runs; the report of one is in its folder')
    from diffusion.monitoring.report.comparison import write_comparison  # after the arguments: it draws with Matplotlib
    from diffusion.monitoring.report.run_page import write_report

    def work() -> None:
        page = write_report(args.runs[0]) if len(args.runs) == 1 else write_comparison(args.runs, args.out)
        print(f'report: {page}')

    return run_command(work)


if __name__ == '__main__':
    raise SystemExit(main())
