"""Report on measured throughput: scaling to more GPUs, days, GPU-hours and dollars; or compare published tables with our formulas.

    python -m benchmarks.report RESULTS.jsonl ... [--samples 204.8e6 | 256=1e9,512=2e9] [--gpus 16,32 | 16..128] [--price 2.49 | spot] [--gpu h200]
                                [--out FOLDER]
    python -m benchmarks.report --published NAME|all [--gpus 256] [--out FOLDER]

The first form reads rows of benchmarks.throughput (and, for their bars, of benchmarks.step); of several rows of a point the latest counts, and rows
that failed stay in the table. Rows that differ in the number of GPUs only are a series: a law of computation, exposed communication and fixed
overhead is fitted to it (diffusion/cost/scaling.py), and predicts more GPUs with its uncertainty. Days and dollars are those of --samples,
or else of the phases of Stable Diffusion 2 base for rows of its U-Net, and a million samples for others.

The second form compares every cell of a published table (benchmarks/published.yaml) with the formulas of this repository, and names
inconsistencies in the source.

Prints the report and writes report.md, PNGs and one self-contained report.html to FOLDER (default: next to the first file, or runs/reports/NAME).
Exit codes: 0 done; 1 a published cell does not come out as recorded; 2 the input is wrong. docs/cost.md explains what is printed.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from diffusion.common.arguments import CommandParser, add_prices, gpu_counts, positive_float
from diffusion.contracts.exit_codes import BAD_INPUT
from diffusion.cost.prices import load_asked


def samples(text: str) -> dict[int | None, int]:
    """Parse samples by resolution (an argparse type) in pixels, `256=1.1264e9,512=1.7408e9`; without one, `204.8e6`, that of the rows (None).

    Raises:
        argparse.ArgumentTypeError: something else.
    """
    amounts: dict[int | None, int] = {}
    for part in text.split(','):
        px, _, amount = part.rpartition('=')
        number = positive_float(amount)
        if number != int(number) or ('=' in part and not px.isdigit()) or (len(amounts) > 0 and (not px or None in amounts)):
            raise argparse.ArgumentTypeError(f"'{text}' is no number of samples; write 204.8e6, or by resolution 256=1.1264e9,512=1.7408e9")
        resolution = int(px) if px else None
        if resolution in amounts:
            raise argparse.ArgumentTypeError(f"'{text}' has {resolution} px twice")
        amounts[resolution] = int(number)
    return amounts


def parser() -> argparse.ArgumentParser:
    parser = CommandParser('benchmarks.report', __doc__, allow_abbrev=False)
    parser.add_argument('results', nargs='*', type=Path, metavar='RESULTS.jsonl')
    parser.add_argument('--published', metavar='NAME', help='a published table instead, such as anyscale-table-4, or all; another name lists them')
    parser.add_argument('--out', type=Path, metavar='FOLDER', help='where to write report.md, report.html and the figures')
    parser.add_argument(
        '--samples', type=samples, metavar='N', help='samples to train (steps x global batch), such as 204.8e6; '
        'of several resolutions 256=1.1264e9,512=1.7408e9',
    )  # fmt: skip
    parser.add_argument(
        '--gpus',
        type=gpu_counts,
        default=[],
        metavar='N,N',
        help='GPUs to predict; 64..256 doubles (default: twice and four times the most measured)',
    )
    parser.add_argument('--gpu', metavar='NAME', help="whose price, as in the list of prices (default: by the device's name)")
    add_prices(parser)
    return parser


def main() -> int:
    args = parser().parse_args()
    if bool(args.results) == (args.published is not None):
        print('name result files (RESULTS.jsonl ...) or a published table (--published NAME), one of the two', file=sys.stderr)
        return BAD_INPUT
    from benchmarks.reporting.deliver import MISTAKES, report_on_files, report_on_tables  # draws with Matplotlib, so after the arguments are read

    try:
        prices = load_asked(args.prices, args.price)
        return report_on_files(args, prices) if args.published is None else report_on_tables(args, prices)
    except MISTAKES as error:
        print(error, file=sys.stderr)
        return BAD_INPUT


if __name__ == '__main__':
    raise SystemExit(main())
