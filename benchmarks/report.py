"""What measured throughput means: scaling to more GPUs, days, GPU-hours and dollars; or how published tables come out when they are worked out again.

    python -m benchmarks.report RESULTS.jsonl ... [--out FOLDER] [--gpus 16,32,64] [--gpu h200] [--price NAME=DOLLARS] [--prices FILE]
    python -m benchmarks.report --published NAME|all [--out FOLDER] [--gpus 256]

The first form reads rows of benchmarks.throughput (and, for their bars, of benchmarks.step); of several rows of a point the latest counts, and rows
that failed stay in the table. Rows that differ in the number of GPUs only are a series: a law of computation, exposed communication and fixed
overhead is fitted to it (diffusion/cost/scaling.py), and says with its uncertainty what more GPUs would give.

The second form compares every cell of a published table with the formulas of this repository, and says where the source contradicts itself.

Prints the report and writes report.md, PNGs and one self-contained report.html to FOLDER (default: beside the first file, or runs/reports/NAME).
Exit codes: 0 done; 1 a published cell does not come out as it did; 2 the input is wrong.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from pathlib import Path

from benchmarks.published import TABLES
from benchmarks.reporting import measurements, reproduction
from diffusion.arguments import positive_int
from diffusion.cost.prices import DEFAULT, PriceError, Prices, load_prices
from diffusion.cost.results import ResultError, read_results
from diffusion.faults.exit_codes import BAD_INPUT

NOT_REPRODUCED = 1


def counts(text: str) -> list[int]:
    """An argparse type: `8,16,32`."""
    return [positive_int(part.strip()) for part in text.split(',')]


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog='python -m benchmarks.report', description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument('results', nargs='*', type=Path, metavar='RESULTS.jsonl')
    parser.add_argument('--published', metavar='NAME', help=f'a published table instead: {", ".join(TABLES)}, or all')
    parser.add_argument('--out', type=Path, metavar='FOLDER', help='where to write report.md, report.html and the figures')
    parser.add_argument('--gpus', type=counts, default=[], metavar='N,N', help='GPUs to predict (default: twice and four times the most measured)')
    parser.add_argument('--gpu', metavar='NAME', help="whose price, as in the list of prices (default: by the device's name)")
    parser.add_argument('--price', action='append', default=[], metavar='NAME=DOLLARS', help='such as gpu_hour.h200.on-demand=2.50')
    parser.add_argument('--prices', type=Path, default=DEFAULT, metavar='FILE', help='a list of prices (default: benchmarks/prices.yaml)')
    return parser


def published(name: str, gpus: list[int], prices: Prices, out: Path | None) -> int:
    """Report on one published table, or on all."""
    if name != 'all' and name not in TABLES:
        close = difflib.get_close_matches(name, [*TABLES, 'all'], n=1, cutoff=0.3)
        hint = f"; did you mean '{close[0]}'?" if close else ''
        print(f"--published: there is no table '{name}'{hint} There are {', '.join(TABLES)}, and all", file=sys.stderr)
        return BAD_INPUT
    tables = list(TABLES.values()) if name == 'all' else [TABLES[name]]
    report = reproduction.report_of(tables, gpus or [256], prices)
    print(report.markdown(pictures=False))
    print('\n'.join(f'wrote {path}' for path in report.write(out or Path('runs/reports') / name)))
    broken = [f'{table.name}: {cell.row}, {cell.column}: {cell.verdict}' for table in tables for cell in table.broken]
    print('\n'.join(broken), end='\n' if broken else '', file=sys.stderr)
    return NOT_REPRODUCED if broken else 0


def main() -> int:
    args = parser().parse_args()
    if bool(args.results) == (args.published is not None):
        print('name result files (RESULTS.jsonl ...) or a published table (--published NAME), one of the two', file=sys.stderr)
        return BAD_INPUT
    try:
        prices = load_prices(args.prices, args.price)
        if args.published is not None:
            return published(args.published, args.gpus, prices, args.out)
        results = read_results(args.results)
        series = [one for table in TABLES.values() for one in table.series]
        report = measurements.report_of(results, ', '.join(path.name for path in args.results), prices, args.gpus, args.gpu, series)
    except (ResultError, PriceError) as error:
        print(error, file=sys.stderr)
        return BAD_INPUT
    print(report.markdown(pictures=False))
    print('\n'.join(f'wrote {path}' for path in report.write(args.out or args.results[0].parent)))
    return 0


if __name__ == '__main__':
    raise SystemExit(main())
