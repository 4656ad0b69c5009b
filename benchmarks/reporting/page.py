"""A report as Markdown with its figures next to it, and as one HTML file with the figures in it: the same sections, written twice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from markupsafe import Markup
from matplotlib.figure import Figure

from diffusion.common.files import replacing
from diffusion.common.pages import data_uri, write_page
from diffusion.common.pages.figures import png, svg
from diffusion.common.tables import markdown_table


@dataclass(frozen=True)
class Table:
    """Texts in rows; a column whose title ends in `:` is aligned left, as is the first."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Picture:
    name: str  # of the file, without suffix
    figure: Figure
    caption: str

    @property
    def svg(self) -> Markup:
        return svg(self.figure, self.caption)


@dataclass(frozen=True)
class Notes:
    """Numbered remarks, of what a table's column `note` refers to."""

    texts: Sequence[str]


@dataclass(frozen=True)
class Photo:
    """An image file, for a page only."""

    path: Path
    caption: str

    @property
    def uri(self) -> str:
        return data_uri(self.path.read_bytes())


Block: TypeAlias = str | Table | Picture | Notes | Photo  # a str is a paragraph of plain text


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
        """Write report.md, its pictures and report.html, each whole or not at all; returns their paths."""
        pictures = [block for section in self.sections for block in section.blocks if isinstance(block, Picture)]
        paths = [folder / f'{picture.name}.png' for picture in pictures]
        for path, picture in zip(paths, pictures, strict=True):
            _write(path, png(picture.figure))
        _write(folder / 'report.md', self.markdown().encode())
        write_page(folder / 'report.html', 'sections.html', title=self.title, report=self)
        return [folder / 'report.md', folder / 'report.html', *paths]

    def markdown(self, pictures: bool = True) -> str:
        """Of the whole; for a terminal without the pictures."""
        parts = [f'# {self.title}', self.lead]
        for section in self.sections:
            parts.append(f'## {section.title}')
            parts += [_markdown(block) for block in section.blocks if pictures or not isinstance(block, Picture)]
        return '\n\n'.join(parts) + '\n'


def _markdown(block: Block) -> str:
    if isinstance(block, Table):
        return markdown_table(block.head, [[' '.join(cell.replace('|', '\\|').split()) for cell in row] for row in block.rows])
    if isinstance(block, Picture):
        return f'![{block.caption}]({block.name}.png)\n\n*{block.caption}*'
    if isinstance(block, Photo):
        return f'![{block.caption}]({block.path.name})'
    if isinstance(block, Notes):
        return '\n'.join(f'{i}. {" ".join(text.split())}' for i, text in enumerate(block.texts, 1))
    return block


def _write(path: Path, content: bytes) -> None:
    with replacing(path) as temporary:
        temporary.write_bytes(content)
