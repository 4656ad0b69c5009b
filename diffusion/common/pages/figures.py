"""Matplotlib figures for pages: SVG that takes its colours and its letters from the page, readable on light and dark; PNG elsewhere."""

import html
import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import matplotlib
from markupsafe import Markup
from matplotlib.figure import Figure
from matplotlib.rcsetup import cycler

from diffusion.common.pages.palette import LIGHT, SERIES

STYLE: Any = {
    'svg.fonttype': 'none',  # text stays text: found by a search, and in the letters of the page
    'svg.hashsalt': 'page',  # equal figures give equal files
    'text.parse_math': False,  # a name with dollar signs is no formula
    'font.size': 9,
    'text.color': LIGHT['ink'],
    'axes.labelcolor': LIGHT['ink'],
    'axes.edgecolor': LIGHT['faint'],
    'axes.titlecolor': LIGHT['ink'],
    'axes.titlesize': 10,
    'axes.facecolor': 'none',
    'axes.spines.top': False,
    'axes.spines.right': False,
    'axes.axisbelow': True,
    'axes.prop_cycle': cycler(color=[LIGHT[name] for name in SERIES]),
    'grid.color': LIGHT['line'],
    'xtick.color': LIGHT['faint'],
    'ytick.color': LIGHT['faint'],
    'xtick.labelcolor': LIGHT['ink'],
    'ytick.labelcolor': LIGHT['ink'],
    'legend.frameon': False,
    'hatch.color': LIGHT['ink'],
}


@contextmanager
def page_style() -> Iterator[None]:
    """Style the figures that are made, drawn or saved in this block like the pages."""
    with matplotlib.rc_context(STYLE):
        yield


def new_figure(width: float, height: float) -> Figure:
    """A figure of this size in inches; 4.2 fill a telephone's width without being scaled."""
    return Figure(figsize=(width, height), layout='constrained')


def svg(figure: Figure, alt: str) -> Markup:
    """Return the figure as an element of the page."""
    content = io.StringIO()
    with page_style():
        figure.savefig(content, format='svg', transparent=True, metadata={'Date': None, 'Creator': None})
    text = content.getvalue()
    text = text[text.index('<svg') :]
    text = re.sub(r'<metadata>.*?</metadata>', '', text, flags=re.DOTALL)
    text = re.sub(r'<g id="[^"]*">', '<g>', text)  # names of parts, equal in all figures of a page
    text = re.sub(r"'DejaVu Sans'[^;\"]*?sans-serif", 'system-ui, sans-serif', text)
    for name, colour in LIGHT.items():
        text = re.sub(rf'(?<=: ){colour}\b', f'var(--{name})', text)
        text = text.replace(f'fill="{colour}"', f'style="fill: var(--{name})"')  # behind a hatch
    width, height = (f'{72 * side:g}' for side in figure.get_size_inches())
    opening = f'<svg class="figure" role="img" viewBox="0 0 {width} {height}" width="{float(width) / 0.75:.0f}" aria-label="'
    return Markup(re.sub(r'<svg [^>]*>', lambda _: f'{opening}{html.escape(alt)}">', text, count=1))  # noqa: S704 - Matplotlib escapes texts


def png(figure: Figure, dpi: int = 110) -> bytes:
    """Return the figure as a PNG on white, for Markdown."""
    content = io.BytesIO()
    with page_style():
        figure.savefig(content, format='png', dpi=dpi, facecolor=LIGHT['page'])
    return content.getvalue()
