"""Anyscale's tables 2, 3 and 4 (2024): one epoch with several ways to feed the GPUs, an ablation, and the bill. Most blank cells are derived."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from statistics import fmean

from benchmarks.published.cells import CONTRADICTION, Cell, PublishedTable, down, nearest, up
from benchmarks.reporting.series import Bar
from diffusion.cost.formulas import (
    SD2_BASE,
    baseline_of_change,
    baseline_of_ratio,
    dollars,
    fleet_dollars,
    gpu_hours,
    hours,
    images_per_sec_of,
    run_hours,
)
from diffusion.cost.published import ANYSCALE, ANYSCALE_TABLE_3, P4DE_DOLLARS_PER_HOUR, PublishedThroughput

EPOCH = SD2_BASE[0].num_samples  # 1,126,400,000 images at 256 px
P4DE, G5 = 4 * P4DE_DOLLARS_PER_HOUR, 40 * 1.212  # dollars per hour: 32 A100-80GB; 40 g5.2xlarge (1 A10G each) that encode
TOLERANCE = 0.0025

SOURCE = 'the Anyscale post of 2024; GPU type, batch and A100-hours of table 4 from the README of anyscale/templates'

# Times faster than DDP over TCP, as printed beside the images per second.
RATIOS = {
    ('a100-40gb', 256): (1.18, 1.79, 2.71),
    ('a100-40gb', 512): (1.86, 2.52, 3.05),
    ('a100-80gb', 256): (2.59, 3.18, 3.75),
    ('a100-80gb', 512): (2.64, 3.00, 3.46),
}
ODD = ('a100-40gb', 512, 1.86)  # contradicts the two ratios beside it, which agree


def _rows(gpu: str) -> list[PublishedThroughput]:
    return [row for row in ANYSCALE_TABLE_3 if row.gpu == gpu]


def _baseline(gpu: str, resolution: int) -> float:
    """Images per second of DDP over TCP, a column that the source does not print: the mean of what its ratios imply (F11), without the odd one."""
    pairs = zip(_rows(gpu), RATIOS[gpu, resolution], strict=True)
    return fmean(baseline_of_ratio(row.images_per_sec[resolution], ratio) for row, ratio in pairs if (gpu, resolution, ratio) != ODD)


BASELINES = {(gpu, resolution): _baseline(gpu, resolution) for gpu, resolution in RATIOS}


def _table_2() -> Iterator[Cell]:
    rate = _rows('a100-80gb')[0].images_per_sec[256]  # 4,068: what table 1 calls Ray Data is the first step of table 3b
    base_hours = baseline_of_change(76.9, -0.309)
    base, offline, online = 'online, Torch DataLoader', 'offline, Ray Data', 'online, Ray Data, 40 g5.2xlarge'
    yield Cell(base, 'images/s by its hours', None, images_per_sec_of(EPOCH, base_hours), 'F11, F1', '{:,.0f}', note='blank in the post')
    yield Cell(base, 'images/s by table 1', None, baseline_of_ratio(rate, 1.45), 'F11', '{:,.0f}', note='4,068 is 1.45 times of it')
    yield Cell(base, 'hours', None, base_hours, 'F11', '{:,.1f}', note='76.9 h are 30.9 % less')
    yield Cell(base, 'hours by the other row', None, baseline_of_change(76.8, -0.31), 'F11', '{:,.1f}', note='76.8 h are 31.0 % less')
    yield Cell(base, 'cost', None, fleet_dollars(base_hours, [P4DE]), 'F5', '${:,.0f}')
    yield Cell(base, 'cost by the savings', None, baseline_of_change(14_753, -0.189), 'F11', '${:,.0f}', note='$14,753 is 18.9 % less')
    yield Cell(base, 'cost by the other row', None, baseline_of_change(16_275, -0.105), 'F11', '${:,.0f}', note='$16,275 is 10.5 % less')
    yield Cell(offline, 'hours', 76.9, hours(EPOCH, rate), 'F1', tolerance=TOLERANCE)
    note = 'the printed dollars would be those of 76.72 h'
    yield Cell(offline, 'cost', 14_753, fleet_dollars(76.9, [P4DE], 2_183), 'F5', '${:,.0f}', TOLERANCE, note=note)
    yield Cell(online, '$ per hour', None, P4DE + G5, 'F5', '${:,.2f}')
    yield Cell(online, 'images/s by its hours', None, images_per_sec_of(EPOCH, 76.8), 'F1', '{:,.0f}')
    note = 'the printed dollars would be those of 76.65 h'
    yield Cell(online, 'cost', 16_275, fleet_dollars(76.8, [P4DE, G5]), 'F5', '${:,.0f}', TOLERANCE, note=note)
    note = "of what the other row's saving means: its own would give itself back"
    for row, column, share, own, other, other_share in (
        (offline, 'time saved', 0.309, 76.9, 76.8, 0.310),
        (online, 'time saved', 0.310, 76.8, 76.9, 0.309),
        (offline, 'cost saved', 0.189, 14_753, 16_275, 0.105),
        (online, 'cost saved', 0.105, 16_275, 14_753, 0.189),
    ):
        ours = 1 - own / baseline_of_change(other, -other_share)
        yield Cell(row, column, share, ours, 'F11', '{:.1%}', rounding=nearest(3), note=note)
    yield Cell(
        'summary', 'throughput gained', 0.30, rate / images_per_sec_of(EPOCH, base_hours) - 1, 'F11', '{:.1%}', 0.05,
        differs=CONTRADICTION, note='30 % is the time saved; the throughput is 1.45 times',
    )  # fmt: skip
    at_512 = _rows('a100-80gb')[0].images_per_sec[512]
    where = 'table 1, Torch DataLoader'
    yield Cell(
        where, 'images/s at 512 px by the table', None, baseline_of_ratio(at_512, 1.26), 'F11', '{:,.0f}', note='blank; 1,029 is 1.26 times of it'
    )
    yield Cell(where, 'images/s at 512 px by the text', None, baseline_of_ratio(at_512, 1.57), 'F11', '{:,.0f}', note='"1.57 times", below the table')
    step_sec = 4096 / baseline_of_ratio(rate, 1.45)
    yield Cell(
        'figure 3', 'share of the encoders in a step', 0.39, 0.44 / step_sec, '0.44 s / step', '{:.1%}', 0.05,
        differs=CONTRADICTION, note='0.44 s of the 1.46 s that a global batch of 4096 takes at 2,806 images/s; of 1.13 s they would be 39 %',
    )  # fmt: skip
    yield Cell('figure 3', 's saved a step', None, step_sec - 4096 / rate, '4096 / images/s', '{:.3f}', note='fits the 0.44 s')
    a10g_hours = 2_183 / 1.212
    yield Cell('encoding', 'A10G-hours', None, a10g_hours, '$2,183 / $1.212', '{:,.0f}')
    yield Cell('encoding', 'images/s per A10G, offline', None, images_per_sec_of(EPOCH, a10g_hours), 'F1', '{:,.0f}')
    yield Cell('encoding', 'images/s per A10G, online', None, rate / 40, '4,068 / 40', '{:,.0f}', note='if the 40 keep up and no more')
    yield Cell('encoding', 'hours on 48 machines', None, a10g_hours / 48, 'F3', '{:,.1f}', note='"tens of hours"')


def _table_3() -> Iterator[Cell]:
    for (gpu, resolution), ratios in RATIOS.items():
        rows, baseline = _rows(gpu), BASELINES[gpu, resolution]
        where = f'{rows[0].num_gpus} {gpu}, {resolution} px'
        for row, ratio in zip(rows, ratios, strict=True):
            rate = row.images_per_sec[resolution]
            odd = (gpu, resolution, ratio) == ODD
            yield Cell(
                where, f'{row.configuration}, times DDP over TCP', ratio, rate / baseline, 'F11', '{:.3f}', TOLERANCE,
                differs=CONTRADICTION if odd else '',
                note=f'{rate:,} is {ratio} times {baseline_of_ratio(rate, ratio):,.1f}' + ('; the other two ratios say 264 to 265' if odd else ''),
            )  # fmt: skip
        for before, row in pairwise(rows):
            gain = row.images_per_sec[resolution] / before.images_per_sec[resolution]
            yield Cell(where, f'{row.configuration}, times the row above', None, gain, 'F11')


def _table_4() -> Iterator[Cell]:
    where = '4 p4de.24xlarge'
    total = ANYSCALE.gpu_hours(SD2_BASE)
    wall = ANYSCALE.hours(SD2_BASE)
    yield Cell(where, 'A100-hours', 13_165, total, 'F1, F3', '{:,.1f}', 1e-4, note='blank in the post, printed in the README')
    yield Cell(
        where, 'on demand', 67_405, dollars(13_165, P4DE_DOLLARS_PER_HOUR / 8), 'F4', '${:,.2f}', 1e-4, nearest(0), note='of the rounded hours'
    )
    yield Cell(where, 'on demand, unrounded hours', 67_405, fleet_dollars(wall, [P4DE]), 'F5', '${:,.2f}', 1e-4)
    reserved, paid = baseline_of_ratio(39_511, 13_165), dollars(baseline_of_ratio(13_165, 8), 24.01)
    yield Cell(where, 'reserved for a year, per A100-hour', None, reserved, 'F11', '${:,.4f}')
    yield Cell(where, 'reserved for a year, per machine and hour', None, 8 * reserved, 'F11')
    note = 'at the $24.01 derived from it: no independent check'
    yield Cell(where, 'reserved for a year', 39_511, paid, 'F4', '${:,.2f}', 1e-4, note=note)
    yield Cell(where, 'saved by the reservation', None, 1 - 39_511 / 67_405, 'F10', '{:.1%}', note='the AWS post says 40 to 60 %')
    yield Cell(
        'title', 'times faster', 3.7, ANYSCALE.images_per_sec[256] / BASELINES['a100-80gb', 256], 'F11', rounding=down(1), note='over DDP on TCP'
    )
    yield Cell('title', 'less than', 40_000, paid, 'F4', '${:,.0f}', rounding=up(-4), note='reserved for a year, at the derived $24.01')
    yield Cell(
        'text', 'times fewer A100-hours', 10, 200_000 / total, 'A100-hours', '{:.1f}', 0.05, differs=CONTRADICTION,
        note='"over 200,000 A100-hours" reduced "about 10 times"; 10.1 are the dollars, if 200,000 h at $2 are held against $39,511',
    )  # fmt: skip
    small = _rows('a100-40gb')[-1]
    yield Cell(
        '16 A100-40GB',
        'A100-hours',
        None,
        gpu_hours(run_hours(SD2_BASE, small.images_per_sec), 16),
        'F1, F3',
        '{:,.0f}',
        note='fewer than on 32 of 80 GB',
    )


def _ablation() -> Iterator[tuple[str, tuple[Bar, ...]]]:
    for gpu, resolution in RATIOS:
        rows = _rows(gpu)
        bars = [Bar(row.configuration, row.images_per_sec[resolution]) for row in rows]
        first = Bar('DDP over TCP', BASELINES[gpu, resolution], derived=True)
        yield f'{rows[0].num_gpus} {gpu.upper()}, {resolution} px', (first, *bars)


TABLE_2 = PublishedTable(
    'anyscale-table-2',
    'Anyscale, table 2: one epoch of 1,126,400,000 images at 256 px',
    SOURCE,
    '32 A100-80GB (4 p4de.24xlarge at $40.96 an hour, on demand), 40 g5.2xlarge at $1.212 for online encoding. Before FSDP and compilation.',
    tuple(_table_2()),
    (
        'Both printed costs are 0.2 % below what their hours cost. The percentages fit each other: each is worked out from the baseline that the '
        'other row means, as the source prints none.',
        'Table 1 leaves the Torch DataLoader at 512 px blank and contradicts itself about it: 1,029 images/s are 1.26 times of it by the table, '
        '1.57 times by the sentence below.',
    ),
)

TABLE_3 = PublishedTable(
    'anyscale-table-3',
    'Anyscale, table 3: an ablation',
    SOURCE,
    '16 A100-40GB and 32 A100-80GB, global batch 4096. The column of DDP over TCP is derived: the mean of what the printed ratios of a line imply, '
    'so that these are held against each other.',
    tuple(_table_3()),
    ablation=tuple(_ablation()),
)

TABLE_4 = PublishedTable(
    'anyscale-table-4',
    'Anyscale, table 4: the whole run',
    SOURCE,
    '32 A100-80GB, global batch 4096, 1,126,400,000 samples at 256 px and 1,740,800,000 at 512 px at the last rates of table 3b.',
    tuple(_table_4()),
    (
        'Training only, although labelled "offline preprocessing": encoding ($2,183 for phase 1 alone), storage, restarts and evaluation come '
        'on top.',
        'The $39,511 are the hours used, at the price of a reservation for a year. Who has no other use for the rest of that year pays for all of '
        'it: reserved-1y under "Ways to pay".',
    ),
    run=(ANYSCALE,),
)
