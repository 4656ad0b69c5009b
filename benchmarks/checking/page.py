"""The rows of a GPU check as one page: the verdict, then every subject with its predictions and limits next to what was measured."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.checking.cases import PARTS, Values
from benchmarks.checking.judging import Comparison, Predictions, comparisons, problems
from benchmarks.checking.rows import hardware, number
from benchmarks.checking.slices import Check
from benchmarks.reporting.page import Block, ImageBlock, Report, Section, Table
from diffusion.common.pages import write_page

Rows = Mapping[tuple[str, str], Values]
# key of rows: title of its column, factor. Rows of a part have some of them.
NUMBERS = {
    'micro_batch': ('micro-batch', 1), 'images_per_sec': ('images/s', 1), 'tflop_per_sec': ('TFLOP/s', 1), 'gb_per_sec': ('GB/s', 1),
    'median_sec': ('ms', 1e3), 'ms': ('ms', 1), 'composer_ms': ("ms, Composer's", 1), 'spread': ('spread, %', 100), 'mfu': ('MFU, %', 100),
    'peak_allocated_bytes': ('peak GB', 1e-9), 'predicted_bytes': ('peak GB, counted', 1e-9), 'first_loss': ('first loss', 1),
    'last_loss': ('last loss', 1), 'foreground': ('right foreground, %', 100), 'background': ('right background, %', 100),
}  # fmt: skip


def write(path: Path, check: Check, predictions: Predictions) -> None:
    """Write the page, whole or not at all; images of the rows lie next to it."""
    rows, where = check.rows, check.environment
    compared, wrong = comparisons(rows.values(), predictions), problems(rows, predictions)
    dates = sorted(row['date'] for row in rows.values())
    when = f'{dates[0][:16]} to {dates[-1][:16]} UTC' if dates else 'nothing measured yet'
    lead = f'Commit {where["commit"]}, PyTorch {where["torch"]}, {when}.'
    if check.setting.tiny:
        lead += ' Small form: what is checked for being right is checked; speeds are those of a toy and are compared with nothing.'
    sections = [Section('Machine', [machine(where)])]
    for part in PARTS:  # of earlier slices too, which may have had other parts
        blocks = [*numbers_of(rows, part.name, compared, predictions), *checks(rows, part.name), *more(rows, part.name, predictions, path.parent)]
        sections.append(Section(f'{part.name.capitalize()}: {part.about}', blocks))
    sections.append(Section('Skipped, failed, and time', aside(rows)))
    report = Report(f'GPU check: {hardware(where)}', lead, [section for section in sections if any(section.blocks)])
    measured = [row for row in rows.values() if row['status'] == 'measured']
    numbers = [
        ('cases measured', f'{len(measured):,}'),
        ('checks', f'{sum(len(row.get("checks", ())) for row in measured):,}'),
        ('predictions', f'{len(compared):,}'),
        ('problems', f'{len(wrong):,}'),
        ('minutes', f'{sum(row["sec"] for (_, name), row in rows.items() if name) / 60:.1f}'),
    ]
    remaining = [part.name for part in check.remaining()]
    write_page(path, 'check.html', title=report.title, report=report, numbers=numbers, wrong=wrong, remaining=remaining)


def of(rows: Rows, part: str) -> dict[str, Values]:
    """The measured rows of a part, by name."""
    return {name: row for (where, name), row in rows.items() if where == part and name and row['status'] == 'measured'}


def machine(where: Mapping[str, Any]) -> Table:
    memory = f'{where["gpu_memory_bytes"] / 1e9:.0f} GB' if where.get('gpu_memory_bytes') else ''
    pairs = [
        ('GPU', f'{where["gpu"] or "none"} {memory}'.strip()),
        ('CPU', f'{where["cpu"]}, {where["num_cores"]} cores'),
        ('driver, CUDA, cuDNN', ', '.join(str(where.get(key)) for key in ('driver', 'cuda', 'cudnn')) if where['gpu'] else 'none'),
        *((name, str(where.get(name))) for name in ('python', 'torch', 'diffusers', 'transformers', 'mosaicml')),
    ]
    return Table(['', ':'], pairs)


def numbers_of(rows: Rows, part: str, compared: Sequence[Comparison], predictions: Predictions) -> list[Block]:
    """Return the table of a part: its numbers, next to what was predicted of them."""
    found = of(rows, part)
    keys = [key for key in NUMBERS if any(isinstance(row.get(key), int | float) for row in found.values())]
    if all(row['gpu'] is None for row in found.values()):  # the resident set of a process on a CPU says nothing about the step
        keys = [key for key in keys if key != 'peak_allocated_bytes']
    lines = []
    for name, row in found.items():
        cells = ['' if row.get(key) is None else number(row[key] * NUMBERS[key][1]) for key in keys]
        said = [f'{one.key} {one.predicted} ({one.off:+.0%})' for one in compared if (one.part, one.row) == (part, name)]
        said += [
            f'target {number(one.target)}, {"met" if (row[one.key] - one.target) * (-1 if one.key == "ms" else 1) >= 0 else "missed"}'
            for one in predictions.of(row['gpu'])
            if (one.part, one.row) == (part, name) and one.target is not None
        ]
        lines.append([name, *cells, '; '.join(said)])
    head = ['', *(NUMBERS[key][0] for key in keys), 'predicted:']
    return [Table(head, lines)] if len(keys) > 1 else []  # the profile has its own


def checks(rows: Rows, part: str) -> list[Block]:
    lines = [
        [name, what, number(value), number(limit), 'right' if value <= limit else 'WRONG']
        for name, row in of(rows, part).items()
        for what, (value, limit) in row.get('checks', {}).items()
    ]
    return [Table(['', 'error of:', 'measured', 'at most', ':'], lines)] if lines else []


def more(rows: Rows, part: str, predictions: Predictions, folder: Path) -> list[Block]:
    """Return what the part has besides numbers."""
    found, blocks = of(rows, part), list[Block]()
    if part == 'profile':
        blocks += profile(rows, predictions)
    for row in found.values():
        if 'image' in row and (folder / row['image']).exists():
            blocks.append(ImageBlock(folder / row['image'], 'Drawn shapes, generated by the exported model'))
    return blocks


def profile(rows: Rows, predictions: Predictions) -> list[Block]:
    """Time by class against the roofline at this machine's own ceilings, and the heaviest kernels."""
    blocks: list[Block] = []
    for name, row in of(rows, 'profile').items():
        same = not row['tiny'] and (row['resolution'], row['micro_batch']) == (predictions.roofline.resolution, predictions.roofline.micro_batch)
        roof = roof_ms(rows, predictions) if same else {}
        lines = []
        for kind in dict.fromkeys([*row['classes_ms'], *roof]):
            ms, least_ms = row['classes_ms'].get(kind, 0.0), roof.get(kind)
            ceiling = ['', ''] if least_ms is None else [number(least_ms), f'{least_ms / ms:.1%}' if ms else '']
            lines.append([kind, number(ms), f'{ms / row["busy_ms"]:.1%}', *ceiling])
        idle = max(0.0, row['wall_ms'] - row['busy_ms'])
        kernels = [[number(kernel['ms']), number(kernel['calls']), kernel['class'], kernel['name'][:90]] for kernel in row['heaviest']]
        blocks += [
            f'{name}, micro-batch {row["micro_batch"]}: {number(row["wall_ms"])} ms a step. Under the profiler {row["num_kernels"]:,} kernels take '
            f'{number(row["busy_ms"])} ms, so that nothing runs for {number(idle)} ms.',
            Table(['', 'ms', 'share', 'ms at the ceilings', 'of the ceiling'], lines),
            'The heaviest kernels:',
            Table(['ms a step', 'calls', 'class:', 'kernel:'], kernels),
            *([f'At the ceilings: {predictions.roofline.source}.'] if roof else []),
        ]
    return blocks


def roof_ms(rows: Rows, predictions: Predictions) -> dict[str, float]:
    """The least that a class can take: its arithmetic at the rate of the matrix product, or its bytes at that of the copy, both measured here."""
    found = of(rows, 'ceilings')
    if not {'matmul', 'copy'} <= found.keys():
        return {}
    tflop_per_sec, gb_per_sec = found['matmul']['tflop_per_sec'], found['copy']['gb_per_sec']
    return {name: 1e3 * max(work.tflop / tflop_per_sec, work.gb / gb_per_sec) for name, work in predictions.roofline.classes.items()}


def aside(rows: Rows) -> list[Block]:
    """Cases without numbers, with the reason, and the time of each part."""
    lines = [[f'{part}: {name or "the whole part"}', row['status'], row['reason'] or ''] for (part, name), row in rows.items()
             if row['status'] not in ('measured', 'finished')]  # fmt: skip
    parts = list(dict.fromkeys(part for part, _ in rows))
    took = [[part, str(sum(bool(name) for where, name in rows if where == part)),
             f'{sum(row["sec"] for (where, name), row in rows.items() if where == part and name):.0f}'] for part in parts]  # fmt: skip
    skipped: list[Block] = [Table(['', 'status:', 'why:'], lines)] if lines else []
    return [*skipped, Table(['part', 'cases', 'seconds'], took)]
