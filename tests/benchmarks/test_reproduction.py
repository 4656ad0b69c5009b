"""Published tables, worked out again: every cell as closely as the sources allow, and a check that can fail."""

import dataclasses
import math
import re
import sys

import pytest

from benchmarks import report
from benchmarks.published import FORMULAS, REASONS, Cell, Rounding, published_tables
from diffusion.cost.prices import load_prices
from diffusion.cost.scaling import ScalingPoint, fit
from diffusion.cost.throughput import MOSAICML_TWO_PHASE
from tests.monitoring.report.pages import assert_stands_alone

TABLES = published_tables()
CONTRADICTION, OTHER_SOURCES, OUTLIER = REASONS.values()
CELLS = [(name, cell) for name, table in TABLES.items() for cell in table.cells]


def of(table, row, column):
    """The one cell."""
    (found,) = (cell for cell in TABLES[table].cells if (cell.row, cell.column) == (row, column))
    return found


@pytest.mark.parametrize(('table', 'cell'), CELLS, ids=[f'{name}-{cell.row}-{cell.column}'.replace(' ', '_') for name, cell in CELLS])
def test_a_cell_is_as_this_repository_says(table, cell):
    assert cell.holds, cell.texts()
    assert math.isfinite(cell.ours)
    assert cell.ours > 0


def test_no_tolerance_is_wider_than_the_source_needs():
    """2 % on the dollars and 0.01 % on the hours of January 2023; floors in the two-phase table; 0.25 % and 0.01 % at Anyscale; else exactly as printed."""
    for cell in TABLES['mosaicml-2023-01'].cells:
        if cell.column == 'A100-hours' and cell.row != 'text':
            assert (cell.formula, cell.tolerance) == ('F3', 1e-4)
        assert cell.tolerance <= 0.02
    for cell in TABLES['mosaicml-two-phase'].cells:
        if cell.column == 'cost':
            assert cell.published == math.floor(cell.ours)
            assert cell.tolerance == 0
    limits = {'anyscale-table-2': 0.0025, 'anyscale-table-3': 0.0025, 'anyscale-table-4': 1e-4, 'salad-1000-jobs': 0, 'aws-600k': 0, 'anchors': 0}
    for name, limit in limits.items():
        assert all(cell.tolerance <= limit for cell in TABLES[name].cells if cell.published is not None and not cell.differs), name


@pytest.mark.parametrize(
    ('table', 'row', 'column', 'value'),
    [
        # By hand: 2,867,200,000 / 128.2 / 3600 x 8 and so on.
        ('mosaicml-2023-01', '8 A100', 'A100-hours', 2_867_200_000 / 128.2 / 3600 * 8),
        ('mosaicml-2023-01', '128 A100', 'gradient accumulation', 4),
        ('mosaicml-2023-01', '128 A100', 'scaling', 0.789),
        ('mosaicml-two-phase', '128 A100', 'days', (1_126_400_000 / 11_600 + 1_740_800_000 / 4_590) / 86_400),
        ('mosaicml-two-phase', '128 A100', 'cost with encoding', 41_443),
        ('mosaicml-two-phase', '128 A100', 'cost with encoders in the step', 47_425),
        ('mosaicml-two-phase', '64 A100', 'cost with encoding', 38_714),
        ('mosaicml-two-phase', 'part 2', 'days with encoders in the step', 7.72),
        ('anyscale-table-2', 'offline, Ray Data', 'cost', 76.9 * 4 * 40.96 + 2183),
        ('anyscale-table-2', 'online, Torch DataLoader', 'hours', 111.3),
        ('anyscale-table-2', 'table 1, Torch DataLoader', 'images/s at 512 px by the table', 817),
        ('anyscale-table-2', 'table 1, Torch DataLoader', 'images/s at 512 px by the text', 655),
        # Against the baseline of the other row: 76.8 / 0.69 = 111.3 h, 16,275 / 0.895 = $18,184, 14,753 / 0.811 = $18,191.
        ('anyscale-table-2', 'offline, Ray Data', 'time saved', 1 - 76.9 * 0.69 / 76.8),
        ('anyscale-table-2', 'offline, Ray Data', 'cost saved', 1 - 14_753 / 18_184),
        ('anyscale-table-2', 'online, Ray Data, 40 g5.2xlarge', 'cost saved', 1 - 16_275 / 18_191),
        ('anyscale-table-4', 'title', 'less than', 13_165 / 8 * 24.01),
        ('anyscale-table-3', '32 a100-80gb, 256 px', '+ FSDP, times the row above', 5014 / 4068),
        ('anyscale-table-4', '4 p4de.24xlarge', 'A100-hours', 13_165.3),
        ('anyscale-table-4', '16 A100-40GB', 'A100-hours', 11_331),
        ('salad-1000-jobs', 'all jobs', 'GPU-hours', 1_033.5),
        ('salad-1000-jobs', 'all jobs', 'hours on 40 nodes, at least', 25.84),
        ('salad-1000-jobs', 'all jobs', 'cost', 334.85),
        ('salad-1000-jobs', 'interruptions', 'nodes per job, at least', 1.108),
        ('aws-600k', '256 A100', 'days', 24.4),
        ('anchors', 'PRX speedrun, 32 H200', 'cost, about', 1_536),
        ('anchors', 'MLPerf Training v5.0, HPE, 8 H200, 512 px', 'H200-hours of phase 2', 3_232),
        ('anchors', 'EC2 Capacity Blocks, p5.48xlarge, 8 H100', '$ per GPU-hour', 4.916),
        ('aws-600k', 'reserved or savings plan', 'cost at 60 % less', 240_000),
    ],
)
def test_derived_values(table, row, column, value):
    assert of(table, row, column).ours == pytest.approx(value, rel=1e-3)


def test_the_baseline_of_the_ablation_is_what_its_ratios_imply():
    """Images per second over the printed ratio, by hand; at 512 px on 40 GB without 474 / 1.86 = 254.8, which the other two contradict."""
    implied = {
        '16 A100-40GB, 256 px': (1075.4, 1075.4, 1073.8),
        '16 A100-40GB, 512 px': (264.7, 263.9),
        '32 A100-80GB, 256 px': (1570.7, 1576.7, 1575.5),
        '32 A100-80GB, 512 px': (389.8, 389.3, 389.9),
    }
    panels = dict(TABLES['anyscale-table-3'].ablation)
    assert {name: bars[0].images_per_sec for name, bars in panels.items()} == {
        name: pytest.approx(sum(values) / len(values), abs=0.06) for name, values in implied.items()
    }
    assert all(bars[0].derived for bars in panels.values())


def test_nothing_derived_is_called_published():
    """Blank cells of the source stay blank, and what it prints is there: both savings in time and cost, as printed."""
    blank = [cell for _, cell in CELLS if cell.row in ('table 1, Torch DataLoader', 'online, Torch DataLoader')]
    assert len(blank) == 9
    assert {cell.verdict for cell in blank} == {'derived'}
    savings = {(cell.row.partition(',')[0], cell.column): cell.published for _, cell in CELLS if cell.column.endswith(' saved')}
    assert savings == {
        ('offline', 'time saved'): 0.309,
        ('online', 'time saved'): 0.31,
        ('offline', 'cost saved'): 0.189,
        ('online', 'cost saved'): 0.105,
    }


def test_contradictions_are_named():
    """What the sources say twice and differently."""
    found = {(name, cell.row, cell.column): cell.differs for name, cell in CELLS if cell.differs}
    assert found == {
        ('mosaicml-2023-01', '256 A100', 'A100-hours by its own days'): CONTRADICTION,
        ('mosaicml-two-phase', 'part 2', 'days with encoders in the step'): CONTRADICTION,
        ('mosaicml-two-phase', 'part 2', 'cost by its own days'): CONTRADICTION,
        ('mosaicml-two-phase', 'a user, 128 A100, 256 px', 'images/s with encoders in the step'): OTHER_SOURCES,
        ('mosaicml-two-phase', '128 A100', 'images/s at 256 px, fitted to 8 to 64'): OUTLIER,
        ('anyscale-table-2', 'summary', 'throughput gained'): CONTRADICTION,
        ('anyscale-table-2', 'figure 3', 'share of the encoders in a step'): CONTRADICTION,
        ('anyscale-table-3', '16 a100-40gb, 512 px', '+ EFA, times DDP over TCP'): CONTRADICTION,
        ('anyscale-table-4', 'text', 'times fewer A100-hours'): CONTRADICTION,
        ('salad-1000-jobs', 'minimum', 'cost per step, unrounded'): CONTRADICTION,
        ('salad-1000-jobs', 'title', 'cost per step'): CONTRADICTION,
        ('aws-600k', 'initial training', 'A100-hours'): OTHER_SOURCES,
    }


def test_what_the_text_says_of_the_outlier():
    """Without the row of 64 GPUs one law goes through the other four to within 2 %; without that of 128, to within 5 %."""
    points = [ScalingPoint(row.num_gpus, 2048, row.images_per_sec[256]) for row in MOSAICML_TWO_PHASE]
    for odd, within in ((64, 0.02), (128, 0.05)):
        law = fit(points, without=[point for point in points if point.num_gpus == odd])
        worst = max(abs(law.step_sec(point.num_gpus, 2048) / point.step_sec - 1) for point in law.points)
        assert within / 2 < worst < within
    assert points[3].images_per_sec / points[2].images_per_sec == pytest.approx(2.09, abs=0.005)
    assert pytest.approx(0.32, abs=0.005) == 1 - 11_600 / 128 / (8_530 / 64)


def test_rounding_is_that_of_the_source():
    assert Rounding('nearest', -3).apply(78_740) == 79_000
    assert Rounding('down', 4).apply(0.334854) == pytest.approx(0.3348)
    assert Rounding('up', -4).apply(39_511) == Rounding('up', -4).apply(40_000) == 40_000
    assert [Rounding(*of).text for of in (('nearest', 8), ('down', -3), ('nearest', 0))] == [
        'rounded to 0.00000001',
        'rounded down to 1,000',
        'rounded to 1',
    ]


@pytest.mark.parametrize(
    ('table', 'cell'), [pair for pair in CELLS if pair[1].published is not None], ids=lambda value: getattr(value, 'column', value)
)
def test_a_changed_cell_is_found(table, cell):
    """Printed twice the tolerance away from ours a number does not come out, and no exception holds for one that is ours."""
    ours = cell.rounded
    assert dataclasses.replace(cell, published=ours).holds == (not cell.differs)
    changed = dataclasses.replace(cell, published=ours * (1 + 2 * max(cell.tolerance, 1e-6)), differs='')
    assert not changed.holds
    assert changed.verdict == 'DOES NOT REPRODUCE'


def test_the_command_prints_every_cell_and_writes_pages(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, 'argv', ['report', '--published', 'all', '--out', str(tmp_path)])
    assert report.main() == 0
    printed = capsys.readouterr().out
    text, page = (tmp_path / 'report.md').read_text(), (tmp_path / 'report.html').read_text()
    for name in TABLES:
        assert f'## {name}: cells' in printed
    for part in ('2,589.4', '2,634.8', '11,600.0', '16,172.0', 'outlier: no smooth law explains it', '49,696', '$31,230.04'):
        assert part in printed
        assert part in text
        assert part in page
    assert_stands_alone(page)
    for figure in ('days-mosaicml-2023-01', 'efficiency-mosaicml-two-phase', 'ablation-anyscale-table-3', 'cost-mosaicml-two-phase'):
        assert (tmp_path / f'{figure}.png').read_bytes().startswith(b'\x89PNG')
        assert f'({figure}.png)' in text


@pytest.mark.parametrize(
    ('source', 'units', 'printed', 'digits'),
    [
        ('micro_diffusion', 504, 1_890, 0),
        ('PRX speedrun', 768, 1_500, -2),
        ('EC2 Capacity Blocks, p4d.24xlarge', 8, 14.75, 2),
        ('EC2 Capacity Blocks, p5.48xlarge', 8, 39.33, 2),
    ],
)
def test_listed_prices_are_those_of_their_sources(source, units, printed, digits):
    """Of so many GPU-hours at the listed price the source's own sum, as it is rounded there; and the price is the one of the table's cells."""
    (price,) = [price for price in load_prices().values() if price.source.startswith(source)]
    assert round(units * price.dollars, digits) == printed
    cells = [cell for cell in TABLES['anchors'].cells if cell.row.startswith(source) and (cell.column.startswith('cost') or '$' in cell.column)]
    assert [cell.ours if cell.published is None else cell.ours / units for cell in cells] == [pytest.approx(price.dollars, rel=1.5e-4)]


def test_the_command_fails_where_a_table_does_not_come_out(tmp_path, monkeypatch, capsys):
    table = TABLES['aws-600k']
    wrong = dataclasses.replace(table, cells=(*table.cells, Cell('made up', 'cost', 1.0, 2.0, 'F4')))
    monkeypatch.setattr('benchmarks.published.published_tables', lambda: TABLES | {'aws-600k': wrong})
    monkeypatch.setattr(sys, 'argv', ['report', '--published', 'aws-600k', '--out', str(tmp_path)])
    assert report.main() == 1
    assert 'aws-600k: made up, cost: DOES NOT REPRODUCE' in capsys.readouterr().err


def test_a_reservation_for_a_year_has_one_price_in_a_report(tmp_path, monkeypatch, capsys):
    """32 GPUs for 8,760 hours at the listed $3.0012, and no second number in a remark."""
    monkeypatch.setattr(sys, 'argv', ['report', '--published', 'anyscale-table-4', '--out', str(tmp_path)])
    assert report.main() == 0
    assert set(re.findall(r'\$841,\d{3}', capsys.readouterr().out)) == {f'${32 * 8760 * 3.0012:,.0f}'}


@pytest.mark.parametrize(
    ('name', 'said'), [('mosaicml-2023-1', "'; did you mean 'mosaicml-2023-01'? There are"), ('foo', "no table 'foo'. There are")]
)
def test_a_name_that_is_not_there(monkeypatch, capsys, name, said):
    monkeypatch.setattr(sys, 'argv', ['report', '--published', name])
    assert report.main() == 2
    assert said in capsys.readouterr().err


def test_every_formula_that_a_cell_names_is_explained(tmp_path, monkeypatch, capsys):
    named = {part for _, cell in CELLS for part in cell.formula.split(', ') if re.fullmatch(r'F\d+', part)}
    assert named <= set(FORMULAS)
    monkeypatch.setattr(sys, 'argv', ['report', '--published', 'salad-1000-jobs', '--out', str(tmp_path)])
    assert report.main() == 0
    legend = capsys.readouterr().out.partition('## Formulas')[2]
    assert re.findall(r'^\| (F\d+) +\| (.*?) +\|$', legend, re.MULTILINE) == [(name, FORMULAS[name]) for name in ('F3', 'F4', 'F7', 'F8')]
