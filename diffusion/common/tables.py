"""Markdown tables, for terminals, documentation and issues."""

import os
import sys
from collections.abc import Sequence
from typing import Any

from diffusion.common.text import printable


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Format a table: the first column and titles that end in `:` are aligned left, None is empty, floats get two digits."""
    left = [not i or title.endswith(':') for i, title in enumerate(header)]
    titles = [title.removesuffix(':') for title in header]
    cells = [['' if cell is None else f'{cell:,.2f}' if isinstance(cell, float) else str(cell) for cell in row] for row in [titles, *rows]]
    widths = [max(3, *(len(row[i]) for row in cells)) for i in range(len(header))]
    cells.insert(1, ['-' * width if is_left else '-' * (width - 1) + ':' for width, is_left in zip(widths, left, strict=True)])
    lines = []
    for row in cells:
        padded = [cell.ljust(width) if is_left else cell.rjust(width) for cell, width, is_left in zip(row, widths, left, strict=True)]
        lines.append(f'| {" | ".join(padded)} |')
    return '\n'.join(lines)


def print_page(text: str) -> None:
    """Print text, which may hold names and captions of any origin, and continue if the reader closes the pipe.

    `| head` is not an error of the command, which may have files to write.
    """
    try:
        print(printable(text), flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains once more when it ends


def print_message(message: object) -> None:
    """Print an error, a warning or a line about progress to stderr; it may quote files, peers and models."""
    print(printable(str(message)), file=sys.stderr, flush=True)
