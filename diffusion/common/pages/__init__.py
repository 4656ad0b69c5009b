"""Self-contained HTML pages: one file with its style, figures and images, for a browser or an e-mail.

All pages (a run, several runs, a dataset, benchmarks) extend `templates/base.html`. Templates escape every value; what is markup already says so
by its type, and only this package makes it.
"""

import base64
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from diffusion.common.files import replacing
from diffusion.common.pages.palette import PALETTE
from diffusion.common.text import counted


def write_page(path: Path, template: str, **values: Any) -> None:
    """Render `templates/TEMPLATE` into a file, whole or not at all.

    Args:
        values: what the template names; `title` is of the page.
    """
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
        loader=PackageLoader('diffusion.common.pages'), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.globals['palette'] = PALETTE
    environment.globals['counted'] = counted
    return environment
