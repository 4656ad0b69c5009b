"""The page of one run, and the page that compares several."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from typing_extensions import TypedDict

from diffusion.common.files import read_json
from diffusion.common.pages import write_page
from diffusion.common.text import counted, differences
from diffusion.contracts.errors import RunError
from diffusion.contracts.scenes import Verdict
from diffusion.cost.encoders import NO_PRICE
from diffusion.cost.formulas import HOURS_PER_DAY, SD2_BASE
from diffusion.cost.throughput import ANYSCALE, MOSAICML_TWO_PHASE
from diffusion.evaluation.job.results import RESULT_NAME
from diffusion.evaluation.pages.comparing import format_point, groups, read_models
from diffusion.evaluation.pages.figures import over_batches
from diffusion.monitoring.report.pictures import curves, generated, name_in_recipes, sample_grids, strips, time_bar
from diffusion.monitoring.report.run import EVAL_LOSS, GRAD_NORM, NOT_BEGUN, REMEDY, Run, format_value, read_if_present
from diffusion.monitoring.time_accounts import EARLY, propose, rows
from diffusion.recipe.averaging import coverage
from diffusion.recipe.schema import Ema
from diffusion.recipe.techniques import LEARNING_RATE

NOT_COMPARED = ('name', 'run_folder', 'checkpoint.folder')  # differ in any two runs
MEASURED = {
    'images/s': ('throughput/images_per_sec', '{:,.1f}'),
    'images/s per GPU': ('throughput/images_per_sec_per_gpu', '{:,.1f}'),
    'MFU': ('throughput/mfu', '{:.1%}'),
    'peak memory': ('throughput/peak_memory_gb', '{:.2f} GB'),
    'waiting for data': ('throughput/data_wait_share', '{:.1%}'),
    'hours': ('time/elapsed_hours', '{:.3f}'),
}
CALIBRATION = {
    'real': 'shapes as they should be',
    'decoded': 'the same after the autoencoder',
    'chance': 'shapes of other captions',
    'noise': 'uniform noise',
}


class Judged(Verdict, total=False):
    """judge.json: shares of the model's images, and of those that the judge is calibrated by."""

    real: Verdict
    decoded: Verdict
    chance: Verdict
    noise: Verdict


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
        strips=strips((grid.caption, grid) for grid in grids),
        num_grids=num_grids,
        grids_shown=len(grids),
        figures=curves({'': run}),
        evaluations=evaluations(run),
        evaluated=evaluated(folder),
        time_bar=time_bar(accounts) if accounts.wall_sec else None,
        account_rows=rows(accounts),
        proposal=propose(accounts, run.recipe['checkpoint']['every'], run.recipe['faults']['gpu_hours_between_failures']),
        manifests=manifests(folder),
        judged=judged_rows(judged),
        sd2=sd2_rows() if judged else None,
        sd2_samples=' and '.join(f'{phase.num_samples / 1e9:.2f} billion samples at {phase.resolution} px' for phase in SD2_BASE),
    )
    return path


def write_comparison(folders: Sequence[Path], out: Path | None = None) -> Path:
    """Write the page and return its path.

    Raises:
        RunError, RecipeError: as `Run.read`.
    """
    runs = named([Run.read(folder) for folder in folders])
    path = folders[0].resolve().parent / 'comparison.html' if out is None else out
    last = {name: grids[-1] for name, run in runs.items() if (grids := sample_grids(run.folder)[0])}
    columns = [compared_facts(run) for run in runs.values()]
    write_page(
        path,
        'comparison.html',
        title=f'{" and ".join(runs)}: comparison' if len(runs) < 4 else f'comparison of {len(runs)} runs',
        runs=runs,
        facts=[(label, *(column[label] for column in columns)) for label in columns[0]],
        figures=curves(runs),
        strips=strips((f'{name}: {grid.caption}', grid) for name, grid in last.items()),
        differences=differences({name: run.recipe for name, run in runs.items()}, NOT_COMPARED),
        environments=differences({name: run.environment for name, run in runs.items()}),
    )
    return path


def named(runs: Sequence[Run]) -> dict[str, Run]:
    """Name runs by recipe; by folder, then also by number, where names repeat."""
    for name_of in (lambda run: run.recipe['name'], lambda run: run.folder.resolve().name):
        names = [name_of(run) for run in runs]
        if len(set(names)) == len(runs):
            return dict(zip(names, runs, strict=True))
    return {f'{number}: {run.folder}': run for number, run in enumerate(runs, 1)}


def verdict(run: Run, is_exported: bool) -> tuple[str, str, str]:
    """Return (class of the style sheet, what the run is at, what to do next)."""
    state, last = run.state(), run.last
    done = f'batch {run.batches}' + (f', {last.get("batch", 0) / run.num_batches:.1%}' if run.num_batches else '')
    if state == NOT_BEGUN:
        return 'warning', 'Not begun', 'Start it with its recipe; a process that has been started still loads: write this page again.'
    if state == 'running':
        left = f'about {last["time/remaining_hours"]:.2f} h to go; ' if 'time/remaining_hours' in last else ''
        return 'running', f'Running: {done}', f'Nothing to do: {left}write this page again for later numbers.'
    if state not in ('finished', EARLY):
        saved = next((event['saved'] for event in reversed(run.events) if event.get('saved') is not None), 0)
        after = f'the checkpoint of batch {saved:,.0f}' if saved else 'the beginning: nothing was saved'
        return 'unsound', f'{state[:1].upper()}{state[1:]}: {done}', f'Run the same command again: it resumes from {after}.'
    if 'autoencoder' in run.recipe:
        advice = 'Score it: python -m diffusion.reconstruct RUN_FOLDER/export --data IMAGES --out OUT.'
    elif not is_exported:
        advice = 'Export it: python -m diffusion.export RUN_FOLDER MODEL; then score and try it.'
    else:
        advice = 'Score it: python -m diffusion.evaluate MODEL --data IMAGES --out OUT. Try it: python -m diffusion.generate.'
    if state == EARLY:
        patience = run.recipe['eval']['samples']['stop']['patience']
        advice = f'Its score no longer improved; an eval.samples.stop.patience above {patience} lets it train on. {advice}'
    return 'sound', f'{state.capitalize()}: {done}', advice


def headline(run: Run, judged: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(label, value) of the most important numbers; scores first, the worst of them at the beginning."""
    last = run.last
    loss, num_records = run.final_loss
    dollars = 'dollars so far', run.dollars
    if run.encoders is not None and run.encoders.price is None:
        dollars = 'dollars so far, without the encoders', last.get('cost/dollars_so_far')
    scores = sorted((judged[field], field) for field in Verdict.__annotations__ if field != 'num_images' and field in judged)
    return [
        *(('all five right' if field == 'everything' else f'right {field}', f'{share:.1%}') for share, field in scores),
        *((f'{name_in_recipes(name)} of drawn images, the last', run.score_text(last, name)) for name in run.scores),
        ('batches', run.batches),
        ('images/s', format_value(last.get('throughput/images_per_sec'), '{:,.0f}')),
        *([('MFU', f'{last["throughput/mfu"]:.1%}')] if 'throughput/mfu' in last else []),
        ('hours so far', format_value(last.get('time/elapsed_hours'), '{:.2f}')),
        (dollars[0], format_value(dollars[1], '${:,.3f}')),
        (f'training loss in the last tenth ({counted(num_records, "record")}), ± standard deviation', loss),
        *([('evaluation loss, the last', f'{last[EVAL_LOSS]:.4f}')] if EVAL_LOSS in last else []),
        ('learning rate', format_value(last.get(LEARNING_RATE), '{:.2e}')),
        ('gradient norm', format_value(last.get(GRAD_NORM), '{:.3g}')),
    ]


def _measured(run: Run) -> dict[str, str]:
    return {label: format_value(run.last.get(metric), pattern) for label, (metric, pattern) in MEASURED.items()}


def compared_facts(run: Run) -> dict[str, str]:
    """Results of a run by their labels."""
    return {
        'state': run.state(),
        'batches': run.batches,
        'samples seen': f'{run.samples_seen:,.0f}',
        **_measured(run),
        'evaluation loss, the last': format_value(run.last.get(EVAL_LOSS), '{:.4f}'),
        'dollars': format_value(run.dollars, '${:,.4f}'),
        'training loss in the last tenth, ± standard deviation': run.final_loss[0],
        'device': run.device,
        'began': run.dates[0] if run.dates else 'not yet',
    }


def facts(run: Run) -> list[tuple[str, str]]:
    """Rows of time and money."""
    last, price, bill = run.last, run.price, run.encoders
    encoders = []
    if bill is not None:  # of the machines that encode next to training
        known = bill.price is not None
        spent = f'${bill.dollars:,.4f} at {bill.price}' if known else f'not included: their price is not known; {NO_PRICE}'
        encoders = [('encoders (data.encoders)', bill.formula), ('spent on encoders', spent)]
        encoders += [] if not known else [('spent with encoders', format_value(run.dollars, '${:,.4f}'))]
    return [
        ('device', run.device),
        ('samples seen', f'{run.samples_seen:,.0f}'),
        ('the average (EMA) covers', str(coverage(Ema(**run.recipe['ema']), int(last.get('batch', 0))) or 'nothing yet')),
        *(row for row in _measured(run).items() if row[0] != 'images/s per GPU' or run.environment.get('num_gpus', 1) > 1),
        ('hours to go', format_value(last.get('time/remaining_hours'), '{:.3f}')),
        ('price', str(price) if price is not None else 'not known'),
        ('spent', format_value(last.get('cost/dollars_so_far'), '${:,.4f}')),
        *encoders,
        ('to spend', format_value(last.get('cost/dollars_to_go'), '${:,.4f}')),
    ]


def software(run: Run) -> list[tuple[str, str]]:
    """Rows of dates, devices and versions."""
    dates = zip(('began', 'last sign of life'), run.dates or (), strict=False)
    names = {'cpu': 'processor', 'num_gpus': 'processes, one a GPU', 'micro_batch': 'micro-batch'}
    digests = [(f'{name} (SHA-256)', str(digest)[:16]) for name, digest in run.environment.get('encoders', {}).items()]
    known = [(name, value) for name, value in run.environment.items() if name not in ('device', 'price', 'encoders') and value is not None]
    return [*dates, *((names.get(name, name), str(value)) for name, value in known), *digests]


def evaluations(run: Run) -> tuple[list[str], list[list[str]]]:
    """Head and rows of the table of evaluations: batches down; the loss, scores of drawn images and losses by timestep across."""
    losses = sorted(name for name in run.last if name.startswith(EVAL_LOSS))
    names = [*losses[:1], *run.scores, *losses[1:]]

    def cell(record: dict[str, float], name: str) -> str:
        if name not in record:
            return ''
        return f'{record[name]:.4f}' if name in losses else run.score_text(record, name)

    table = [[f'{record["batch"]:,.0f}', *(cell(record, name) for name in names)] for record in run.log if any(name in record for name in names)]
    return ['batch', *(name_in_recipes(name).replace('loss_t', 't ') for name in names)], table


def evaluated(run: Path) -> list[dict[str, Any]]:
    """RUN/evaluations/*/evaluation.json, which `diffusion.evaluate` wrote: `protocol`, `head` and `rows` of a table, and `figures`, by protocol.

    Raises:
        InputError: a result is damaged.
    """
    folders = sorted(path.parent for path in (run / 'evaluations').glob(f'*/{RESULT_NAME}'))
    parts = []
    for group in groups(read_models(folders)) if folders else []:
        table = []
        for model in sorted(group.models, key=lambda model: model.result['model']['batches'] or 0):
            batches = model.result['model']['batches']
            for score in sorted(model.result['scores'], key=lambda score: score['guidance']):
                points = (model.curves.get(measure, {}).get(score['guidance']) for measure in group.measures)
                numbers = [format_point(point) if point is not None else '' for point in points]
                table.append([model.folder.name, 'not known' if batches is None else f'{batches:,}', f'{score["guidance"]:g}', *numbers])
        drawn = f'{group.protocol["samples"]:,} images of {group.protocol["resolution"]} px in {group.protocol["steps"]} steps'
        head = ['evaluation', 'batch', 'guidance', *(f'{measure.title} {measure.arrow}' for measure in group.measures)]
        about = f'{drawn}, protocol {group.models[0].result["digest"]}'
        parts.append({'protocol': about, 'head': head, 'rows': table, 'figures': over_batches(group)})
    return parts


def manifests(folder: Path) -> list[tuple[str, ...]]:
    """(dataset, kind, attempted, kept, dropped) of the datasets in the run folder, as the demo's are."""
    table = list[tuple[str, ...]]()
    for path in sorted(folder.glob('*/manifest.json')):
        manifest = read_json(path, ManifestCounts, RunError, REMEDY)
        dropped = ', '.join(f'{reason}: {count:,}' for reason, count in manifest['dropped'].items()) or 'none'
        table.append((path.parent.name, manifest['kind'], f'{manifest["attempted"]:,}', f'{manifest["num_samples"]:,}', dropped))
    return table


def judged_rows(judged: Mapping[str, Any]) -> list[list[str]]:
    """(images, share of the right ...) of the demo's model and of what its judge is calibrated by; empty without a calibration."""
    subjects: dict[str, Mapping[str, Any]] = {'the model': judged}
    subjects |= {label: shares for name, label in CALIBRATION.items() if (shares := judged.get(name))}
    fields = [field for field in Verdict.__annotations__ if field != 'num_images']
    table = [[label, *(format_value(shares.get(field), '{:.1%}') for field in fields)] for label, shares in subjects.items()]
    return table if len(table) > 1 else []


def sd2_rows() -> list[tuple[str, ...]]:
    """Published runs of Stable Diffusion 2 base, of the same shape: GPUs, images/s at 256 and 512 px, days, price, dollars, source."""
    return [
        (
            f'{row.num_gpus} x {row.gpu}',
            f'{row.images_per_sec[256]:,.0f}',
            f'{row.images_per_sec[512]:,.0f}',
            f'{row.hours(SD2_BASE) / HOURS_PER_DAY:,.2f}',
            f'${row.price_per_gpu_hour:.2f}',
            f'${row.dollars(SD2_BASE):,.0f}',
            row.source,
        )
        for row in (*MOSAICML_TWO_PHASE, ANYSCALE)
    ]
