"""SaladCloud's 1,000 fine-tuning jobs on interruptible consumer GPUs: a job's minutes to dollars, and dollars to those of a step."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.published.cells import CONTRADICTION, Cell, PublishedTable, down, nearest
from diffusion.cost.formulas import baseline_of_ratio, dollars, gpu_hours, heartbeat_hours, per_step

PRICE = 0.324  # dollars per hour: RTX 4090, 2 virtual CPUs, 16 GB
STEPS = 1400
JOBS = 1000
MEAN, SHORTEST, MEDIAN, LONGEST = 62.01, 41.95, 53.82, 737.92  # minutes
SHARES = {'none': 0.901, 'once': 0.090, 'three or more nodes': 0.009}


def _hours(minutes: float) -> float:
    return heartbeat_hours(2 * minutes)  # of 30 s each


def _job(minutes: float) -> float:
    return dollars(_hours(minutes), PRICE)


def _cells() -> Iterator[Cell]:
    example = heartbeat_hours(108)
    yield Cell('example', 'billable minutes', 54, example * 60, 'F7', '{:.0f}', note='108 heartbeats of 30 s')
    yield Cell('example', 'cost', 0.2916, dollars(example, PRICE), 'F7', '${:.4f}', rounding=nearest(4))
    yield Cell('example', 'cost per step', 0.000208, per_step(dollars(example, PRICE), STEPS), 'F8', '${:.8f}', rounding=nearest(6))
    yield Cell('average', 's per step', 2.66, per_step(MEAN * 60, STEPS), 'F8', '{:.4f}', rounding=nearest(2), note='62.01 min')
    yield Cell('average', 'cost', 0.3348, _job(MEAN), 'F7', '${:.6f}', rounding=down(4))
    yield Cell(
        'average', 'cost per step', 0.00023918, per_step(_job(MEAN), STEPS), 'F8', '${:.9f}', rounding=nearest(8), note='of the cost before rounding'
    )
    yield Cell('minimum', 's per step', 1.80, per_step(SHORTEST * 60, STEPS), 'F8', '{:.4f}', rounding=nearest(2), note='41.95 min')
    yield Cell('minimum', 'cost', 0.2265, _job(SHORTEST), 'F7', '${:.6f}', rounding=down(4))
    yield Cell('minimum', 'cost per step', 0.00016179, per_step(0.2265, STEPS), 'F8', '${:.9f}', rounding=nearest(8), note='of the rounded cost')
    yield Cell(
        'minimum', 'cost per step, unrounded', 0.00016179, per_step(_job(SHORTEST), STEPS), 'F8', '${:.9f}', rounding=nearest(8),
        differs=CONTRADICTION, note='the average is taken before rounding, the minimum after: +0.013 %',
    )  # fmt: skip
    yield Cell('median', 'cost', None, _job(MEDIAN), 'F7', '${:.4f}', note='53.82 min')
    yield Cell('maximum', 'cost', None, _job(LONGEST), 'F7', '${:.3f}', note='737.92 min')
    yield Cell('maximum', 'times the average', 12, LONGEST / MEAN, 'minutes', '{:.1f}', rounding=nearest(0))
    yield Cell('interruptions', 'sum of the shares', 1, sum(SHARES.values()), '90.1 + 9.0 + 0.9 %', '{:.1%}')
    nodes = SHARES['none'] + 2 * SHARES['once'] + 3 * SHARES['three or more nodes']
    yield Cell('interruptions', 'nodes per job, at least', None, nodes, '0.901 + 2 x 0.090 + 3 x 0.009', '{:.3f}')
    total = gpu_hours(_hours(MEAN), JOBS)
    yield Cell('all jobs', 'GPU-hours', None, total, 'F3', '{:,.1f}')
    yield Cell('all jobs', 'cost', None, dollars(total, PRICE), 'F4')
    yield Cell('all jobs', 'hours on 40 nodes, at least', None, baseline_of_ratio(total, 40), 'F3', '{:.1f}')
    yield Cell('all jobs', '$ per million steps', None, 1e6 * per_step(_job(MEAN), STEPS), 'F8')
    yield Cell('checkpoints', 'minutes between', None, 100 * MEAN / STEPS, '100 steps', note='half of it is lost in an interruption, on average')
    yield Cell(
        'title', 'cost per step', 0.00016179, per_step(_job(MEAN), STEPS), 'F8', '${:.8f}', 0.01,
        differs=CONTRADICTION, note='"as low as" is the cheapest of 1,000 jobs; a budget needs the mean, 48 % more',
    )  # fmt: skip


SALAD = PublishedTable(
    'salad-1000-jobs',
    'SaladCloud: 1,000 DreamBooth LoRA jobs of SDXL, 1,400 steps each',
    'the SaladCloud post',
    f'RTX 4090 at ${PRICE} an hour, up to 40 nodes; billed by heartbeats of 30 s; a checkpoint every 100 steps.',
    tuple(_cells()),
    ('One node failed 85 % of the jobs of a first benchmark, before bad nodes were banned.',),
)
