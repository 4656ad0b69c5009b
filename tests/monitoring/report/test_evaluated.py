"""The report of a run lists the evaluations of its checkpoints."""

import pytest

from diffusion.monitoring.report.pages import write_report
from tests.evaluation.examples import write_evaluation
from tests.evaluation.test_page import NAMES, figure, is_affine, markers
from tests.monitoring.report.pages import assert_stands_alone
from tests.monitoring.report.test_report import main, write_run

BATCHES = (100, 200, 400)


@pytest.fixture
def run(tmp_path):
    folder = write_run(tmp_path / 'run')
    for number, batches in enumerate(BATCHES):
        write_evaluation(folder / f'evaluations/ba{batches}', batches=batches, shift=4.0 - number, guidance=(3.0, 7.5), names=NAMES)
    return folder


def test_checkpoints_are_drawn_over_their_batches(run):
    page = assert_stands_alone(write_report(run).read_text())
    assert ['ba200', '200', '3', '17.40 ± 0.12', '16.3'] in [row[:5] for row in page.rows]
    svg = figure((run / 'report.html').read_text(), 'FID over batch')
    for series, first in ((1, 18.4), (2, 16.3)):
        *points, _ = markers(svg, series)  # without the legend's
        across, down = zip(*sorted(points), strict=True)
        assert is_affine(across, BATCHES)
        assert is_affine(down, [first, first - 1, first - 2])


def test_another_protocol_has_its_own_table(run):
    write_evaluation(run / 'evaluations/quick', batches=400, samples=2048, names=NAMES)
    page = assert_stands_alone(write_report(run).read_text())
    assert '30,000 images of 512 px in 50 steps' in page.text
    assert '2,048 images of 512 px in 50 steps' in page.text
    assert len([row for row in page.rows if row[:2] == ['evaluation', 'batch']]) == 2
    assert len([1 for attributes in page.attributes('svg') if attributes['aria-label'] == 'FID over batch']) == 1  # a single checkpoint is no curve


def test_a_damaged_evaluation_is_named(run, monkeypatch, capsys):
    (run / 'evaluations/ba100/evaluation.json').write_text('{')
    assert main(monkeypatch, run) == 2
    assert 'evaluations/ba100/evaluation.json: Invalid JSON' in capsys.readouterr().err
