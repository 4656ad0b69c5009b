"""From the arguments of `benchmarks.report` to a report that is printed and written."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.published import published_tables
from benchmarks.reporting.measured_report import gpus_of, measured_report
from benchmarks.reporting.page import Report
from benchmarks.reporting.published_report import published_report
from diffusion.common.tables import print_page
from diffusion.common.text import did_you_mean
from diffusion.cost.formulas import Phase
from diffusion.cost.prices import PriceError, Prices, asked_price, price_of_gpu
from diffusion.cost.results import Result, ResultError, read_results

NOT_REPRODUCED = 1


class ArgumentsError(ValueError):
    """The arguments do not fit together, or not to the rows."""


# Printed without a traceback; exit code 2.
MISTAKES = (ResultError, PriceError, ArgumentsError)


def phases_of(amounts: dict[int | None, int], rows: Sequence[Result]) -> list[Phase]:
    """Return the phases that --samples means for these rows.

    Raises:
        ArgumentsError: it names a resolution that no row with numbers has, or none where there are several.
    """
    measured = sorted({resolution for row in rows if row.is_rated and (resolution := row.count('resolution')) is not None})
    there = f'measured are {", ".join(f"{px} px" for px in measured) or "none"}'
    if None in amounts and len(measured) != 1:
        raise ArgumentsError(f'--samples {amounts[None]:,}: at which resolution? {there}; write --samples PX={amounts[None]},...')
    by_px = {measured[0] if px is None else px: amount for px, amount in amounts.items()}
    if unknown := [f'{px} px' for px in by_px if px not in measured]:
        raise ArgumentsError(f'--samples: no row with numbers is of {" or ".join(unknown)}; {there}')
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
    name, every = args.published, published_tables()
    if name != 'all' and name not in every:
        hint = did_you_mean(name, [*every, 'all'], cutoff=0.3)
        raise ArgumentsError(f"--published: there is no table '{name}'{hint} There are {', '.join(every)}, and all")
    if args.gpu is not None or args.samples is not None:
        raise ArgumentsError(f'{"--gpu" if args.gpu is not None else "--samples"} is for result files: a published table has its own')
    tables = list(every.values()) if name == 'all' else [every[name]]
    prices = with_asked(prices, args.price, list(dict.fromkeys(table.run[0].gpu for table in tables if table.run)))
    report = published_report(tables, args.gpus or [256], prices)
    deliver(report, args.out or Path('runs/reports') / name)
    broken = [f'{table.name}: {cell.row}, {cell.column}: {cell.verdict}' for table in tables for cell in table.broken]
    print('\n'.join(broken), end='\n' if broken else '', file=sys.stderr)
    return NOT_REPRODUCED if broken else 0


def report_on_files(args: argparse.Namespace, prices: Prices) -> int:
    """Report on result files."""
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
        ArgumentsError: nothing can be written there.
    """
    print_page(report.markdown(figures=False))
    try:
        paths = report.write(folder)
    except OSError as error:
        raise ArgumentsError(f'--out {folder}: cannot be written: {error.strerror}; name a folder, which is made if it is not there') from error
    print_page('\n'.join(f'wrote {path}' for path in paths))
