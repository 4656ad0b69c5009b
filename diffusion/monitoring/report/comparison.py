"""The page that compares runs."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from diffusion.common.pages import write_page
from diffusion.common.text import differences
from diffusion.monitoring.report.curves import curves
from diffusion.monitoring.report.images import Strip, sample_grids, strips
from diffusion.monitoring.report.run import EVAL_LOSS, Run, format_value

NOT_COMPARED = ('name', 'run_folder', 'checkpoint.folder')  # differ in any two runs


def write_comparison(folders: Sequence[Path], out: Path | None = None) -> Path:
    """Write the page and return its path.

    Raises:
        RunError, RecipeError: as `Run.read`.
    """
    runs = named([Run.read(folder) for folder in folders])
    path = folders[0].resolve().parent / 'comparison.html' if out is None else out
    write_page(
        path,
        'comparison.html',
        title=f'{" and ".join(runs)}: comparison' if len(runs) < 4 else f'comparison of {len(runs)} runs',
        runs=runs,
        facts=facts(runs),
        figures=curves(runs),
        strips=samples(runs),
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


def facts(runs: Mapping[str, Run]) -> list[tuple[str, ...]]:
    """Rows of results, one column per run."""
    metrics = [
        ('images/s', 'throughput/images_per_sec', '{:,.1f}'),
        ('images/s per GPU', 'throughput/images_per_sec_per_gpu', '{:,.1f}'),
        ('MFU', 'throughput/mfu', '{:.1%}'),
        ('peak memory', 'throughput/peak_memory_gb', '{:.2f} GB'),
        ('waiting for data', 'throughput/data_wait_share', '{:.1%}'),
        ('hours', 'time/elapsed_hours', '{:.3f}'),
        ('evaluation loss, the last', EVAL_LOSS, '{:.4f}'),
    ]
    return [
        ('state', *(run.state() for run in runs.values())),
        ('batches', *(run.batches for run in runs.values())),
        ('samples seen', *(f'{run.samples_seen:,.0f}' for run in runs.values())),
        *((label, *(format_value(run.last.get(metric), pattern) for run in runs.values())) for label, metric, pattern in metrics),
        ('dollars', *(format_value(run.dollars, '${:,.4f}') for run in runs.values())),
        ('training loss in the last tenth, ± standard deviation', *(run.final_loss[0] for run in runs.values())),
        ('device', *(run.device for run in runs.values())),
        ('began', *(run.dates[0] if run.dates else 'not yet' for run in runs.values())),
    ]


def samples(runs: Mapping[str, Run]) -> list[Strip]:
    """For each prompt the last image of each run, side by side."""
    last = {name: grids[-1] for name, run in runs.items() if (grids := sample_grids(run.folder)[0])}
    return strips([(f'{name}: {grid.caption}', grid) for name, grid in last.items()])
