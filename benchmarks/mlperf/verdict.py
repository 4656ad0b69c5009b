"""What a set of runs is worth by the rules: time to the target of each, and of ten the result and its convergence against the reference."""

import statistics
from collections.abc import Sequence

from benchmarks.mlperf.convergence import RUNS, reference_for, without_extremes
from benchmarks.mlperf.runs import BenchmarkRun
from diffusion.common.text import counted, markdown_table
from diffusion.contracts.errors import InputError


def verdict_on(runs: Sequence[BenchmarkRun], rehearsal: bool = False) -> str:
    """Return a table of the runs and, of ten, the result.

    Raises:
        InputError: runs of several batches, runs with the same seed, or more than ten.
    """
    _refuse_unlike(runs)
    return f'{_table(runs)}\n\n{"A rehearsal: no result." if rehearsal else _result(runs)}'


def _refuse_unlike(runs: Sequence[BenchmarkRun]) -> None:
    batches = sorted({run.recipe.batch.global_size for run in runs})
    if len(batches) > 1:
        raise InputError(f'runs with batches of {", ".join(map(str, batches))}; those of one result have the same one')
    seeds = [run.recipe.seed for run in runs]
    same = [run for run in runs if seeds.count(run.recipe.seed) > 1]
    if same:
        raise InputError(
            f'{same[0].folder} and {same[1].folder} have the seed {same[0].recipe.seed}; each run of a result has one of its own, from the system: '
            "seed=$(od -An -N4 -tu4 /dev/urandom | tr -d ' ')"
        )
    if len(runs) > RUNS:
        raise InputError(f'{len(runs)} runs, and a result is of {RUNS}; name those that count: training_rules.adoc, "Scoring", says which')


def _table(runs: Sequence[BenchmarkRun]) -> str:
    rows = []
    for run in runs:
        last = max(run.scores, default=None) if run.passed is None else run.passed
        score = None if last is None else run.scores[last]
        reached = None if run.passed is None else f'{run.samples(run.passed):,}'
        minutes = None if run.passed is None else run.minutes_to_target
        rows.append(
            [run.folder, run.recipe.seed, run.times.starts, reached, minutes, *((None, None) if score is None else (score.fid, f'{score.clip:.4f}'))]
        )
    return markdown_table(['run', 'seed', 'starts', 'samples to target', 'minutes', 'FID', 'CLIP'], rows)


def _result(runs: Sequence[BenchmarkRun]) -> str:
    failed = sum(run.passed is None for run in runs)
    if len(runs) < RUNS:
        return f'{counted(len(runs), "run")}, {len(runs) - failed} of them at the target; a result is of {RUNS}.'
    if failed > 1:
        return f'No result: {failed} of {RUNS} runs did not reach the target, and one may.'
    batch = runs[0].recipe.batch.global_size
    minutes = statistics.fmean(without_extremes([run.minutes_to_target for run in runs]))
    samples = statistics.fmean(without_extremes([run.samples_to_target for run in runs]))
    lines = [f'Mean without the fastest and the slowest run: {minutes:,.2f} minutes, {samples:,.0f} samples to the target.']
    if not any(all(point in run.scores for point in run.grid) for run in runs if run.passed is not None):
        lines.append('Incomplete: of one run in ten the rules want the scores of all its checkpoints, and of each of these some are missing.')
    reference = reference_for(batch)
    if reference is None:
        return '\n'.join([*lines, f'Not comparable: the reference has no convergence points for batches of {batch:,} or more.'])
    point = f'batch {reference.batch:,}: mean {reference.mean:,.0f}, at least {reference.least:,.0f}'
    if samples < reference.least:
        lines.append(f'Rejected: it converges sooner than the reference may ({point}). The cause is a difference from it, not speed: see mlperf.md.')
    elif samples >= reference.mean:
        lines.append(f'Accepted: it converges no sooner than the reference ({point}).')
    else:
        scaled = minutes * reference.mean / samples
        lines.append(f'Accepted: sooner than the reference, but not significantly ({point}); normalized to its mean: {scaled:,.2f} minutes.')
    return '\n'.join(lines)
