"""A report on published tables: every cell next to ours, inconsistencies in the source, and the scaling law through its rows."""

from collections import Counter
from collections.abc import Sequence

from benchmarks.published import COLUMNS, FORMULAS, Cell, PublishedTable
from benchmarks.reporting.figures import bars_figure
from benchmarks.reporting.more_gpus import scaling_section, statements
from benchmarks.reporting.page import Block, FigureBlock, Notes, Report, Section, Table
from benchmarks.reporting.ways_to_pay import cost_section
from diffusion.common.text import counted
from diffusion.cost.formulas import SD2_BASE
from diffusion.cost.prices import Prices


def published_report(tables: Sequence[PublishedTable], gpus: Sequence[int], prices: Prices) -> Report:
    """Report on some published tables, with predictions for `gpus`."""
    cells = [cell for table in tables for cell in table.cells]
    verdicts = ', '.join(f'{count} {verdict}' for verdict, count in Counter(cell.verdict for cell in cells).most_common())
    title = tables[0].title if len(tables) == 1 else 'Published tables of throughput and cost, worked out again'
    sections = [section for table in tables for section in _sections(table, gpus, prices, len(tables) > 1)]
    return Report(title, f'{counted(len(cells), "cell")}: {verdicts}.', [*sections, _formulas(cells)])


def _formulas(cells: Sequence[Cell]) -> Section:
    """Explain the column `formula`."""
    used = {name for cell in cells for name in cell.formula.split(', ')}
    rows = [[name, text] for name, text in FORMULAS.items() if name in used]
    if 'scaling' in used:
        rows.append(['scaling', 'images/s that the law fitted to the rows of fewer GPUs predicts'])
    return Section('Formulas', [Table(('', 'formula:'), rows), 'Others are written out.'])


def _sections(table: PublishedTable, gpus: Sequence[int], prices: Prices, many: bool) -> list[Section]:
    notes, rows = list[str](), []
    for cell in table.cells:
        *texts, note = cell.texts()
        if note and note not in notes:
            notes.append(note)
        rows.append([*texts, str(1 + notes.index(note)) if note else ''])
    head = [f'{title}:' if title in ('column', 'allowed', 'formula', 'verdict') else title for title in COLUMNS]
    blocks: list[Block] = [f'{table.conditions} From {table.source}.', Table(head, rows), Notes(notes), *table.remarks]
    if table.ablation:
        caption = 'Images per second by configuration; factors are over the first bar, which is derived: the source prints the ratios only.'
        blocks.append(FigureBlock(f'ablation-{table.name}', bars_figure(table.ablation), caption))
    sections = [Section(f'{table.name}: cells', blocks)]
    if table.series:
        scaling = scaling_section([(one, None) for one in table.series], gpus, stem=f'-{table.name}')
        said = [f'{one.name}. {line}' for one in table.series for line in statements(one)]
        sections.append(Section(f'{table.name}: scaling', [*said, *scaling.blocks]))
    if table.run:
        rates = {row.num_gpus: row.images_per_sec for row in table.run}
        what = f'Throughput of {table.run[0].source}, {" and ".join(phase.amount for phase in SD2_BASE)}'
        paid = cost_section(what, SD2_BASE, rates, dict.fromkeys(rates, 'published'), table.run[0].gpu, prices, f'-{table.name}')
        if paid is not None:
            sections.append(Section(f'{table.name}: {paid.title.lower()}', paid.blocks))
    return sections if many else [Section(section.title.rpartition(': ')[2].capitalize(), section.blocks) for section in sections]
