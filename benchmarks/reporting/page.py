"""A report as Markdown with its figures next to it, and as one HTML file with the figures in it: the same sections, written twice."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from markupsafe import Markup
from matplotlib.figure import Figure

from diffusion.common.files import replacing
from diffusion.common.pages import data_uri, png, svg, write_page
from diffusion.common.text import markdown_table


@dataclass(frozen=True)
class Table:
    """Texts in rows; a column whose title ends in `:` is aligned left, as is the first."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class FigureBlock:
    name: str  # of the file, without suffix
    figure: Figure
    caption: str

    @property
    def svg(self) -> Markup:
        return svg(self.figure, self.caption)


@dataclass(frozen=True)
class Notes:
    """Numbered remarks that a table's column `note` refers to."""

    texts: Sequence[str]


@dataclass(frozen=True)
class ImageBlock:
    """An image file, for a page only."""

    path: Path
    caption: str

    @property
    def uri(self) -> str:
        return data_uri(self.path.read_bytes())


Block: TypeAlias = str | Table | FigureBlock | Notes | ImageBlock  # a str is a paragraph of plain text


@dataclass(frozen=True)
class Section:
    title: str
    blocks: Sequence[Block]


@dataclass(frozen=True)
class Report:
    title: str
    lead: str
    sections: Sequence[Section]

    def write(self, folder: Path) -> list[Path]:
        """Write report.md, its figures and report.html, each whole or not at all; return their paths."""
        figures = [block for section in self.sections for block in section.blocks if isinstance(block, FigureBlock)]
        paths = [folder / f'{block.name}.png' for block in figures]
        for path, block in zip(paths, figures, strict=True):
            _write(path, png(block.figure))
        _write(folder / 'report.md', self.markdown().encode())
        write_page(folder / 'report.html', 'sections.html', title=self.title, report=self)
        return [folder / 'report.md', folder / 'report.html', *paths]

    def markdown(self, figures: bool = True) -> str:
        """Write the whole report; for a terminal without the figures."""
        parts = [f'# {self.title}', self.lead]
        for section in self.sections:
            parts.append(f'## {section.title}')
            parts += [_markdown(block) for block in section.blocks if figures or not isinstance(block, FigureBlock)]
        return '\n\n'.join(parts) + '\n'


def _markdown(block: Block) -> str:
    if isinstance(block, Table):
        return markdown_table(block.head, [[' '.join(cell.replace('|', '\\|').split()) for cell in row] for row in block.rows])
    if isinstance(block, FigureBlock):
        return f'![{block.caption}]({block.name}.png)\n\n*{block.caption}*'
    if isinstance(block, ImageBlock):
        return f'![{block.caption}]({block.path.name})'
    if isinstance(block, Notes):
        return '\n'.join(f'{i}. {" ".join(text.split())}' for i, text in enumerate(block.texts, 1))
    return block


def _write(path: Path, content: bytes) -> None:
    with replacing(path) as temporary:
        temporary.write_bytes(content)
