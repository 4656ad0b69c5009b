"""Write an HTML report of a run so far: samples, losses, throughput, time and money; or a comparison of several runs.

    python -m diffusion.report RUN_FOLDER [--out FILE]
    python -m diffusion.report RUN_FOLDER RUN_FOLDER ... [--out FILE]

Reads `recipe.yaml`, `environment.json`, `log.jsonl`, `events.jsonl`, `samples/` and, where they exist, `export/`, `generated/`, `judge.json` and
`evaluations/*/evaluation.json` (python -m diffusion.evaluate RUN_FOLDER ... --out RUN_FOLDER/evaluations/NAME).
One run: writes FILE, or RUN_FOLDER/report.html, which begins with what the run is at and what to do next. Several: lists the fields in which their
recipes differ, overlays their curves and shows their samples side by side, in FILE (default: comparison.html next to the first run's folder).
The page is one file. Works while a run trains. Exit code 2 if a RUN_FOLDER is not the folder of a run, or the page cannot be written.
"""

from collections.abc import Sequence
from pathlib import Path

from diffusion.common.command_line import Arguments, option, positional
from diffusion.contracts.errors import run_command


class ReportRequest(Arguments):
    """Runs, and the page about them."""

    runs: list[Path] = positional('RUN_FOLDER')
    out: Path | None = option(None, 'the page (default: report.html in the folder; of several runs as above)', 'FILE')


def main() -> int:
    args = ReportRequest.parse('diffusion.report', __doc__)
    first = args.runs[0].resolve()
    page = args.out or (first / 'report.html' if len(args.runs) == 1 else first.parent / 'comparison.html')
    out = page if args.out is not None or first.is_dir() else None  # else `write` says that it is no run
    return run_command(lambda: print(f'report: {write(args.runs, args.out)}'), out=out, remedy='name another place with --out FILE')


def write(runs: Sequence[Path], out: Path | None) -> Path:
    """Write the page and return its path.

    Raises:
        InputError: an evaluation of a checkpoint is damaged.
        RunError, RecipeError: a folder is not the folder of a run.
    """
    from diffusion.monitoring.report.pages import write_comparison, write_report  # draw with Matplotlib

    return write_report(runs[0], out) if len(runs) == 1 else write_comparison(runs, out)


if __name__ == '__main__':
    raise SystemExit(main())
