"""Figures of constructed rows: what is drawn, not its pixels."""

import math

import pytest

from benchmarks.reporting import scaling_section
from benchmarks.reporting.figures import Curve, counted, days_figure, plain
from benchmarks.reporting.series import group
from diffusion.common.pages import LIGHT
from diffusion.cost.results import Result
from diffusion.cost.throughput import MOSAICML_TWO_PHASE
from tests.benchmarks.test_report import law, row, run, write


@pytest.fixture
def drawn(monkeypatch):
    """Figures of days as they are drawn."""
    kept = []
    monkeypatch.setattr(scaling_section, 'days_figure', lambda curves: kept.append(days_figure(curves)) or kept[-1])
    return kept


def entries(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_the_figure_shows_both_predictions_of_a_series_with_an_outlier(drawn, tmp_path, monkeypatch):
    """Two phases on 256 GPUs, 1,126,400,000 samples: 0.432 days without the outlier, 0.686 with it, as the table has them."""
    rows = [row(one.num_gpus, rate, px, device='NVIDIA A100-SXM4-40GB') for one in MOSAICML_TWO_PHASE for px, rate in one.images_per_sec.items()]
    assert run(monkeypatch, write(tmp_path / 'r.jsonl', rows), '--gpus', '256') == 0
    (axes,) = drawn[0].axes
    hollow = {line.get_ydata()[-1] for line in axes.lines if line.get_markerfacecolor() == LIGHT['page'] and len(line.get_ydata())}
    assert sorted(hollow) == pytest.approx([0.432, 0.686, 2.23], rel=2e-3)
    (dotted,) = [line for line in axes.lines if line.get_linestyle() == ':']
    assert (dotted.get_xdata()[-1], dotted.get_ydata()[-1]) == (256, pytest.approx(0.686, rel=2e-3))
    assert 'hollow, dotted: predicted with outliers' in entries(drawn[0])
    assert any(text.startswith('hollow: predicted without outliers') for text in entries(drawn[0]))


def test_series_say_of_which_gpu_they_are_and_nothing_of_outliers_where_there_are_none(drawn, tmp_path, monkeypatch):
    assert run(monkeypatch, write(tmp_path / 'r.jsonl', [row(n, law(n, 1 / 800, 0.03)) for n in (8, 16, 32)])) == 0
    assert 'sd2-base, 256 px, latents, global batch 2,048, NVIDIA H200: measured' in entries(drawn[0])
    assert not [line for line in drawn[0].axes[0].lines if line.get_linestyle() == ':']
    assert not [text for text in entries(drawn[0]) if 'outlier' in text]


def test_a_legend_is_whole():
    """Names so long that a line would run out of the figure."""
    long = {'device': 'NVIDIA H100 80GB HBM3', 'settings': {f'train.{key}': 'some value' for key in ('compile', 'attention', 'sharding')}}
    rows = [row(n, law(n, 1 / 800, 0.03) * (0.6 if n == 16 else 1.0), **long) for n in (8, 16, 24, 32, 64)]
    series = group(map(Result, rows))[0]
    figure = days_figure([Curve(series, [series.fit_without_outliers.predict(128, 2048)], [series.fit.predict(128, 2048)])] * 3)
    figure.draw_without_rendering()
    box = figure.legends[0].get_window_extent()
    assert box.x0 >= 0
    assert box.x1 <= figure.bbox.width
    assert len(entries(figure)) == 5


@pytest.mark.parametrize('endless', [True, False])
def test_an_interval_without_an_end_is_an_arrow(endless):
    """What one node gives is without a bound where all rows are of several, 8 GPUs each."""
    series = group([Result(row(n, rate)) for n, rate in ((16, 5200.0), (32, 13600.0), (64, 17000.0))])[0]
    ahead = series.fit.predict(8 if endless else 128, 2048)
    assert math.isinf(ahead.high) == endless
    figure = days_figure([Curve(series, [ahead])])
    (axes,) = figure.axes
    assert [text.arrow_patch is not None for text in axes.texts] == [True] * endless
    (bars,) = axes.containers
    lowest, highest = sorted(y for _, y in bars.lines[2][0].get_segments()[0])
    assert highest == pytest.approx(series.days(ahead.low))
    assert lowest == pytest.approx(series.days(ahead.images_per_sec if endless else ahead.high))
    assert any('arrow' in text for text in entries(figure)) == endless


def test_numbers_as_a_reader_wants_them():
    assert [plain(value) for value in (0.5, 2.5, 17.5, 300, 12_345)] == ['0.5', '2.5', '17.5', '300', '12,345']
    assert [counted(1, 'GPUs'), counted(2, 'GPUs'), counted(1, 'processes')] == ['1 GPU', '2 GPUs', '1 process']
