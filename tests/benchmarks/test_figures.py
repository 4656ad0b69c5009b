"""Figures of constructed rows: what is drawn, not its pixels."""

import math

import pytest

from benchmarks.reporting import figures, measured_report, more_gpus, ways_to_pay
from benchmarks.reporting.figures import counted, plain
from benchmarks.reporting.series import group
from diffusion.common.pages import LIGHT
from diffusion.cost.results import Result
from diffusion.cost.throughput import MOSAICML_TWO_PHASE
from tests.benchmarks.test_report import law, row, run, write


@pytest.fixture
def drawn(monkeypatch):
    """Figures as they are drawn."""
    kept = []
    for name in ('days_figure', 'efficiency_figure', 'cost_figure', 'bars_figure'):
        draw = getattr(figures, name)

        def recorded(*arguments, draw=draw):
            kept.append(draw(*arguments))
            return kept[-1]

        for module in (figures, measured_report, more_gpus, ways_to_pay):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, recorded)
    return kept


def test_the_figure_of_efficiency_says_of_what(drawn):
    for device, of in (
        ('NVIDIA H200', 'images/s per GPU, % of that on the fewest GPUs'),
        ('CPU', 'images/s per process, % of that on the fewest processes'),
    ):
        series = group([Result(row(n, 100.0 * n, device=device)) for n in (1, 2)])[0]
        figures.efficiency_figure([figures.Curve(series, [])])
        assert drawn[-1].axes[0].get_ylabel() == of


def test_the_figures_show_both_predictions_of_a_series_with_an_outlier(drawn, tmp_path, monkeypatch):
    """Two phases on 256 GPUs, 1,126,400,000 samples: 0.432 days without the outlier, 0.686 with it, as the table has them; and as % of 137.5 a GPU."""
    rows = [row(one.num_gpus, rate, px, device='NVIDIA A100-SXM4-40GB') for one in MOSAICML_TWO_PHASE for px, rate in one.images_per_sec.items()]
    assert run(monkeypatch, write(tmp_path / 'r.jsonl', rows), '--gpus', '256') == 0
    for figure, heights in zip(drawn[:2], ((0.432, 0.686, 2.23), (85.7, 54.0, 97.5)), strict=True):
        hollow = {line.get_ydata()[-1] for line in figure.axes[0].lines if line.get_markerfacecolor() == LIGHT['page'] and len(line.get_ydata())}
        assert sorted(hollow) == pytest.approx(sorted(heights), rel=2e-3)
        (dotted,) = [line for line in figure.axes[0].lines if line.get_linestyle() == ':']
        assert (dotted.get_xdata()[-1], dotted.get_ydata()[-1]) == (256, pytest.approx(heights[1], rel=2e-3))
        legend = [text.get_text() for text in figure.legends[0].get_texts()]
        assert 'hollow, dotted: predicted with outliers' in legend
        assert any(text.startswith('hollow: predicted without outliers') for text in legend)


def test_a_legend_is_whole(drawn):
    """Names so long that two columns, or one line of one, would run out of the figure."""
    long = {'device': 'NVIDIA H100 80GB HBM3', 'settings': {f'train.{key}': 'some value' for key in ('compile', 'attention', 'sharding')}}
    rows = [row(n, law(n, 1 / 800, 0.03) * (0.6 if n == 16 else 1.0), **long) for n in (8, 16, 24, 32, 64)]
    for series in (group([Result(one) for one in rows])[0], group([Result(one | {'settings': {}}) for one in rows])[0]):
        figures.days_figure([figures.Curve(series, [series.fit_without_outliers.predict(128, 2048)], [series.fit.predict(128, 2048)])] * 3)
        figure = drawn[-1]
        figure.draw_without_rendering()
        box = figure.legends[0].get_window_extent()
        assert box.x0 >= 0
        assert box.x1 <= figure.bbox.width
        assert len(figure.legends) == 1
        assert len(figure.legends[0].get_texts()) == 5


@pytest.mark.parametrize('endless', [True, False])
def test_an_interval_without_an_end_is_an_arrow(drawn, endless):
    """What one node gives is without a bound where all rows are of several, 8 GPUs each."""
    series = group([Result(row(n, rate)) for n, rate in ((16, 5200.0), (32, 13600.0), (64, 17000.0))])[0]
    ahead = series.fit.predict(8 if endless else 128, 2048)
    assert math.isinf(ahead.high) == endless
    figures.days_figure([figures.Curve(series, [ahead])])
    (axes,) = drawn[-1].axes
    assert [text.arrow_patch is not None for text in axes.texts] == [True] * endless
    (bars,) = axes.containers
    lowest, highest = sorted(y for _, y in bars.lines[2][0].get_segments()[0])
    assert highest == pytest.approx(series.work.days(ahead.low))
    assert lowest == pytest.approx(series.work.days(ahead.images_per_sec if endless else ahead.high))
    legend = [text.get_text() for text in drawn[-1].legends[0].get_texts()]
    assert any('arrow' in text for text in legend) == endless


def test_what_is_paid_for_predictions_is_hollow(drawn, tmp_path, monkeypatch):
    rows = [row(n, law(n, 1 / 800, 0.03)) for n in (8, 16, 32)]
    assert run(monkeypatch, write(tmp_path / 'r.jsonl', rows), '--gpus', '64,128') == 0
    (axes,) = drawn[2].axes
    filled = [line for line in axes.lines if line.get_markerfacecolor() != LIGHT['page']]
    hollow = [line for line in axes.lines if line.get_markerfacecolor() == LIGHT['page']]
    assert len(filled) == len(hollow) == 4  # offers
    for whole, part in zip(filled, hollow, strict=True):
        assert list(zip(*part.get_data(), strict=True)) == list(zip(*whole.get_data(), strict=True))[3:]
    assert 'hollow: predicted' in [text.get_text() for text in drawn[2].legends[0].get_texts()]
    assert run(monkeypatch, write(tmp_path / 'one.jsonl', [row(8, 6000.0), row(8, 1350.0, 512)])) == 0
    assert 'hollow: predicted' not in [text.get_text() for text in drawn[-1].legends[0].get_texts()]


def test_series_say_of_which_gpu_they_are(drawn, tmp_path, monkeypatch):
    assert run(monkeypatch, write(tmp_path / 'r.jsonl', [row(n, law(n, 1 / 800, 0.03)) for n in (8, 16, 32)])) == 0
    names = [text.get_text() for text in drawn[0].legends[0].get_texts()]
    assert 'sd2-base, 256 px, latents, global batch 2,048, NVIDIA H200: measured' in names
    assert 'mosaicml/diffusion, 256 px, U-Net only, A100-40GB: measured' in names


def test_the_figures_do_not_speak_of_outliers_where_there_are_none(drawn, tmp_path, monkeypatch):
    assert run(monkeypatch, write(tmp_path / 'r.jsonl', [row(n, law(n, 1 / 800, 0.03)) for n in (8, 16, 32)])) == 0
    assert len(drawn) >= 2
    for figure in drawn[:2]:
        assert not [line for line in figure.axes[0].lines if line.get_linestyle() == ':']
        assert not [text for text in figure.legends[0].get_texts() if 'outlier' in text.get_text()]


def test_numbers_as_a_reader_wants_them():
    assert [plain(value) for value in (0.5, 2.5, 17.5, 300, 12_345)] == ['0.5', '2.5', '17.5', '300', '12,345']
    assert [counted(1, 'GPUs'), counted(2, 'GPUs'), counted(1, 'processes')] == ['1 GPU', '2 GPUs', '1 process']
