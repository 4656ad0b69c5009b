"""Tables and figures of a study as files, and in docs/ablations.md."""

import math
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.ablations.curves import RunCurve, read_batch_sec, read_curve
from benchmarks.ablations.study import BASELINE, PAGE, AblationRun, Study, timed
from benchmarks.ablations.table import study_table
from diffusion.common.files import replacing, write_text
from diffusion.common.text import counted
from diffusion.contracts.errors import InputError
from diffusion.monitoring.report.run import read_if_present


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
    from benchmarks.ablations.chart import curves_figure  # takes a second
    from diffusion.common.pages import png

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
