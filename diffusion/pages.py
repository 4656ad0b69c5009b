"""HTML pages that stand alone: one file with its style and its pictures in it, for a browser or an e-mail."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from diffusion.files import replacing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #1c2024; }
h1 { margin-bottom: 0 } h2 { margin-top: 2.5rem; border-bottom: 1px solid #ddd }
.lead { color: #555 } .numbers { display: flex; flex-wrap: wrap; gap: 1rem; margin: 1.5rem 0 }
.number { background: #f4f5f7; border-radius: 8px; padding: .7rem 1.1rem; min-width: 8rem } .number b { display: block; font-size: 1.5rem }
table { border-collapse: collapse; margin: 1rem 0 } th, td { padding: .25rem .8rem; text-align: right; border-bottom: 1px solid #e5e5e5 }
th:first-child, td:first-child, .left { text-align: left } .grids { display: flex; flex-wrap: wrap; gap: 1.2rem } figure { margin: 0 }
figcaption { font-size: .85rem; color: #555; max-width: 18rem } img.pixels { image-rendering: pixelated }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(9rem, 1fr)); gap: 1rem }
pre { background: #f4f5f7; padding: 1rem; overflow-x: auto; font-size: 13px } img { max-width: 100% }
"""

_LEFT = ('', ' class="left"')


def write_page(path: Path, title: str, sections: Iterable[str], style: str = '') -> None:
    """Put the sections, which are HTML, into a page; `style` adds to the common one."""
    head = f'<meta charset="utf-8"><title>{html.escape(title)}</title><style>{STYLE}{style}</style>'
    page = f'<!doctype html><html lang="en">{head}<body>{"".join(sections)}</body></html>\n'
    with replacing(path) as temporary:
        temporary.write_bytes(page.encode('utf-8', 'xmlcharrefreplace'))  # captions can hold halves of surrogate pairs


def number_boxes(numbers: Iterable[tuple[str, str]]) -> str:
    """A row of boxes, each of (label, value)."""
    boxes = (f'<div class="number"><b>{html.escape(value)}</b>{html.escape(label)}</div>' for label, value in numbers)
    return f'<div class="numbers">{"".join(boxes)}</div>'


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of texts, the first column aligned left, as is one whose title ends in `:`; a head of empty cells is left out."""
    left = [title.endswith(':') for title in head]

    def line(tag: str, cells: Sequence[str]) -> str:
        marked = zip(cells, left, strict=True)
        return f'<tr>{"".join(f"<{tag}{_LEFT[is_left]}>{html.escape(str(cell))}</{tag}>" for cell, is_left in marked)}</tr>'

    header = line('th', [title.removesuffix(':') for title in head]) if any(head) else ''
    return f'<table>{header}{"".join(line("td", row) for row in rows)}</table>'


def data_uri(content: bytes, media_type: str = 'image/png') -> str:
    """What `src` of a picture names when the picture is inside the page."""
    return f'data:{media_type};base64,{base64.b64encode(content).decode()}'


def figure_png(figure: Figure, dpi: int = 110) -> bytes:
    """A Matplotlib figure as a picture."""
    content = io.BytesIO()
    figure.savefig(content, format='png', dpi=dpi)
    return content.getvalue()
