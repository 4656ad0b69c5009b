"""Images per second: from where, for which recipe, and what is said about it."""

import json

import pytest

from diffusion.cost.facts import Cluster, Facts, load_for_planning
from diffusion.cost.hardware import PEAK_FLOPS
from diffusion.cost.project import MEMORY_TOLERANCE, memory_checks
from diffusion.cost.scaling import ScalingPoint, fit
from diffusion.cost.throughput import MOSAICML_TWO_PHASE, RateError, rate_sources
from diffusion.families.counting.counts import Counter
from tests.conftest import REPOSITORY

PHASE_1, PHASE_2 = (f'{REPOSITORY}/yamls/sd2-base-{px}.yaml' for px in (256, 512))


def asked(path=PHASE_1, *overrides, gpu='a100-40gb', gpus=(8, 16)):
    """A recipe, and the clusters that it is planned for."""
    recipe = load_for_planning(path, overrides)
    return Facts(recipe, Counter.from_file().counts(recipe), 790e6), [Cluster(gpu, 40, num, 8) for num in gpus]


def sources(throughput, mfu, *recipes):
    facts, clusters = zip(*recipes, strict=True)
    return rate_sources(throughput, mfu, facts, clusters[0])


def origin(throughput=None, mfu=None, **of):
    return sources(throughput, mfu, asked(**of))[0]


def row(**changes):
    return {
        'benchmark': 'throughput', 'point': str(sorted(changes.items())), 'status': 'measured', 'num_gpus': 8, 'num_nodes': 1, 'gpus_per_node': 8,
        'device': 'NVIDIA A100-SXM4-40GB', 'network': 'sd2-base', 'resolution': 256, 'kind': 'synthetic', 'global_size': 2048, 'micro_size': 128,
        'precision': 'amp_bf16', 'sharding': 'ddp', 'compile': 'network', 'checkpoint_activations': False, 'ema': True, 'images_per_sec': 1500.0,
        'images_per_sec_spread': 0.01, 'peak_allocated_bytes': None, 'date': '2026-11-20T10:00:00+00:00', **changes,
    }  # fmt: skip


@pytest.fixture
def write(tmp_path):
    def written(*rows, torn=''):
        path = tmp_path / 'results.jsonl'
        path.write_text(''.join(json.dumps(row) + '\n' for row in rows) + torn)
        return str(path)

    return written


def test_mfu_by_hand():
    """0.35 x 312 TFLOP/s x 8 / 539.31 GFLOP."""
    rate = origin(mfu=0.35).rate(8)
    assert rate.images_per_sec == pytest.approx(0.35 * 312e12 * 8 / 539.3108992e9)
    assert rate.how == 'assumed'
    assert origin(mfu=0.35).rate(16).images_per_sec == 2 * rate.images_per_sec


def test_a_range_of_mfu_is_drawn_from():
    rate = origin(mfu=[0.2, 0.4]).rate(8)
    assert rate.images_per_sec == pytest.approx(origin(mfu=0.3).rate(8).images_per_sec)
    ends = [origin(mfu=share).rate(8).images_per_sec for share in (0.2, 0.4)]
    assert [rate.draws.min(), rate.draws.max()] == pytest.approx(ends, rel=1e-3)
    assert origin(mfu=0.3).rate(8).draws is None


def test_where_nothing_is_published_an_mfu_is_assumed_and_said():
    default = origin(gpu='h200')
    assert default.rate(1).images_per_sec == pytest.approx(0.30 * PEAK_FLOPS['h200'] / 539.3108992e9)
    assert 'nothing is published' in default.text
    twice = sources(None, None, asked(PHASE_1, 'train.checkpoint_activations=true', gpu='h200'))[0]
    assert twice.rate(1).images_per_sec == pytest.approx(0.75 * default.rate(1).images_per_sec)
    images = sources(None, None, asked(PHASE_1, 'data.kind=images', gpu='h200'))[0]
    assert images.rate(1).images_per_sec == pytest.approx(0.30 * PEAK_FLOPS['h200'] / (539.31e9 + 272.72e9), rel=1e-4)


def test_published_rows_are_taken_as_they_are_and_else_predicted():
    bars = sources(None, None, asked(), asked(PHASE_2))
    assert [bar.rate(128).images_per_sec for bar in bars] == [11600, 4590]
    assert {bar.rate(128).how for bar in bars} == {'published'}
    between = bars[1].rate(96)
    assert between.how == 'predicted'
    assert 2340 < between.images_per_sec < 4590
    assert 'leave-one-out' in between.note
    assert '128 GPUs (11,600 images/s) is an outlier' in bars[0].text
    points = [ScalingPoint(row.num_gpus, row.global_size, row.images_per_sec[256]) for row in MOSAICML_TWO_PHASE]
    both = [fit(points).predict(256, 2048).images_per_sec, fit(points, without=points[-1:]).predict(256, 2048).images_per_sec]
    assert bars[0].rate(256).images_per_sec == min(both) < max(both)
    assert f'the other says {max(both):,.1f}' in bars[0].rate(256).note


def test_what_runs_in_a_published_step_must_be_what_the_recipe_does():
    online = sources(None, None, asked(PHASE_2, 'data.kind=images'))[0]
    assert online.rate(128).images_per_sec == 1618.4
    assert 'VAE' in online.text
    assert online.rate(256).how == 'predicted'  # its authors extrapolated that row
    other_unet = sources(None, None, asked(PHASE_1, 'model.network=tiny', 'model.encoders.source=.', 'model.encoders.revision=null'))[0]
    assert other_unet.rate(8).how == 'assumed'
    with pytest.raises(RateError, match='nothing was published for sd2-base-256.*mosaicml-two-phase: a100-40gb at 256 and 512 px, latents'):
        origin('published', gpu='h200')
    with pytest.raises(RateError, match="did you mean 'mosaicml-two-phase'"):
        origin('published:mosaicml-two-phases')


def test_a_single_published_row_is_scaled_and_says_so():
    bar = origin(gpu='a100-80gb')
    assert bar.rate(32).images_per_sec == 5908 * 2048 / 4096 * 2  # the same time an image: its batch was 4096
    assert bar.rate(64).images_per_sec == pytest.approx(2 * 5908)
    assert (bar.rate(64).how, bar.rate(64).note) == ('scaled', 'linearly from 32 GPUs and a global batch of 4,096')


@pytest.mark.parametrize(
    ('text', 'on_8', 'how'),
    [('11600@128', 725, 'scaled'), ('256=1100@8,512=290@8', 1100, 'given'), ('512=290,256=1100@8', 1100, 'given'), ('1.1e3@8', 1100, 'given')],
)
def test_a_number(text, on_8, how):
    rate = origin(text).rate(8)
    assert (rate.images_per_sec, rate.how) == (on_8, how)


@pytest.mark.parametrize(
    ('text', 'message'),
    [
        ('1100', 'of how many GPUs'),
        ('1100@0', 'is not a rate'),
        ('1.1.1@8', 'is not a rate'),
        ('0@8', 'is not a rate'),
        ('256=1100@8,256=900@8', 'two rates at 256 px'),
        ('512=290@8', 'trains at 256 px; add 256=RATE@GPUS'),
        ('nowhere.jsonl', 'no such file'),
        ('publishes', 'no such file'),
    ],
)
def test_a_number_or_file_that_is_none(text, message):
    with pytest.raises(RateError, match=message):
        origin(text)


def test_a_number_is_of_the_gpus_that_are_planned_for_if_there_is_one():
    assert origin('1100', gpus=(8,)).rate(8).images_per_sec == 1100


def test_a_file_the_latest_row_of_a_point_counts(write):
    path = write(row(point='a', images_per_sec=1.0), row(point='a', images_per_sec=1400.0), row(num_gpus=16, images_per_sec=2700.0), torn='{"bench')
    measured = origin(path)
    assert [measured.rate(n).images_per_sec for n in (8, 16)] == [1400, 2700]
    assert measured.rate(8).how == 'measured'
    assert measured.rate(32).how == 'predicted'
    assert [warning.partition(': ')[2] for warning in measured.warnings] == ['lines that could not be read, as a kill leaves them: 1']
    assert 'NVIDIA A100-SXM4-40GB; 2026-11-20' in measured.text


def test_a_file_rows_like_the_recipe_come_first_and_what_differs_is_said(write):
    like, faster = row(), row(precision='bf16', sharding='hsdp', images_per_sec=1900.0)
    assert origin(write(faster, like)).rate(8).images_per_sec == 1500
    assert origin(write(row(ema=False, images_per_sec=1600.0), like)).rate(8).images_per_sec == 1500
    other = origin(write(faster))
    assert other.rate(8).images_per_sec == 1900
    assert any('measured with precision bf16, sd2-base-256 has amp_bf16' in warning for warning in other.warnings)
    assert any('sharding hsdp' in warning for warning in other.warnings)
    h200 = origin(write(row(device='NVIDIA H200', status='unsteady')))
    assert any('measured on NVIDIA H200, and the plan is for a100-40gb' in warning for warning in h200.warnings)
    assert any('not steady' in warning for warning in h200.warnings)
    larger = row(device='NVIDIA A100-SXM4-80GB', images_per_sec=1700.0)
    assert any('measured on NVIDIA A100-SXM4-80GB, and the plan is for a100-40gb' in warning for warning in origin(write(larger)).warnings)
    here = origin(write(larger, row(device='NVIDIA A100-SXM4-80GB', num_gpus=16, images_per_sec=3300.0), like))
    assert (here.rate(8).images_per_sec, here.warnings) == (1500, [])  # of two series the one of the plan's GPU


def test_a_file_rows_of_the_recipes_batch_are_taken_where_those_of_another_are_faster(write):
    """The law goes through both: constructed as T = B/n / 200 + 0.1 s, which it gives back."""

    def law(num_gpus, global_size):
        return global_size / (global_size / num_gpus / 200 + 0.1)

    places = [*((n, 2048) for n in (8, 16, 32)), *((n, 4096) for n in (16, 32, 64))]
    measured = origin(write(*(row(num_gpus=n, global_size=size, images_per_sec=law(n, size)) for n, size in places)))
    for num_gpus in (8, 16, 32):
        rate = measured.rate(num_gpus)
        assert (rate.how, rate.images_per_sec) == ('measured', law(num_gpus, 2048))
    assert measured.rate(64).how == 'predicted'  # with the recipe's 2,048; with 4,096 it was measured
    assert measured.rate(64).images_per_sec == pytest.approx(law(64, 2048))
    assert 'on 8, 16, 32, 64 GPUs with global batches of 2,048, 4,096; else' in measured.text
    assert measured.warnings[0].endswith('measured on 64 GPUs with a global batch of 4,096, sd2-base-256 has 2,048: predicted for it')
    other_settings = [row(num_gpus=n, global_size=4096, images_per_sec=2000.0 * n, device='NVIDIA A100-PCIE-40GB') for n in (8, 16, 32)]
    assert origin(write(*other_settings, row())).rate(8).how == 'measured'  # of two series the one with the recipe's batch


def test_a_file_without_a_matching_row_says_what_it_has(write):
    failed = row(status='out of memory', images_per_sec=None)
    with pytest.raises(RateError, match=r'no measured row for sd2-base-256.*it has network sd2-base, 256 px, synthetic, 8 GPUs: out of memory'):
        origin(write(failed))
    with pytest.raises(RateError, match='512 px, images, 8 GPUs: measured'):
        origin(write(row(resolution=512, kind='images')))
    with pytest.raises(RateError, match='has no rows of benchmarks.throughput'):
        origin(write({'benchmark': 'step'}))
    with pytest.raises(RateError, match='rows of ema; needed are rows of benchmarks.throughput'):
        origin(write({'benchmark': 'ema'}))


@pytest.mark.parametrize(
    ('odd', 'message'),
    [
        ({'images_per_sec': 'fast'}, '8 GPUs: measured, but without images/s'),
        ({'num_gpus': None}, 'unknown GPUs: measured, but without number of GPUs'),
        ({'num_gpus': 2.5}, '2.5 GPUs: measured, but without number of GPUs'),
        ({'global_size': [2048], 'images_per_sec': 0}, 'but without images/s, global batch'),
        ({'status': None}, '8 GPUs: no status'),
    ],
)
def test_a_file_rows_with_odd_values_are_told_and_left_out(write, odd, message):
    with pytest.raises(RateError, match=message):
        origin(write(row(**odd)))
    bare = {'benchmark': 'throughput', 'point': 'bare'}
    strange = row(point='strange', device=['?'], gpus_per_node='eight', date=7, micro_size={}, num_gpus=16, images_per_sec=9.0)
    assert origin(write(row(point='odd', **odd), bare, strange, row())).rate(8).images_per_sec == 1500
    assert origin(write(strange)).rate(16).images_per_sec == 9


def test_measured_peaks_stand_beside_the_estimate(write):
    facts, clusters = asked(PHASE_1, 'batch.micro_size=128', gpus=(8,))
    estimate = facts.memory(clusters[0]).total

    def checks(**changes):
        measured = rate_sources(write(row(**changes)), None, [facts], clusters)[0]
        return memory_checks(facts, measured, 40.0)

    near = checks(peak_allocated_bytes=round(estimate / 1.14))[0]
    assert near.quantity <= MEMORY_TOLERANCE
    assert not near.source
    far = checks(peak_allocated_bytes=round(estimate / 1.16))[0]
    assert far.quantity > MEMORY_TOLERANCE
    assert far.quantity == pytest.approx(0.16, abs=1e-6)
    assert 'believe the measurement' in far.source
    assert checks(peak_allocated_bytes=estimate, precision='bf16') == []  # other activations
    # For the row's own settings: half the micro-batch, no average, one GPU without DDP's buckets and with all of its batch in one pass.
    per_sample, count = facts.per_sample_bytes, 865_910_724
    for changes, less in (
        ({'micro_size': 64}, 64 * per_sample),
        ({'ema': False}, 4 * count),
        ({'num_gpus': 1, 'gpus_per_node': 1}, 4 * count),
    ):
        assert checks(peak_allocated_bytes=estimate, **changes)[1].quantity == estimate - less
    assert checks(peak_allocated_bytes=estimate, device='CPU') == []
