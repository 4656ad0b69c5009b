"""Report on measured throughput: scaling to more GPUs, days, GPU-hours and dollars.

    python -m benchmarks.report RESULTS.jsonl ... [--samples 204.8e6 | 256=1e9,512=2e9] [--gpus 16,32 | 16..128] [--price 2.49 | spot] [--gpu h200]
                                [--out FOLDER]

Reads rows of benchmarks.throughput and of benchmarks.step; of several rows of a point the latest counts, and rows that failed stay in the table. Rows
that differ in the number of GPUs only are a series: a law of computation, exposed communication and fixed overhead is fitted to it
(diffusion/cost/scaling.py), and predicts more GPUs with its uncertainty. Days and dollars are those of --samples, or else of the phases of Stable
Diffusion 2 base for rows of its U-Net, and a million samples for others.

Prints the report and writes report.md and, with a figure, one self-contained report.html to FOLDER (default: next to the first file).
Exit codes: 0 done; 2 the input is wrong. docs/plan.md explains what is printed.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator

from diffusion.common.command_line import option, positional
from diffusion.common.text import print_page
from diffusion.contracts.errors import InputError, run_command
from diffusion.cost.formulas import Phase
from diffusion.cost.hardware import GpuCounts
from diffusion.cost.prices import PriceError, PriceOptions, Prices, asked_price, load_prices, price_of_gpu
from diffusion.cost.results import Result, read_results


def _split_samples(text: str) -> dict[int | None, int]:
    """Return samples by resolution in pixels, `256=1.1264e9,512=1.7408e9`; without one, `204.8e6`, that of the rows (None)."""
    amounts: dict[int | None, int] = {}
    for part in text.split(','):
        px, _, amount = part.rpartition('=')
        try:
            number = float(amount)
        except ValueError:
            number = 0.0
        is_count = 0 < number < float('inf') and number == int(number)
        if not is_count or ('=' in part and not px.isdigit()) or (len(amounts) > 0 and (not px or None in amounts)):
            raise ValueError('is no number of samples; write 204.8e6, or by resolution 256=1.1264e9,512=1.7408e9')
        resolution = int(px) if px else None
        if resolution in amounts:
            raise ValueError(f'has {resolution} px twice')
        amounts[resolution] = int(number)
    return amounts


class ThroughputReportRequest(PriceOptions):
    """Result files, and what to predict."""

    results: list[Path] = positional('RESULTS.jsonl')
    out: Path | None = option(None, 'where to write report.md and report.html', 'FOLDER')
    samples: Annotated[dict[int | None, int] | None, BeforeValidator(_split_samples)] = option(
        None, 'samples to train (steps x global batch), such as 204.8e6; of several resolutions 256=1.1264e9,512=1.7408e9', 'N'
    )
    gpus: GpuCounts = option((), 'GPUs to predict; 64..256 doubles (default: twice and four times the most measured)', 'N,N')
    gpu: str | None = option(None, "whose price, as in the list of prices (default: by the device's name)", 'NAME')


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
        if price is not None:
            prices = Prices({price.name: price} | {name: other for name, other in prices.items() if name != price.name})
    return prices


def report_on(request: ThroughputReportRequest) -> int:
    """Print the report and write its files."""
    from benchmarks.reporting.measured_report import gpus_of, measured_report  # draws with Matplotlib

    prices = load_prices(request.prices, request.price)
    results = read_results(request.results)
    phases = None if request.samples is None else phases_of(request.samples, results.throughput)
    prices = with_asked(prices, request.price, [request.gpu] if request.gpu is not None else gpus_of(results.throughput, prices))
    if request.gpu is not None:
        price_of_gpu(request.gpu, prices, 'give one with --price DOLLARS')
    names, folder = ', '.join(path.name for path in request.results), request.out or request.results[0].parent
    report = measured_report(results, names, prices, request.gpus, request.gpu, phases)
    print_page(report.markdown())
    try:
        paths = report.write(folder)
    except OSError as error:
        raise InputError(f'--out {folder}: cannot be written: {error.strerror}; name a folder, which is made if it is not there') from error
    print_page('\n'.join(f'wrote {path}' for path in paths))
    return 0


def main() -> int:
    request = ThroughputReportRequest.parse('benchmarks.report', __doc__)
    return run_command(lambda: report_on(request))


if __name__ == '__main__':
    raise SystemExit(main())
