"""Numbers of other sources that prices and plans here rest on: micro_diffusion, PRX, EC2 Capacity Blocks and MLPerf.

Prices are those that the sources print; tests/benchmarks/test_reproduction.py holds the entries of diffusion/cost/prices.yaml against them.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.published.cells import Cell, PublishedTable, nearest
from diffusion.cost.formulas import HOURS_PER_DAY, SD2_BASE, baseline_of_ratio, days, dollars, gpu_hours, hours
from diffusion.cost.published import MLPERF

H100_DOLLARS, H200_DOLLARS = 3.75, 2.00  # per GPU-hour: micro_diffusion, PRX
BLOCKS = {'p4d.24xlarge, 8 A100-40GB': 14.75, 'p5.48xlarge, 8 H100': 39.33}  # dollars per machine-hour: EC2 Capacity Blocks


def _cells() -> Iterator[Cell]:
    where, used = 'micro_diffusion, 8 H100', gpu_hours(63, 8)
    yield Cell(where, 'H100-hours', 504, used, 'F3', '{:,.0f}', note='63 hours')
    yield Cell(where, 'cost', 1_890, dollars(used, H100_DOLLARS), 'F4', '${:,.0f}', note='$3.75 per H100-hour')
    yield Cell(where, 'days', 2.6, days(63), 'F2', '{:.3f}', rounding=nearest(1))
    yield Cell('micro_diffusion, 8 A100', 'A100-hours', None, gpu_hours(6.6 * HOURS_PER_DAY, 8), 'F3', '{:,.0f}', note='6.6 days')
    where, used = 'PRX speedrun, 32 H200', gpu_hours(HOURS_PER_DAY, 32)
    yield Cell(where, 'H200-hours', None, used, 'F3', '{:,.0f}', note='24 hours')
    yield Cell(where, 'cost, about', 1_500, dollars(used, H200_DOLLARS), 'F4', '${:,.0f}', rounding=nearest(-2), note='$2 per H200-hour')
    for machine, price in BLOCKS.items():
        note = f'${price} per machine and hour'
        yield Cell(f'EC2 Capacity Blocks, {machine}', '$ per GPU-hour', None, baseline_of_ratio(price, 8), 'F11', '${:.4f}', note=note)
    (row,) = (row for row in MLPERF if (row.gpu, row.num_gpus) == ('h200', 8))
    where, each = f'{row.source}, 8 H200, 512 px', baseline_of_ratio(row.images_per_sec[512], row.num_gpus)
    yield Cell(where, 'images/s per GPU', 149.6, each, 'F11', '{:.2f}', rounding=nearest(1))
    yield Cell(
        where, 'H200-hours of phase 2', None, hours(SD2_BASE[1].num_samples, 149.6), 'F1, F3', '{:,.0f}', note=f'{SD2_BASE[1].amount}, U-Net only'
    )


ANCHORS = PublishedTable(
    'anchors',
    'Other numbers that prices and plans rest on',
    'the papers, posts and price tables that each row names',
    'Runs, prices and throughputs of several kinds, one or two a source; the prices of EC2 Capacity Blocks were valid until 2025-01-01.',
    tuple(_cells()),
    ('The $1,890 of micro_diffusion leave out encoding and storing about 7 TB of latents.',),
)
