"""A report: sections of paragraphs, tables and figures, as Markdown without the figures and as one self-contained HTML page."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeAlias

from markupsafe import Markup
from matplotlib.figure import Figure

from diffusion.common.files import write_text
from diffusion.common.pages import data_uri, svg, write_page
from diffusion.common.text import markdown_table


@dataclass(frozen=True)
class Table:
    """Texts in rows; a column whose title ends in `:` is aligned left, as is the first."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> str:
        return markdown_table(self.head, [[' '.join(cell.replace('|', '\\|').split()) for cell in row] for row in self.rows])


@dataclass(frozen=True)
class FigureBlock:
    figure: Figure
    caption: str

    @property
    def svg(self) -> Markup:
        return svg(self.figure, self.caption)


@dataclass(frozen=True)
class ImageBlock:
    """An image file."""

    path: Path
    caption: str

    @property
    def uri(self) -> str:
        return data_uri(self.path.read_bytes())


Block: TypeAlias = str | Table | FigureBlock | ImageBlock  # a str is a paragraph of plain text


class Section(NamedTuple):
    title: str
    blocks: Sequence[Block]


@dataclass(frozen=True)
class Report:
    title: str
    lead: str
    sections: Sequence[Section]

    def write(self, folder: Path) -> list[Path]:
        """Write report.md and report.html, each whole or not at all; return their paths."""
        paths = [folder / 'report.md', folder / 'report.html']
        write_text(paths[0], self.markdown())
        write_page(paths[1], 'sections.html', title=self.title, report=self)
        return paths

    def markdown(self) -> str:
        parts = [f'# {self.title}', self.lead]
        for section in self.sections:
            parts.append(f'## {section.title}')
            parts += [block.markdown() if isinstance(block, Table) else block for block in section.blocks if isinstance(block, str | Table)]
        return '\n\n'.join(parts) + '\n'
