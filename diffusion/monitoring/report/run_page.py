"""The page of one run."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from typing_extensions import TypedDict

from diffusion.common.files import read_json
from diffusion.common.pages import write_page
from diffusion.common.text import counted
from diffusion.contracts.errors import RunError
from diffusion.monitoring.metrics import LEARNING_RATE
from diffusion.monitoring.report.curves import curves, name_in_recipes
from diffusion.monitoring.report.evaluated import evaluated
from diffusion.monitoring.report.images import generated, sample_grids, strips
from diffusion.monitoring.report.run import (
    EVAL,
    EVAL_LOSS,
    GRAD_NORM,
    NOT_BEGUN,
    REMEDY,
    Run,
    format_value,
    read_if_present,
)
from diffusion.monitoring.report.time_and_money import facts, sd2_rows, sd2_samples, time_bar
from diffusion.monitoring.time_accounts import propose
from diffusion.monitoring.time_accounts import rows as account_rows

CALIBRATION = {
    'real': 'shapes as they should be',
    'decoded': 'the same after the autoencoder',
    'chance': 'shapes of other captions',
    'noise': 'uniform noise',
}


class Shares(TypedDict, total=False):
    """Shares of images (0..1) in which the demo finds what their captions say."""

    foreground: float
    background: float
    shape: float
    size: float
    place: float
    everything: float


FIELDS = tuple(Shares.__annotations__)


class Judged(Shares, total=False):
    """Shares in judge.json: of the model, and of images that it is calibrated by."""

    real: Shares
    decoded: Shares
    chance: Shares
    noise: Shares


class ManifestCounts(TypedDict):
    """Fields of a dataset's manifest that the page shows."""

    kind: str
    attempted: int
    num_samples: int
    dropped: dict[str, int]


def write_report(folder: Path, out: Path | None = None) -> Path:
    """Write the page, FOLDER/report.html unless told otherwise, and return its path.

    Raises:
        RunError, RecipeError: as `Run.read`.
        InputError: an evaluation of a checkpoint is damaged.
    """
    run = Run.read(folder)
    judged, accounts = {**read_if_present(folder / 'judge.json', Judged)}, run.accounts  # only the demo judges what it has drawn
    exported = read_if_present(folder / 'export' / 'export.json', dict[str, Any])
    grids, num_grids = sample_grids(folder)
    images, num_images = generated(folder)
    proposal = propose(accounts, run.recipe['checkpoint']['every'], run.recipe['faults']['gpu_hours_between_failures']) if accounts.wall_sec else None
    path = folder / 'report.html' if out is None else out
    write_page(
        path,
        'run.html',
        title=f'{run.recipe["name"]}: training report',
        run=run,
        verdict=verdict(run, is_exported=bool(exported)),
        numbers=headline(run, judged),
        facts=facts(run),
        software=software(run),
        images=images,
        num_images=num_images,
        exported=exported,
        strips=strips([(grid.caption, grid) for grid in grids]),
        num_grids=num_grids,
        grids_shown=len(grids),
        figures=curves({'': run}),
        evaluations=evaluations(run),
        evaluated=evaluated(folder),
        time_bar=time_bar(run) if accounts.wall_sec else None,
        account_rows=account_rows(accounts),
        proposal=proposal,
        manifests=manifests(folder),
        judged=judged_rows(judged),
        sd2=(sd2_samples(), sd2_rows()) if judged else None,
    )
    return path


def headline(run: Run, judged: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(label, value) of the most important numbers."""
    last = run.last
    numbers = [
        ('batches', run.batches),
        ('images/s', format_value(last.get('throughput/images_per_sec'), '{:,.0f}')),
        ('hours so far', format_value(last.get('time/elapsed_hours'), '{:.2f}')),
        _dollars(run),
        (f'training loss in the last tenth ({counted(run.final_loss[1], "record")}), ± standard deviation', run.final_loss[0]),
        ('learning rate', format_value(last.get(LEARNING_RATE), '{:.2e}')),
        ('gradient norm', format_value(last.get(GRAD_NORM), '{:.3g}')),
    ]
    if 'throughput/mfu' in last:
        numbers.insert(2, ('MFU', f'{last["throughput/mfu"]:.1%}'))
    if EVAL_LOSS in last:
        numbers.insert(-2, ('evaluation loss, the last', f'{last[EVAL_LOSS]:.4f}'))
    if judged:
        numbers += [(f'right {field}', format_value(judged.get(field), '{:.1%}')) for field in ('foreground', 'background')]
    return numbers


def verdict(run: Run, is_exported: bool, now: float | None = None) -> tuple[str, str, str]:
    """Return (class of the style sheet, what the run is at, what to do next).

    Args:
        now: Unix time.
    """
    state, last = run.state(now), run.last
    done = f'batch {run.batches}' + (f', {last.get("batch", 0) / run.num_batches:.1%}' if run.num_batches else '')
    if state == NOT_BEGUN:
        return 'warning', 'Not begun', 'Start it with its recipe; a process that has been started still loads: write this page again.'
    if state == 'running':
        left = f'about {last["time/remaining_hours"]:.2f} h to go; ' if 'time/remaining_hours' in last else ''
        return 'running', f'Running: {done}', f'Nothing to do: {left}write this page again for later numbers.'
    if state != 'finished':
        saved = next((event['saved'] for event in reversed(run.events) if event.get('saved') is not None), 0)
        after = f'the checkpoint of batch {saved:,.0f}' if saved else 'the beginning: nothing was saved'
        return 'unsound', f'{state[:1].upper()}{state[1:]}: {done}', f'Run the same command again: it resumes from {after}.'
    if 'autoencoder' in run.recipe:
        return 'sound', f'Finished: {done}', 'Score it: python -m diffusion.reconstruct RUN_FOLDER/export --data IMAGES --out OUT.'
    if not is_exported:
        return 'sound', f'Finished: {done}', 'Export it: python -m diffusion.export RUN_FOLDER MODEL; then score and try it.'
    return 'sound', f'Finished: {done}', 'Score it: python -m diffusion.evaluate MODEL --data IMAGES --out OUT. Try it: python -m diffusion.generate.'


def judged_rows(judged: Mapping[str, Any]) -> list[list[str]]:
    """(images, share of the right ...) of the demo's model and of what its judge is calibrated by; empty without a calibration."""
    subjects: dict[str, Mapping[str, Any]] = {'the model': judged}
    subjects |= {label: shares for name, label in CALIBRATION.items() if (shares := judged.get(name))}
    rows = [[label, *(format_value(shares.get(field), '{:.1%}') for field in FIELDS)] for label, shares in subjects.items()]
    return rows if len(rows) > 1 else []


def _dollars(run: Run) -> tuple[str, str]:
    if run.encoders is not None and run.encoders.dollars is None:
        return 'dollars so far, without the encoders', format_value(run.last.get('cost/dollars_so_far'), '${:,.3f}')
    return 'dollars so far', format_value(run.dollars, '${:,.3f}')


def software(run: Run) -> list[tuple[str, str]]:
    """Rows of dates, devices and versions."""
    dates = run.dates
    shown = [('began', dates[0]), ('last sign of life', dates[1])] if dates else []
    names = {'cpu': 'processor', 'num_gpus': 'processes, one a GPU', 'micro_batch': 'micro-batch'}
    digests = [(f'{name} (SHA-256)', str(digest)[:16]) for name, digest in run.environment.get('encoders', {}).items()]
    known = [(name, value) for name, value in run.environment.items() if name not in ('device', 'price', 'encoders') and value is not None]
    return [*shown, *((names.get(name, name), str(value)) for name, value in known), *digests]


def evaluations(run: Run) -> tuple[list[str], list[list[str]]]:
    """Head and rows of the table of evaluations: batches down; the loss, scores of drawn images and losses by timestep across."""
    found = {name for record in run.log for name in record if name.startswith(EVAL)}
    names = sorted(found, key=lambda name: (name != EVAL_LOSS, name.startswith(EVAL_LOSS), name))
    forms = {name: '{:.4f}' if name.startswith(EVAL_LOSS) else '{:.4g}' for name in names}  # a KID may be a hundred-thousandth
    rows = [
        [f'{record["batch"]:,.0f}', *(format_value(record.get(name), form) if name in record else '' for name, form in forms.items())]
        for record in run.log
        if any(name in record for name in names)
    ]
    return ['batch', *(name_in_recipes(name).replace('loss_t', 't ') for name in names)], rows


def manifests(folder: Path) -> list[tuple[str, ...]]:
    """(dataset, kind, attempted, kept, dropped) of the datasets in the run folder, as the demo's are."""
    rows = list[tuple[str, ...]]()
    for path in sorted(folder.glob('*/manifest.json')):
        manifest = read_json(path, ManifestCounts, RunError, REMEDY)
        dropped = ', '.join(f'{reason}: {count:,}' for reason, count in manifest['dropped'].items()) or 'none'
        rows.append((path.parent.name, manifest['kind'], f'{manifest["attempted"]:,}', f'{manifest["num_samples"]:,}', dropped))
    return rows
