"""What a GPU check makes of its rows: predictions, limits, the page, classes of kernels."""

import sys
from dataclasses import replace

import pytest

from benchmarks import gpu_check
from benchmarks.checking import page
from benchmarks.checking.cases import Setting
from benchmarks.checking.judging import PredictedValue, comparisons, load_predictions, problems
from benchmarks.checking.steps import CLASSES, class_of
from diffusion.recipe import RecipeError
from tests.benchmarks.small_parts import PREDICTIONS, part, predictions


def test_a_check_beyond_its_limit_is_wrong_and_so_is_nan(check):
    one = check('out_of_limits')
    one.run_slice(60)
    assert problems(one.rows, predictions()) == ['out_of_limits, check: too large is 3, the limit is 2', 'out_of_limits, check: not a number is nan, the limit is 2']  # fmt: skip


def row(part='good', name='first', gpu=None, tiny=False, **values):
    return {'part': part, 'row': name, 'status': 'measured', 'tiny': tiny, 'gpu': gpu, **values}


@pytest.mark.parametrize(
    ('value', 'low', 'high', 'off', 'disagrees'),
    [(100, 90, 110, 0, False), (80, 90, 110, 80 / 90 - 1, False), (76, 90, 110, 76 / 90 - 1, True), (130, 90, 110, 130 / 110 - 1, True),
     (500, 90, None, 0, False), (10, None, 5, 1.0, True), (1, 0, 0, float('inf'), True), (None, 90, 110, None, True)],
)  # fmt: skip
def test_a_value_may_be_15_percent_outside_its_prediction(value, low, high, off, disagrees):
    there = replace(predictions(), devices={'h200': [PredictedValue('good', 'first', 'speed', 'a source', low, high)]})
    (found,) = comparisons([row(gpu='NVIDIA H200', speed=value)], there)
    assert found.disagrees == disagrees
    if off is not None:
        assert found.off == pytest.approx(off)
    (own,) = comparisons([row(speed=value, predicted={'speed': [low, high]})], predictions())
    assert own.disagrees == disagrees


def test_predictions_are_of_one_device_at_full_size():
    there = load_predictions()
    speed = row('headline', '256 px', 'NVIDIA H200', images_per_sec=300.0)
    assert [one.row for one in comparisons([speed], there)] == ['256 px']
    assert not comparisons([{**speed, 'gpu': 'NVIDIA H200 MIG 3g.71gb'}, {**speed, 'gpu': None}, {**speed, 'tiny': True}], there)
    assert str(comparisons([speed], there)[0]).startswith('headline, 256 px: images_per_sec is 300, predicted 656 (-54%; ')


def test_every_prediction_is_of_a_row_that_there_is():
    names = {'ceilings': {'matmul', 'copy'}, 'headline': {f'{px} px' for px in Setting(False, '', '').micro_batch}, 'optimizer': {'clipping + AdamW', 'EMA'},
             'demo': {'drawn shapes'}}  # fmt: skip
    for device in load_predictions().devices.values():
        for one in device:
            assert one.row in names[one.part]


def test_predictions_with_a_mistake_are_refused(tmp_path, capsys, monkeypatch):
    path = tmp_path / 'mine.yaml'
    path.write_text('tolerence: 0.1\nroofline: {source: x, resolution: 1, micro_batch: 1, classes: {}}\n')
    with pytest.raises(RecipeError, match='tolerance'):
        load_predictions(path)
    monkeypatch.setattr(sys, 'argv', ['gpu_check', '--predictions', str(path)])
    assert gpu_check.main() == 2
    assert 'tolerance' in capsys.readouterr().err


def test_the_page_has_every_row_and_the_verdict(check, tmp_path):
    one = check('good', 'failing', 'skipped', 'endless')
    one.parts = one.parts[:3]
    one.run_slice(60)
    one.parts = [*one.parts, part('endless', 'endless')]
    page.write(tmp_path / 'page.html', one, predictions())
    html = (tmp_path / 'page.html').read_text()
    for text in ('GPU check: a CPU', 'abc1234', '1 problem', 'this is wrong', 'needs the moon', 'Still to be measured: endless', 'failing: raises'):
        assert text in html, text
    assert 'http' not in html.replace('http://www.w3.org', '')  # it stands alone


@pytest.mark.parametrize(
    ('part', 'name', 'values', 'said'),
    [('headline', '256 px', {'images_per_sec': 900.0, 'ms': 1.0}, 'target 825, met'), ('headline', '256 px', {'images_per_sec': 700.0, 'ms': 1.0}, 'target 825, missed'),
     ('optimizer', 'EMA', {'ms': 4.1, 'gb_per_sec': 1.0}, 'target 2.4, missed'), ('optimizer', 'EMA', {'ms': 2.3, 'gb_per_sec': 1.0}, 'target 2.4, met')],
)  # fmt: skip
def test_a_target_is_met_by_more_images_or_fewer_milliseconds(part, name, values, said):
    (table,) = page.numbers_of({(part, name): row(part, name, 'NVIDIA H200', **values)}, part, [], load_predictions())
    assert table.rows[0][-1] == said


def test_ceilings_that_are_measured_bound_the_classes_of_kernels():
    there = load_predictions()
    rows = {('ceilings', 'matmul'): row('ceilings', 'matmul', tflop_per_sec=788.0), ('ceilings', 'copy'): row('ceilings', 'copy', gb_per_sec=4300.0)}
    bounds = page.roof_ms(rows, there)
    assert bounds['convolution'] == pytest.approx(51.0, abs=0.1)  # 17.0 + 34.0
    assert bounds['pointwise (Triton)'] == pytest.approx(16.0, abs=0.1)
    assert set(bounds) <= set(CLASSES)


@pytest.mark.parametrize(
    ('kernel', 'name'),
    [('sm90_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc', 'convolution'), ('nvjet_tst_256x128_64x4', 'matrix product'),
     ('void cudnn::ops::nchwToNhwcKernel', 'layout change'), ('pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel', 'attention'),
     ('multi_tensor_apply_kernel<FusedAdamMathFunctor>', 'optimizer, clipping, average'), ('triton_red_fused_native_group_norm_3', 'reductions (Triton)'),
     ('triton_poi_fused_silu_12', 'pointwise (Triton)'), ('something else', 'other')],
)  # fmt: skip
def test_kernels_have_a_class(kernel, name):
    assert class_of(kernel) == name


@pytest.mark.parametrize(
    ('line', 'said'),
    [
        ('{row: copy, key: ms, source: mine}', 'part missing'),
        ('{part: ceilings, row: copy, source: mine}', 'key missing'),
        ('{part: ceilngs, row: copy, key: ms, source: mine}', 'there is no part ceilngs; there are ceilings, correctness'),
        ('{part: ceilings, row: copy, key: ms, low: 7000, high: 8, source: mine}', 'low is 7,000, above high, 8'),
    ],
)
def test_a_prediction_that_means_nothing_is_refused(tmp_path, line, said):
    (tmp_path / 'wrong.yaml').write_text(PREDICTIONS.replace(PREDICTIONS.splitlines()[3], f'  cpu: [{line}]'))
    with pytest.raises(RecipeError, match=said):
        load_predictions(tmp_path / 'wrong.yaml')


def test_predictions_without_a_row_or_a_number_are_problems(check, tmp_path):
    one = check('good')
    one.run_slice(60)
    lines = [PredictedValue('good', 'third', 'gb_per_sec', 'mine', 1.0), PredictedValue('good', 'first', 'cpu', 'mine', 1.0)]
    assert problems(one.rows, replace(predictions(), devices={'cpu': lines})) == [
        'good, third: predicted, and there is no such row',
        'good, first: has no number cpu, predicted at least 1 (mine)',
    ]
