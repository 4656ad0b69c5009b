"""Argument parsing of commands: the parser, argument types, and arguments that several commands share."""

import argparse
import re
import sys
from pathlib import Path
from typing import Any, NoReturn

from diffusion.common.text import print_page, printable

MAX_SIDE_PX = 4096  # of an image that is drawn: the attention of a U-Net over more takes terabytes
LARGEST_SEED = 2**32 - 1


class CommandParser(argparse.ArgumentParser):
    """An argument parser for `python -m MODULE`, described by the module's docstring. Commands import nothing heavy before they have parsed.

    Options are written out: a beginning of one may mean another option tomorrow, and a misspelt one is refused.

    Args:
        options: further ones of ArgumentParser.
    """

    def __init__(self, module: str, doc: str | None, **options: Any):
        described = argparse.RawDescriptionHelpFormatter
        super().__init__(prog=f'python -m {module}', description=doc, formatter_class=described, allow_abbrev=False, **options)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as ArgumentParser does, and refuse arguments that are not UTF-8: no recipe, manifest or page could name such a path afterwards."""
        for text in sys.argv[1:] if args is None else args:
            if (readable := text.encode(errors='backslashreplace').decode()) != text:
                self.error(f'{readable}: is not UTF-8; rename the file or folder')
        return super().parse_known_args(args, namespace)

    def print_help(self, file: Any = None) -> None:
        print_page(self.format_help().rstrip())

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        super().exit(status, None if message is None else printable(message))


def positive_int(text: str) -> int:
    """Argparse type: a whole number of at least 1."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number of at least 1")
    return int(text)


def seed_number(text: str) -> int:
    """Argparse type: the seed of a random generator."""
    if not re.fullmatch(r'[0-9]{1,10}', text) or int(text) > LARGEST_SEED:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number of at most {LARGEST_SEED:,}")
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


def guidance_scale(text: str) -> float:
    """Argparse type: a number of at least 1, which is no guidance."""
    value = positive_float(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f'{text} is below 1, which is no guidance')
    return value


def image_side(text: str) -> int:
    """Argparse type: pixels along a side of an image that is drawn."""
    if positive_int(text) > MAX_SIDE_PX:
        raise argparse.ArgumentTypeError(f'{text} pixels are more than {MAX_SIDE_PX:,}, the longest side that is drawn')
    return int(text)


def image_size(text: str) -> tuple[int, int]:
    """Argparse type: `WIDTHxHEIGHT` in pixels, multiples of 16: a latent is 8 pixels, and transformers take two a side together."""
    sides = text.split('x')
    if len(sides) != 2 or not all(side.isdigit() and int(side) > 0 and int(side) % 16 == 0 for side in sides):
        raise argparse.ArgumentTypeError(f"'{text}' is not a size of multiples of 16, such as 512x768")
    return image_side(sides[0]), image_side(sides[1])


def names(text: str) -> tuple[str, ...]:
    """Argparse type: different names with commas between them."""
    found = tuple(name.strip() for name in text.split(',') if name.strip())
    if not found or len(set(found)) < len(found):
        raise argparse.ArgumentTypeError(f'{text!r} is not a list of different names')
    return found


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


def add_prompts(parser: argparse.ArgumentParser) -> None:
    """Add --prompt and --prompts-file, which `asked_prompts` reads."""
    parser.add_argument('--prompt', action='append', default=[], help='what to draw; may be given several times')
    parser.add_argument('--prompts-file', type=Path, metavar='FILE', help='a prompt a line')


def asked_prompts(args: argparse.Namespace) -> list[str]:
    """The prompts of --prompt, then those of --prompts-file.

    Raises:
        OSError, ValueError: the file cannot be read.
    """
    lines = args.prompts_file.read_text().splitlines() if args.prompts_file else []
    return [*args.prompt, *(line for line in lines if line.strip())]


def add_prices(parser: argparse.ArgumentParser) -> None:
    """Add --price and --prices, which `load_prices` and `asked_price` of diffusion/cost/prices.py read."""
    parser.add_argument(
        '--price', action='append', default=[], metavar='PRICE', help='of the GPU-hour: dollars, or an offer of the list such as spot; '
        'or NAME=DOLLARS for anything in the list, such as gpu_hour.h200.on-demand=2.50; repeatable',
    )  # fmt: skip
    parser.add_argument('--prices', type=Path, metavar='FILE', help='a list of prices in place of diffusion/cost/prices.yaml')
