"""docs/cost.md explains every line and every assumption and shows the bill that the code makes; docs/plan.md explains the report."""

import re

from benchmarks.report import ThroughputReportRequest
from diffusion.common.text import markdown_table
from diffusion.cost.assumptions import Assumptions, draw_all, load_assumptions
from diffusion.cost.bill import TrainingJob, TrainingPhase, make_bill
from diffusion.cost.formulas import SD2_BASE, spread_text, two_digits
from diffusion.cost.prices import load_prices
from diffusion.cost.text import bill_table, dollars_text
from diffusion.cost.throughput import MOSAICML_TWO_PHASE
from diffusion.recipe.keys import known_paths
from tests.conftest import REPOSITORY, run_python
from tests.cost.test_encoding import EPOCH, IN_STEP, OFFLINE, ONLINE, ways

PAGE = (REPOSITORY / 'docs/cost.md').read_text()
PLAN = (REPOSITORY / 'docs/plan.md').read_text()


def shown_bill():
    row, prices = MOSAICML_TWO_PHASE[-1], load_prices()
    made = [
        TrainingPhase(f'sd2-base-{part.resolution}', part, row.images_per_sec[part.resolution], row.source, size, 13.9e9, 3, 1800, 50_000)
        for part, size in zip(SD2_BASE, (16_500, 65_700), strict=True)
    ]
    return make_bill(TrainingJob(tuple(made), row.num_gpus), draw_all(load_assumptions()), prices, prices['gpu_hour.a100-40gb.flat'])


def test_the_bill_on_the_page_is_the_one_that_the_code_makes():
    shown = PAGE.partition('makes it -->\n')[2].partition('\n<!-- end')[0]
    assert shown == bill_table(shown_bill())


def shown_ways():
    """The setup of the Anyscale post, over two epochs; what is assumed has two digits."""
    found = ways(4068, num_images=EPOCH // 2, assume=['online.headroom=0', 'storage.latent_months=1'])
    rows = []
    for way in (IN_STEP, ONLINE, OFFLINE):
        (steps,) = (row for row in found.rows if row.group == way and row.what == 'steps')

        def digits(number, sign='', is_assumed=steps.kind == 'assumed'):
            return sign + two_digits(number) if is_assumed else dollars_text(number) if sign else spread_text(number)

        hours = found.of(way, 'encoders', 'quantity')
        machines = {IN_STEP: 'none', ONLINE: f'{hours / found.hours(way):.0f} a10g', OFFLINE: 'a10g'}[way]
        encoding, storage = (dollars_text(found.of(way, what)) for what in ('encoders', 'storage'))
        rows.append([
            'sd2-base-256', way, machines, digits(found.rate(way)), digits(found.hours(way)), spread_text(hours) if hours else '', encoding, storage,
            digits(found.of(way, 'steps'), '$'), digits(found.of(way), '$'),
        ])  # fmt: skip
    head = ('phase', 'encoding:', 'encoders:', 'images/s', 'hours', 'of encoders', 'encoding', 'storage', 'steps', 'total')
    return markdown_table(head, rows)


def test_the_ways_to_encode_on_the_page_are_those_of_the_code():
    shown = PAGE.partition('makes this too -->\n')[2].partition('\n<!-- end')[0]
    assert shown == shown_ways()


def test_every_line_is_explained():
    explained = ' '.join(PAGE.partition('## The bill')[2].partition('Here is the bill')[0].split())
    for line in shown_bill().rows:
        name = re.sub(r', sd2-base-\d+$', ', RECIPE', re.sub(r'\d+ px', 'N px', line.what))
        assert f'**{name}**: ' in explained, name


def test_every_assumption_is_mentioned():
    keys = {path[-1] for path in known_paths(Assumptions) if len(path) > 1} - {'NAME', 'price', 'gpu', 'machine'}
    assert not [key for key in keys if not re.search(rf'\b{key}\b', PAGE)]


def test_every_option_of_a_report_is_mentioned():
    part = PLAN.partition('## The report')[2]
    options = ThroughputReportRequest.model_fields.keys() - {'results', 'prices'}
    assert not [option for option in options if f'--{option}' not in part]


def test_a_bill_needs_no_torch():
    run_python('-c', "import sys, diffusion.cost.text; assert 'torch' not in sys.modules and 'scipy' not in sys.modules")


def test_the_pages_fit_120_columns():
    assert max(map(len, (PAGE + PLAN).splitlines())) <= 120
