"""Argument parsing of commands: the parser, argument types, and arguments that several commands share."""

import argparse
from pathlib import Path

from diffusion.common.command_line import CommandParser

__all__ = ['CommandParser']  # until every command is declared by diffusion.common.command_line


def positive_int(text: str) -> int:
    """Argparse type: a whole number of at least 1."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number of at least 1")
    return int(text)


def positive_float(text: str) -> float:
    """Argparse type: a number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float('inf'):
        raise argparse.ArgumentTypeError(f"'{text}' is not a number above 0")
    return value


def non_negative_float(text: str) -> float:
    """Argparse type: a number of at least 0."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float('inf'):
        raise argparse.ArgumentTypeError(f"'{text}' is not a number of at least 0")
    return value


def gpu_counts(text: str) -> list[int]:
    """Argparse type: a list of numbers, `8,16,24`; `8..256` and `8,16,...,256` double up to the last.

    Raises:
        argparse.ArgumentTypeError: something else, or `..` before the first or up to a smaller number.
    """
    counts = list[int]()
    doubling = False
    for part in text.replace('...', '..').replace('..', ',..,').split(','):
        if part == '..':
            doubling = True
        elif part:
            last = positive_int(part)
            if doubling and (not counts or last < counts[-1]):
                remedy = f'{last}..{counts[-1]}' if counts else '8..256'
                raise argparse.ArgumentTypeError(f"'{text}': .. doubles from a number to a larger one; write {remedy}")
            while doubling and counts and counts[-1] * 2 < last:
                counts.append(counts[-1] * 2)
            counts.append(last)
            doubling = False
    if not counts or doubling:
        raise argparse.ArgumentTypeError(f"'{text}' is not a list of numbers of GPUs; write 8,16,32 or 8..256")
    return sorted(set(counts))


def share_or_range(text: str) -> float | list[float]:
    """Argparse type: a share `0.35`, or a range of shares `0.25..0.4`.

    Raises:
        argparse.ArgumentTypeError: something else, or above 1.
    """
    ends = [positive_float(end) for end in text.split('..')]
    if len(ends) > 2 or ends != sorted(ends) or ends[-1] > 1:
        raise argparse.ArgumentTypeError(f"'{text}' is neither a share of at most 1 nor a range of them; write 0.35 or 0.25..0.4")
    return ends if len(ends) == 2 else ends[0]


def add_prices(parser: argparse.ArgumentParser) -> None:
    """Add --price and --prices, which `load_prices` and `asked_price` of diffusion/cost/prices.py read."""
    parser.add_argument(
        '--price', action='append', default=[], metavar='PRICE', help='of the GPU-hour: dollars, or an offer of the list such as spot; '
        'or NAME=DOLLARS for anything in the list, such as gpu_hour.h200.on-demand=2.50; repeatable',
    )  # fmt: skip
    parser.add_argument('--prices', type=Path, metavar='FILE', help='a list of prices in place of diffusion/cost/prices.yaml')
