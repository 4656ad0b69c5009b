"""Table and curves of a study as files, and in docs/ablations.md."""

import math
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.ablations.comparison import Axis, Curves, RunCurve, equal, read_batch_sec, read_curve, study_table
from benchmarks.ablations.study import BASELINE, PAGE, AblationRun, Criterion, Study, timed
from diffusion.common.files import replacing, write_text
from diffusion.common.pages import LIGHT, SERIES, new_figure, page_style, png
from diffusion.common.text import counted
from diffusion.contracts.errors import InputError
from diffusion.monitoring.report.run import read_if_present

if TYPE_CHECKING:  # takes a second
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LINES = ('-', '--', ':')
LABELS: dict[Axis, str] = {'flop': 'FLOP', 'sec': 'seconds of training'}


def write_report(study: Study, runs: Sequence[AblationRun], rounds: int, docs: Path | None = None) -> str:
    """Write `table.md` and `curves.png` into the study's folder of runs; returns the table.

    Args:
        rounds: of timing.
        docs: folder whose ablations.md has a line `<!-- STUDY -->` above and below the place of the table; gets the figure too.

    Raises:
        RunError: a log is damaged.
        InputError: the page has no place for the table.
    """
    times: dict[str, list[float]] = {run.variant: [] for run in runs}
    for timing in timed(runs, rounds):
        sec = read_batch_sec(timing.folder)
        times[timing.variant] += [] if sec is None else [sec]
    curves: dict[str, list[RunCurve]] = {}
    left_out = []
    for run in runs:
        batch_sec = median(times[run.variant] or [math.nan])
        curve = read_curve(run.folder, [one.key for one in study.criteria], batch_sec)
        if curve is None:
            left_out.append(run)
        else:
            curves.setdefault(run.variant, []).append(curve)
    if not curves:
        return f'No run of {study.name} has finished in {runs[0].out}; without --table the command trains them.'
    parts = [study_table(study.criteria, curves, times)]
    if left_out:
        parts.append(f'Not finished, and left out: {", ".join(f"{run.variant} (seed {run.seed})" for run in left_out)}.')
    if not curves.get(BASELINE):
        return '\n\n'.join(parts)
    parts.insert(0, _measured_on(next(run for run in runs if run not in left_out), sum(map(len, curves.values()))))
    text = '\n\n'.join(parts)
    folder = runs[0].out / study.name
    write_text(folder / 'table.md', text + '\n')
    pictures = [folder / 'curves.png']
    if docs is not None:
        picture = f'ablations-{study.name}.png'
        pictures.append(docs / picture)
        put(docs / PAGE, study.name, f'{text}\n\n![Loss and scores of {study.name} over FLOP and over time]({picture})')
    content = png(curves_figure(study.criteria, curves))
    for path in pictures:
        with replacing(path) as temporary:
            temporary.write_bytes(content)
    return text


def put(page: Path, name: str, text: str) -> None:
    """Replace what is between the two lines `<!-- NAME -->` of a page.

    Raises:
        InputError: there are not two.
    """
    mark = f'<!-- {name} -->\n'
    parts = page.read_text().split(mark)
    if len(parts) != 3:
        raise InputError(f'{page}: has {len(parts) - 1} lines {mark.strip()}, not one above and one below the table')
    write_text(page, f'{parts[0]}{mark}\n{text}\n\n{mark}{parts[2]}')


def _measured_on(run: AblationRun, num_runs: int) -> str:
    known = read_if_present(run.folder / 'environment.json', dict[str, Any])
    machine = f'{counted(known["num_cores"], "core")} of an {known["cpu"]}' if known.get('gpu') is None else known['gpu']
    return f'{counted(num_runs, "run")}, {machine}, torch {known.get("torch")}, commit {known.get("commit")}, {date.today()}.'


def curves_figure(criteria: Sequence[Criterion], curves: Curves) -> 'Figure':
    """Draw a column per figure, a row per axis that is known: the mean of the seeds, the baseline with their range; a line where the table reads."""
    axes_known = [axis for axis in LABELS if not any(math.isnan(run.total(axis)) for runs in curves.values() for run in runs)]
    with page_style():
        figure = new_figure(4.2 * len(criteria), 3.5 * len(axes_known))
        grid = figure.subplots(len(axes_known), len(criteria), squeeze=False)
        for row, axis in zip(grid, axes_known, strict=True):
            for axes, criterion in zip(row, criteria, strict=True):
                _draw(axes, criterion, axis, curves)
        figure.legend(*grid[0][0].get_legend_handles_labels(), loc='outside lower center', ncols=5, fontsize=9)
    return figure


def _draw(axes: 'Axes', criterion: Criterion, axis: Axis, curves: Curves) -> None:
    end = equal(curves, axis)
    axes.axvline(end, color=LIGHT['line'], linewidth=1)
    series = {name: _series(runs, criterion, axis) for name, runs in curves.items()}
    for number, name in enumerate(name for name in series if name != BASELINE):
        look = {'color': LIGHT[SERIES[number % len(SERIES)]], 'linestyle': LINES[number // len(SERIES) % len(LINES)]}
        axes.plot(series[name][0], series[name][1].mean(axis=0), label=name, linewidth=1.2, **look)  # type: ignore[arg-type]
    x, values = series[BASELINE]
    axes.fill_between(x, values.min(axis=0), values.max(axis=0), color=LIGHT['line'], alpha=0.7, linewidth=0)
    axes.plot(x, values.mean(axis=0), label=BASELINE, color=LIGHT['ink'], linewidth=2)
    # What the curves do in the second half of the budget: the beginning would leave the rest no room.
    late = np.concatenate([values.mean(axis=0)[x >= 0.5 * end] for x, values in series.values()])
    if late.size:
        room = 0.15 * (late.max() - late.min()) or 1.0
        axes.set_ylim(late.min() - room, late.max() + room)
    axes.set(xlabel=LABELS[axis], title=criterion.title)
    axes.grid(alpha=0.3)


def _series(runs: Sequence[RunCurve], criterion: Criterion, axis: Axis) -> tuple[np.ndarray, np.ndarray]:
    """The evaluations that all seeds have: x (N,), mean of the seeds, and values (seeds, N). A run that was stopped at one has skipped it."""
    points = [dict(run.points[criterion.key]) for run in runs]
    batches = sorted(set.intersection(*map(set, points)))
    x = np.array(batches) * np.mean([run.total(axis) / run.batch for run in runs])
    return x, criterion.scale * np.array([[known[batch] for batch in batches] for known in points])
