"""The rows of a GPU check as one page: the verdict, then every subject with its predictions and limits next to what was measured."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks.checking.cases import Values
from benchmarks.checking.judging import FAILED, Comparison, Predictions, comparisons, problems
from benchmarks.checking.rows import hardware, number, result
from benchmarks.checking.slices import Check
from benchmarks.optimizations import OPTIMIZATIONS
from benchmarks.reporting.page import Block, FigureBlock, ImageBlock, Report, Section, Table
from diffusion.common.pages import LIGHT, new_figure, page_style, write_page

WIDTH, BAR_HEIGHT, MARGIN = 8.4, 0.27, 0.7  # of figures, in inches
Rows = Mapping[tuple[str, str], Values]
ABOUT_LADDER = (
    'Each row adds one setting to the row above it; '
    + '; '.join(f'"{optimization.name}" to "{optimization.to}"' for optimization in OPTIMIZATIONS if optimization.to)
    + '.'
)
STEP_HEAD = ['', 'micro-batch', 'images/s', 'of the first', 'ms a step', 'spread', 'MFU', 'peak GB', 'note:']


def write(path: Path, check: Check, predictions: Predictions) -> None:
    """Write the page, whole or not at all; images of the rows lie next to it."""
    rows, where = check.rows, check.environment
    compared, wrong = comparisons(rows.values(), predictions), problems(rows, predictions)
    dates = sorted(row['date'] for row in rows.values())
    when = f'{dates[0][:16]} to {dates[-1][:16]} UTC' if dates else 'nothing measured yet'
    lead = f'Commit {where["commit"]}, PyTorch {where["torch"]}, {when}.'
    if check.setting.tiny:
        lead += ' Small form: what is checked for being right is checked; speeds are those of a toy and are compared with nothing.'
    known = Comparisons(compared)
    sections = [
        Section('Machine', [machine(where)]),
        Section('Ceilings and headline', [*ceilings(rows, known), *headline(rows, predictions, where, known)]),
        Section('Is it right?', [checks(rows, ('correctness', 'training')), *layers(rows)]),
        Section('What each setting gives', steps(rows, 'ladder', ABOUT_LADDER)),
        Section('Where the time goes', profile(rows, predictions)),
        Section('Memory, optimizer, average', [memory(rows, known), optimizer(rows, known)]),
        Section('Settings that are not in the recipes', steps(rows, 'variations', 'Each against the first row, the headline unchanged.')),
        Section('The demo, trained here', demo(rows, known, path.parent)),
        Section('Skipped, failed, and time', aside(rows)),
    ]
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


class Comparisons(list[Comparison]):
    """All comparisons of the rows."""

    def text(self, part: str, name: str, key: str) -> str:
        """Return the prediction of a value and its relative error; empty if there is none."""
        found = [one for one in self if (one.part, one.row, one.key) == (part, name, key)]
        return '; '.join(f'{one.predicted}{f" ({one.off:+.0%})" if abs(one.off) >= 0.005 else ""}' for one in found)


def machine(where: Mapping[str, Any]) -> Table:
    memory = f'{where["gpu_memory_bytes"] / 1e9:.0f} GB' if where.get('gpu_memory_bytes') else ''
    pairs = [
        ('GPU', f'{where["gpu"] or "none"} {memory}'.strip()),
        ('CPU', f'{where["cpu"]}, {where["num_cores"]} cores'),
        ('driver, CUDA, cuDNN', ', '.join(str(where.get(key)) for key in ('driver', 'cuda', 'cudnn')) if where['gpu'] else 'none'),
        *((name, str(where.get(name))) for name in ('python', 'torch', 'diffusers', 'transformers', 'mosaicml')),
    ]
    return Table(['', ':'], pairs)


def ceilings(rows: Rows, known: Comparisons) -> list[Block]:
    units = {'matmul': ('tflop_per_sec', 'TFLOP/s'), 'copy': ('gb_per_sec', 'GB/s')}
    lines = [[name, f'{number(row[units[name][0]])} {units[name][1]}', known.text('ceilings', name, units[name][0])] for name, row in
             of(rows, 'ceilings').items()]  # fmt: skip
    return [Table(['', 'measured', 'predicted'], lines)] if lines else []


def headline(rows: Rows, predictions: Predictions, where: Mapping[str, Any], known: Comparisons) -> list[Block]:
    targets = {(one.part, one.row): one.target for one in predictions.of(where['gpu'])}
    found = of(rows, 'headline')
    lines = []
    for name, row in found.items():
        target = targets.get(('headline', name))
        lines.append([
            name, str(row['micro_batch']), number(row['images_per_sec']), known.text('headline', name, 'images_per_sec'),
            f'{target:.0f}, {"met" if row["images_per_sec"] >= target else "missed"}' if target else '',
            percent(row['mfu']), number(row['median_sec'] * 1e3), percent(row['spread']), gigabytes(row),
        ])  # fmt: skip
    head = ['', 'micro-batch', 'images/s', 'predicted', 'target', 'MFU', 'ms a step', 'spread', 'peak GB']
    return ['A step as train.py takes it, without loader and average of the weights:', Table(head, lines)] if lines else []


def steps(rows: Rows, part: str, about: str) -> list[Block]:
    """Rows of benchmarks.step as table and figure."""
    found = of(rows, part)
    if not found:
        return []
    first = next(iter(found.values()))['images_per_sec']
    lines = []
    for (where, name), row in rows.items():
        if where != part or not name:
            continue
        if name not in found:
            lines.append([name, '', '', '', '', '', '', '', result(row)])
            continue
        speed = row['images_per_sec']
        lines.append([name, str(row['micro_batch']), number(speed), f'{speed / first:.2f}', number(row['median_sec'] * 1e3), percent(row['spread']),
                      percent(row['mfu']), gigabytes(row), ''])  # fmt: skip
    rates = {name: row['images_per_sec'] for name, row in found.items()}
    return [about, Table(STEP_HEAD, lines), FigureBlock(part, rates_figure(rates), f'Images per second: {part}')]


def checks(rows: Rows, parts: Sequence[str]) -> Table:
    lines = []
    for (part, name), row in rows.items():
        if part not in parts or not name:
            continue
        if row['status'] in FAILED:
            lines.append([f'{part}: {name}', result(row), '', '', 'wrong'])
        for what, (value, limit) in row.get('checks', {}).items():
            lines.append([f'{part}: {name}', what, number(value), number(limit), 'right' if value <= limit else 'WRONG'])
    return Table(['', 'error of:', 'measured', 'at most', ':'], lines)


def layers(rows: Rows) -> list[Block]:
    row = of(rows, 'correctness').get('layouts')
    if row is None:
        return []
    lost = row['layers_that_leave_channels_last']
    named = ', '.join(f'{name} ({count})' for name, count in lost.items())
    return [f'Layers of the eager U-Net that leave channels_last: {named or "none"}.']


def profile(rows: Rows, predictions: Predictions) -> list[Block]:
    """Time by class against the roofline at this machine's own ceilings, and the heaviest kernels."""
    blocks: list[Block] = []
    bounds = roof_ms(rows, predictions)
    for name, row in of(rows, 'profile').items():
        same = not row['tiny'] and (row['resolution'], row['micro_batch']) == (predictions.roofline.resolution, predictions.roofline.micro_batch)
        roof = bounds if same else {}
        names = [*row['classes_ms'], *(one for one in roof if one not in row['classes_ms'])]
        lines = []
        for one in names:
            ms = row['classes_ms'].get(one, 0.0)
            lines.append([one, number(ms), percent(ms / row['busy_ms']), number(roof[one]) if one in roof else '', percent(roof[one] / ms)
                          if one in roof and ms else ''])  # fmt: skip
        idle = max(0.0, row['wall_ms'] - row['busy_ms'])
        blocks += [
            f'{name}, micro-batch {row["micro_batch"]}: {number(row["wall_ms"])} ms a step. Under the profiler {row["num_kernels"]:,} kernels take '
            f'{number(row["busy_ms"])} ms, so that nothing runs for {number(idle)} ms.',
            Table(['', 'ms', 'share', 'ms at the ceilings', 'of the ceiling'], lines),
            FigureBlock('profile', classes_figure(row['classes_ms'], roof), 'Milliseconds of a step by class of kernels'
                    + (', and what they would take at the ceilings measured above' if roof else '')),
            'The heaviest kernels:',
            Table(['ms a step', 'calls', 'class:', 'kernel:'], [
                [number(kernel['ms']), number(kernel['calls']), kernel['class'], kernel['name'][:90]] for kernel in row['heaviest']
            ]),
        ]  # fmt: skip
        if roof:
            blocks.append(f'At the ceilings: {predictions.roofline.source}.')
    return blocks


def roof_ms(rows: Rows, predictions: Predictions) -> dict[str, float]:
    """The least that a class can take: its arithmetic at the rate of the matrix product, or its bytes at that of the copy, both measured here."""
    found = of(rows, 'ceilings')
    if not {'matmul', 'copy'} <= found.keys():
        return {}
    tflop_per_sec, gb_per_sec = found['matmul']['tflop_per_sec'], found['copy']['gb_per_sec']
    return {name: 1e3 * max(work.tflop / tflop_per_sec, work.gb / gb_per_sec) for name, work in predictions.roofline.classes.items()}


def memory(rows: Rows, known: Comparisons) -> Table:
    lines = []
    for name, row in of(rows, 'memory').items():
        if 'micro_batch' in row.get('predicted', {}):
            lines.append([name, f'{row["micro_batch"]} images', known.text('memory', name, 'micro_batch') + ' images'])
        elif 'peak_allocated_bytes' in row:
            expected, peak = row['predicted_bytes'], row['peak_allocated_bytes']
            lines.append([name, f'{peak / 1e9:.2f} GB', f'{expected / 1e9:.2f} GB ({peak / expected - 1:+.0%})'])
        else:
            lines.append([name, 'needs a GPU', f'{row["predicted_bytes"] / 1e9:.3f} GB'])
    return Table(['eager step', 'measured', 'predicted'], lines)


def optimizer(rows: Rows, known: Comparisons) -> Table:
    lines = [
        [name, number(row['ms']), known.text('optimizer', name, 'ms'), percent(row['spread']), number(row['gb_per_sec']),
         f'{row["composer_ms"] / row["ms"]:.1f} times as fast as Composer' if 'composer_ms' in row else '']
        for name, row in of(rows, 'optimizer').items()
    ]  # fmt: skip
    return Table(['', 'ms', 'predicted', 'spread', 'GB/s', ':'], lines)


def demo(rows: Rows, known: Comparisons, folder: Path) -> list[Block]:
    blocks: list[Block] = []
    for name, row in of(rows, 'demo').items():
        rate = f', {number(row["images_per_sec"])} images/s' if row['images_per_sec'] else ''
        text = f'Loss {number(row["first_loss"])} to {number(row["last_loss"])}{rate}. Of {row["num_images"]} images '
        text += f'{percent(row["foreground"])} have the right foreground, {percent(row["background"])} the right background'
        text += f' (foreground predicted: {said}).' if (said := known.text('demo', name, 'foreground')) else '.'
        blocks.append(text)
        if (folder / row['image']).exists():
            blocks.append(ImageBlock(folder / row['image'], 'Drawn shapes, generated by the exported model'))
    return blocks


def aside(rows: Rows) -> list[Block]:
    """Cases without numbers, with the reason, and the time of each part."""
    lines = [[f'{part}: {name or "the whole part"}', row['status'], row['reason'] or ''] for (part, name), row in rows.items()
             if row['status'] not in ('measured', 'finished')]  # fmt: skip
    parts = list(dict.fromkeys(part for part, _ in rows))
    took = [[part, str(sum(bool(name) for where, name in rows if where == part)),
             f'{sum(row["sec"] for (where, name), row in rows.items() if where == part and name):.0f}'] for part in parts]  # fmt: skip
    skipped: list[Block] = [Table(['', 'status:', 'why:'], lines)] if lines else []
    return [*skipped, Table(['part', 'cases', 'seconds'], took)]


def percent(share: float | None) -> str:
    return '' if share is None else f'{share:.1%}'


def gigabytes(row: Values) -> str:
    """Of a GPU; the resident set of a process on a CPU says nothing about the step."""
    return f'{row["peak_allocated_bytes"] / 1e9:.1f}' if row['gpu'] is not None else ''


def rates_figure(rates: Mapping[str, float]) -> Figure:
    """Images per second, a bar each."""
    with page_style():
        figure = new_figure(WIDTH, MARGIN + BAR_HEIGHT * len(rates))
        axes = figure.add_subplot()
        bars = axes.barh(list(rates), list(rates.values()), height=0.7, color=LIGHT['series1'])
        axes.bar_label(bars, fmt='{:,.3g}', padding=3, color=LIGHT['ink'])
        axes.invert_yaxis()
        axes.margins(x=0.1)
        axes.set_xlabel('images/s')
    return figure


def classes_figure(classes_ms: Mapping[str, float], roof_ms: Mapping[str, float]) -> Figure:
    """Milliseconds by class of kernels; a mark where the ceilings are."""
    names = [*classes_ms, *(name for name in roof_ms if name not in classes_ms)]
    with page_style():
        figure = new_figure(WIDTH, MARGIN + 0.3 + BAR_HEIGHT * len(names))
        axes = figure.add_subplot()
        axes.barh(names, [classes_ms.get(name, 0.0) for name in names], height=0.7, color=LIGHT['series1'], label='measured')
        if roof_ms:
            places = [place for place, name in enumerate(names) if name in roof_ms]
            axes.plot([roof_ms[names[place]] for place in places], places, '|', color=LIGHT['series2'], ms=12, mew=2.5, label='at the ceilings')
            axes.legend(loc='lower right')
        axes.invert_yaxis()
        axes.set_xlabel('ms a step')
    return figure
