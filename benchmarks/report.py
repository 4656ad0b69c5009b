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
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from diffusion.common.arguments import CommandParser, add_prices, gpu_counts, positive_float
from diffusion.common.text import did_you_mean, print_page
from diffusion.contracts.errors import BAD_INPUT, InputError, run_command
from diffusion.cost.formulas import Phase
from diffusion.cost.prices import PriceError, Prices, asked_price, load_prices, price_of_gpu
from diffusion.cost.results import Result, read_results

if TYPE_CHECKING:  # draws with Matplotlib, and is imported after the arguments are read
    from benchmarks.reporting.page import Report

NOT_REPRODUCED = 1


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
    parser = CommandParser('benchmarks.report', __doc__)
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


def phases_of(amounts: dict[int | None, int], rows: Sequence[Result]) -> list[Phase]:
    """Return the phases that --samples means for these rows.

    Raises:
        InputError: it names a resolution that no row with numbers has, or none where there are several.
    """
    measured = sorted({resolution for row in rows if row.is_rated and (resolution := row.count('resolution')) is not None})
    there = f'measured are {", ".join(f"{px} px" for px in measured) or "none"}'
    if None in amounts and len(measured) != 1:
        raise InputError(f'--samples {amounts[None]:,}: at which resolution? {there}; write --samples PX={amounts[None]},...')
    by_px = {measured[0] if px is None else px: amount for px, amount in amounts.items()}
    if unknown := [f'{px} px' for px in by_px if px not in measured]:
        raise InputError(f'--samples: no row with numbers is of {" or ".join(unknown)}; {there}')
    return [Phase(px, by_px[px]) for px in sorted(by_px)]


def with_asked(prices: Prices, texts: Sequence[str], gpus: Sequence[str]) -> Prices:
    """Return the list with the prices that --price asks for as the first of these GPUs.

    Raises:
        PriceError: there is no such offer, two prices are asked for, or one for nobody knows which GPU.
    """
    bare = [text for text in texts if '=' not in text]
    offers = {offer for gpu in gpus for offer in prices.plans(gpu)}
    if bare and not (len(gpus) == 1 or (gpus and offers.issuperset(bare))):
        which = f'here are {" and ".join(gpus)}' if gpus else 'nothing here is of one'
        raise PriceError(f'--price {bare[0]}: for which GPU? {which}; write --price gpu_hour.NAME.on-demand=DOLLARS')
    for gpu in gpus:
        price = asked_price(texts, gpu, prices)
        prices = prices if price is None else prices.preferring(price)
    return prices


def report_on_tables(args: argparse.Namespace, prices: Prices) -> int:
    """Report on one published table, or on all."""
    from benchmarks.published import published_tables
    from benchmarks.reporting.published_report import published_report

    name, every = args.published, published_tables()
    if name != 'all' and name not in every:
        hint = did_you_mean(name, [*every, 'all'], cutoff=0.3)
        raise InputError(f"--published: there is no table '{name}'{hint} There are {', '.join(every)}, and all")
    if args.gpu is not None or args.samples is not None:
        raise InputError(f'{"--gpu" if args.gpu is not None else "--samples"} is for result files: a published table has its own')
    tables = list(every.values()) if name == 'all' else [every[name]]
    prices = with_asked(prices, args.price, list(dict.fromkeys(table.run[0].gpu for table in tables if table.run)))
    report = published_report(tables, args.gpus or [256], prices)
    deliver(report, args.out or Path('runs/reports') / name)
    broken = [f'{table.name}: {cell.row}, {cell.column}: {cell.verdict}' for table in tables for cell in table.broken]
    print('\n'.join(broken), end='\n' if broken else '', file=sys.stderr)
    return NOT_REPRODUCED if broken else 0


def report_on_files(args: argparse.Namespace, prices: Prices) -> int:
    """Report on result files."""
    from benchmarks.published import published_tables
    from benchmarks.reporting.measured_report import gpus_of, measured_report

    results = read_results(args.results)
    phases = None if args.samples is None else phases_of(args.samples, results.throughput)
    prices = with_asked(prices, args.price, [args.gpu] if args.gpu is not None else gpus_of(results.throughput, prices))
    if args.gpu is not None:
        price_of_gpu(args.gpu, prices, 'give one with --price DOLLARS')
    series = [one for table in published_tables().values() for one in table.series]
    names = ', '.join(path.name for path in args.results)
    deliver(measured_report(results, names, prices, args.gpus, args.gpu, series, phases), args.out or args.results[0].parent)
    return 0


def deliver(report: Report, folder: Path) -> None:
    """Print it and write its files.

    Raises:
        InputError: nothing can be written there.
    """
    print_page(report.markdown(figures=False))
    try:
        paths = report.write(folder)
    except OSError as error:
        raise InputError(f'--out {folder}: cannot be written: {error.strerror}; name a folder, which is made if it is not there') from error
    print_page('\n'.join(f'wrote {path}' for path in paths))


def main() -> int:
    args = parser().parse_args()
    if bool(args.results) == (args.published is not None):
        print('name result files (RESULTS.jsonl ...) or a published table (--published NAME), one of the two', file=sys.stderr)
        return BAD_INPUT
    report_on = report_on_files if args.published is None else report_on_tables
    return run_command(lambda: report_on(args, load_prices(args.prices, args.price)))


if __name__ == '__main__':
    raise SystemExit(main())
