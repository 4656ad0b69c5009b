"""Self-contained HTML pages: one file with its style, figures and images, for a browser or an e-mail.

All pages (a run, several runs, a dataset, benchmarks) extend `templates/base.html`. Templates escape every value; what is markup already says so
by its type, and only this file makes it. Figures of Matplotlib are SVG that takes its colours and its letters from the page, readable on light and
dark; PNG elsewhere.
"""

import base64
import html
import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from diffusion.common.files import replacing
from diffusion.common.text import counted

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# name: (light, dark). Each is the CSS variable `--name`; figures are drawn with the light ones, and inside a page they follow the variables.
# Contrast with the page is at least 4.5:1 for ink and faint, 3:1 for the series.
PALETTE = {
    'page': ('#ffffff', '#14171a'),
    'panel': ('#f4f5f7', '#20252b'),
    'line': ('#d9dce1', '#3a424b'),
    'ink': ('#1c2024', '#e4e7eb'),
    'faint': ('#5b636d', '#9aa4b0'),
    'good': ('#2e7d4f', '#5cc98a'),
    'bad': ('#c62828', '#ff7b72'),
    'note': ('#a86a00', '#e0ac4a'),
    'series1': ('#1f5fa8', '#6cb0ff'),
    'series2': ('#d1491b', '#ff9a6b'),
    'series3': ('#2a8a57', '#6fdca0'),
    'series4': ('#8b4fc0', '#c9a2f5'),
    'series5': ('#8a6d10', '#e3c454'),
    'series6': ('#0b8390', '#5fd6e3'),
}
LIGHT = {name: light for name, (light, _) in PALETTE.items()}
SERIES = [name for name in PALETTE if name.startswith('series')]


def write_page(path: Path, template: str, **values: Any) -> None:
    """Render `templates/TEMPLATE`, with the values that it names, into a file, whole or not at all."""
    with replacing(path) as temporary:
        temporary.write_bytes(render_page(template, **values))


def render_page(template: str, **values: Any) -> bytes:
    """Render `templates/TEMPLATE`, for a server; in UTF-8."""
    return _environment().get_template(template).render(values).encode('utf-8', 'xmlcharrefreplace')  # captions can hold halves of surrogate pairs


def data_uri(content: bytes, media_type: str = 'image/png') -> str:
    """Return the `src` of an image that is embedded in the page."""
    return f'data:{media_type};base64,{base64.b64encode(content).decode()}'


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader('diffusion.common'), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.globals['palette'] = PALETTE
    environment.globals['counted'] = counted
    return environment


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
    import matplotlib  # late: a second, which pages without figures do without
    from matplotlib.rcsetup import cycler

    with matplotlib.rc_context({**STYLE, 'axes.prop_cycle': cycler(color=[LIGHT[name] for name in SERIES])}):
        yield


def new_figure(width: float, height: float) -> 'Figure':
    """Return an empty figure of this size in inches; a width of 4.2 fills a telephone without being scaled."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout='constrained')


def svg(figure: 'Figure', alt: str) -> Markup:
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


def png(figure: 'Figure', dpi: int = 110) -> bytes:
    """Return the figure as a PNG on white, for Markdown."""
    content = io.BytesIO()
    with page_style():
        figure.savefig(content, format='png', dpi=dpi, facecolor=LIGHT['page'])
    return content.getvalue()
