"""MLPerf's Stable Diffusion benchmark: the recipe against the reference's settings, the verdict against the rules, the logs against MLCommons' checkers."""

import json
import math

import numpy as np
import pytest
import torch

from benchmarks.mlperf.convergence import REFERENCE, point_of, pruned, reference_for
from benchmarks.mlperf.log import Submission, log_lines
from benchmarks.mlperf.runs import RECIPE, differences, interval_of, read_run, read_times
from benchmarks.mlperf.verdict import verdict_on
from diffusion.contracts.errors import InputError
from diffusion.evaluation.job.models import DrawingModel
from diffusion.evaluation.job.request import PRESETS
from diffusion.objectives.diffusion import scheduler_config
from diffusion.recipe import load_recipe, to_dict
from tests.benchmarks.mlperf_runs import BEGAN, FAILS, PASSES, STEP_SEC, line, saves, write_dataset, write_evaluation, write_run
from tests.conftest import run_here

# configs/train_32x08x02.yaml, ldm/models/diffusion/ddpm.py and main.py of mlcommons/training aa344c7, retired_benchmarks/stable_diffusion.
REFERENCE_SETTINGS = {
    'model.network': 'sd2-base',  # model_channels 320, channel_mult [1, 2, 4, 4], num_head_channels 64, context_dim 1024
    'model.timesteps': 'uniform',
    'model.diffusion.prediction': 'v_prediction',
    'model.diffusion.schedule.kind': 'scaled_linear',  # make_beta_schedule("linear") is linear in sqrt(beta)
    'model.diffusion.schedule.beta_start': 0.00085,
    'model.diffusion.schedule.beta_end': 0.012,
    'model.diffusion.schedule.num_timesteps': 1000,
    'model.diffusion.schedule.zero_terminal_snr': False,
    'model.diffusion.min_snr_gamma': None,  # l_simple_weight 1, original_elbo_weight 0
    'model.diffusion.offset_noise': 0.0,
    'model.flow': None,
    'adapter': None,
    'load_path': None,  # load_unet: False
    'data.kind': 'latents',  # first_stage_type: moments
    'data.resolution': 512,  # image_size 64, times 8
    'data.flip': False,
    'data.caption_dropout': 0.0,  # ucg_training: None
    'optimizer.betas': [0.9, 0.999],
    'optimizer.eps': 1e-8,
    'optimizer.weight_decay': 0.01,  # torch.optim.AdamW's default
    'optimizer.muon': None,
    'optimizer.clip_norm': None,  # Trainer without gradient_clip_val
    'optimizer.decay': 'constant',  # f_min = f_max = 1
    'ema.half_life': None,  # use_ema: False
    'ema.sigma_rel': [],
}


@pytest.fixture
def data(tmp_path):
    return write_dataset(tmp_path / 'data')


@pytest.fixture
def benchmark():
    return load_recipe(RECIPE, ['data.streams.train.local=.'])


@pytest.mark.parametrize('key', REFERENCE_SETTINGS)
def test_the_recipe_is_the_references(benchmark, key):
    value = to_dict(benchmark)
    for name in key.split('.'):
        value = value[name]
    assert (list(value) if isinstance(value, tuple) else value) == REFERENCE_SETTINGS[key]


def test_the_free_settings_are_those_of_a_reference_point(benchmark):
    """rcps_stable_diffusion.json names the rate of one sample, which the reference's main.py multiplies by the batch."""
    assert benchmark.batch.global_size in REFERENCE
    assert benchmark.optimizer.lr == pytest.approx(2.3e-7 * 512)
    assert benchmark.optimizer.warmup.batches == 1000
    assert benchmark.checkpoint.every.batches * benchmark.batch.global_size == 512_000
    assert differences(benchmark) == []


@pytest.mark.parametrize(('batch', 'batches'), [(512, 1000), (2048, 250), (1, 512_000), (384, 1334), (513, 999)])
def test_checkpoints_are_rounded_up_to_whole_batches(batch, batches):
    assert interval_of(batch) == batches == math.ceil(512_000 / batch)
    assert min(REFERENCE[384]) == 3 * 384 * 1334  # the reference points of 384 are multiples of that


@pytest.mark.parametrize(
    ('change', 'said'),
    [
        ('optimizer.betas=[0.9,0.98]', 'optimizer.betas: (0.9, 0.98) -> (0.9, 0.999)'),
        ('optimizer.weight_decay=0', 'optimizer.weight_decay: 0.0 -> 0.01'),
        ('optimizer.clip_norm=1', 'optimizer.clip_norm: 1.0 -> None'),
        ('data.caption_dropout=0.1', 'data.caption_dropout: 0.1 -> 0.0'),
        ('model.diffusion.min_snr_gamma=5', 'model.diffusion.min_snr_gamma: 5.0 -> None'),
        ('model.timesteps=sobol', 'model.timesteps: sobol -> uniform'),
        ('ema.half_life=100ba', 'ema.half_life: 100ba -> None'),
        ('checkpoint.every=500ba', 'checkpoint.every: 500ba -> 1000ba: CEIL(512000 / 512) batches'),
        ('batch.global_size=1024', 'checkpoint.every: 1000ba -> 500ba'),
        ('load_path=runs/other', 'load_path: runs/other -> None'),
        ('data.streams.more={local: "/x"}', 'data.streams: 2 streams; the benchmark trains on one'),
        ('data.streams.train.loss_weight=2', 'data.streams: 1 streams'),
    ],
)
def test_what_the_benchmark_does_not_allow_is_named_with_its_value(change, said):
    (found,) = differences(load_recipe(RECIPE, ['data.streams.train.local=/data', change]))
    assert said in found


@pytest.mark.parametrize(
    'changes',
    [
        ['optimizer.lr=1e-4', 'optimizer.warmup=500ba', 'seed=99', 'train.precision=fp32', 'train.compile=null', 'batch.micro_size=8'],
        ['batch.global_size=2048', 'checkpoint.every=250ba', 'data.canonical_nodes=8', 'train.sharding=zero2', 'train.compile=blocks'],
        [
            'data.streams.train=null',
            'data.streams.laion={local: "/moments"}',
            'train.duration=8000ba',
            'name=other',
            'eval.every=1000ba',
            'eval.streams.coco.local=/coco',
        ],
    ],
)
def test_what_the_rules_leave_free_is_free(changes):
    assert differences(load_recipe(RECIPE, ['data.streams.train.local=/data', *changes])) == []


def test_the_sampler_takes_the_references_steps(benchmark, tmp_path):
    """DDIM of ldm/models/diffusion/ddim.py, written out, on a made-up network that predicts v."""
    (tmp_path / 'model_index.json').write_text('{"_class_name": "StableDiffusionPipeline", "scheduler": ["diffusers", "DDIMScheduler"]}')
    settings = scheduler_config(benchmark.model.diffusion.schedule, 'v_prediction') | {'_class_name': 'DDIMScheduler'}
    (tmp_path / 'scheduler').mkdir()
    (tmp_path / 'scheduler/scheduler_config.json').write_text(json.dumps(settings))
    scheduler = DrawingModel('', tmp_path).scheduler(PRESETS['mlperf'].sampler)
    scheduler.set_timesteps(50)
    steps = (np.arange(0, 1000, 20) + 1)[::-1]
    assert scheduler.timesteps.tolist() == steps.tolist()

    alphas = np.cumprod(1 - np.linspace(0.00085**0.5, 0.012**0.5, 1000) ** 2)
    before = [*alphas[steps[1:]], alphas[0]]
    theirs = 1.7
    ours = torch.tensor([[[[theirs]]]], dtype=torch.float64)
    for step, alpha_before in zip(steps, before, strict=True):
        v, alpha = math.sin(theirs + step), alphas[step]
        clean, noise = alpha**0.5 * theirs - (1 - alpha) ** 0.5 * v, alpha**0.5 * v + (1 - alpha) ** 0.5 * theirs
        ours = scheduler.step(torch.full_like(ours, v), int(step), ours).prev_sample
        theirs = alpha_before**0.5 * clean + (1 - alpha_before) ** 0.5 * noise
    assert ours.item() == pytest.approx(theirs, rel=1e-4)


# Reading the record.


def test_the_clock_runs_from_the_first_process_through_restarts():
    first = list(saves(1000, 2))
    second = [line('start', 2000, BEGAN + 50_000, 2000, 'b'), line('save', 3000, BEGAN + 60_000, 3000, 'b')]
    del second[0]['batch'], second[0]['saved']
    times = read_times([*first, *second], 'run')
    assert times.began == BEGAN  # not its first line: imports are on the clock
    assert times.saved == {1000: BEGAN + 120 + 1000 * STEP_SEC, 2000: BEGAN + 120 + 2000 * STEP_SEC, 3000: BEGAN + 60_000}
    assert (times.starts, times.ended) == (2, BEGAN + 60_000)


def test_a_checkpoint_whose_line_a_kill_swallowed_counts_from_the_restart():
    events = [*saves(1000, 1), line('begin', 2000, BEGAN + 9000, 2000, 'b'), line('steps', 2500, BEGAN + 9900, 2000, 'b')]
    assert read_times(events, 'run').saved[2000] == BEGAN + 9000


def test_a_checkpoint_made_again_after_going_back_counts_when_it_was_made_again():
    events = [*saves(1000, 2), line('begin', 1000, BEGAN + 7000, 1000, 'b'), line('save', 2000, BEGAN + 9000, 2000, 'b')]
    saved = read_times(events, 'run').saved
    assert saved == {1000: BEGAN + 120 + 1000 * STEP_SEC, 2000: BEGAN + 9000}


def test_the_run_ends_at_its_first_passing_checkpoint(data, tmp_path):
    run = read_run(write_run(tmp_path / 'run', data, scores=(None, FAILS, PASSES, None, FAILS)))
    assert (run.passed, run.samples_to_target) == (3000, 1_536_000)
    assert run.minutes_to_target == pytest.approx((120 + 3000 * STEP_SEC) / 60)


@pytest.mark.parametrize(('fid', 'cosine', 'passes'), [(90.0, 0.15, True), (90.01, 0.3, False), (50.0, 0.1499, False)])
def test_both_targets_have_to_be_reached_in_one_checkpoint(data, tmp_path, fid, cosine, passes):
    run = read_run(write_run(tmp_path / 'run', data, scores=(FAILS, (fid, cosine))))
    assert (run.passed is not None) is passes


@pytest.mark.parametrize(
    ('scores', 'said'),
    [
        ((FAILS, None, PASSES), 'batch 2,000, the checkpoint before the one that passes, is not scored: python -m diffusion.evaluate'),
        ((FAILS, FAILS, None), 'no checkpoint is known to pass, and the last one is not scored'),
    ],
)
def test_scores_that_the_rules_need_are_asked_for(data, tmp_path, scores, said):
    with pytest.raises(InputError, match=said):
        read_run(write_run(tmp_path / 'run', data, scores=scores))


def test_a_checkpoint_that_is_missing_is_named(data, tmp_path):
    events = [one for one in saves(1000, 3) if one.get('batch') != 1000]
    with pytest.raises(InputError, match='batch 1,000 has no checkpoint; the rules ask for each 1,000th'):
        read_run(write_run(tmp_path / 'run', data, scores=(None, FAILS, PASSES), events=events))


@pytest.mark.parametrize(
    ('evaluation', 'said'),
    [
        ({'batches': 2000, 'name': 'again'}, 'is the second evaluation of batch 2,000'),
        ({'batches': 3000, 'digest': 'other'}, 'has another protocol than'),
    ],
)
def test_scores_that_contradict_one_another_are_refused(data, tmp_path, evaluation, said):
    folder = write_run(tmp_path / 'run', data, scores=(FAILS, PASSES))
    write_evaluation(folder, fid=1.0, cosine=0.1, **evaluation)
    with pytest.raises(InputError, match=said):
        read_run(folder)


@pytest.mark.parametrize('evaluation', [{'batches': 1000, 'preset': 'quick'}, {'batches': 1500}])
def test_scores_by_another_protocol_or_of_other_checkpoints_do_not_count(data, tmp_path, evaluation):
    folder = write_run(tmp_path / 'run', data, scores=(FAILS, FAILS, PASSES))
    write_evaluation(folder, fid=1.0, cosine=0.9, name='other', **evaluation)
    assert read_run(folder).passed == 3000


def test_a_run_of_another_recipe_is_refused_unless_it_is_a_rehearsal(data, tmp_path):
    folder = write_run(tmp_path / 'run', data, changes=['optimizer.eps=1e-6'])
    with pytest.raises(InputError, match='differs from the benchmark.*\n  - optimizer.eps: 1e-06 -> 1e-08'):
        read_run(folder)
    assert read_run(folder, rehearsal=True).passed == 4000


# Reference convergence points: the examples of the rules' appendix, for a benchmark of 5 runs.

EXAMPLE = {128: {14: 1, 15: 2, 16: 6, 17: 1}, 256: {20: 4, 21: 4, 22: 2}}


@pytest.mark.parametrize(('batch', 'mean', 'least'), [(128, 15.75, 15.21), (256, 20.75, 19.93), (192, 18.25, 18.25 / 1.0368), (64, 15.75, 15.21)])
def test_the_least_samples_are_those_of_the_rules_examples(batch, mean, least):
    point = reference_for(batch, EXAMPLE, runs=5)
    assert point.mean == pytest.approx(mean)
    assert point.least == pytest.approx(least, abs=0.006)


def test_there_is_no_point_above_the_largest_batch_of_the_reference():
    assert reference_for(512, EXAMPLE, runs=5) is None
    assert reference_for(4096) is None


def test_points_of_slow_convergence_are_pruned():
    """The rules' example: 10 epochs at 128, 20 at 256 and at 512 leave 128 and 512."""
    points = [point_of(batch, {epochs: 10}) for batch, epochs in ((128, 10), (256, 20), (512, 20))]
    assert [point.batch for point in pruned(points)] == [128, 512]


@pytest.mark.parametrize('batch', [128, 256, 384, 512, 1024, 1500, 2048])
def test_the_points_are_those_of_mlcommons_checker(batch):
    """Which takes the deviation of all reference runs, not without highest and lowest as the rules' examples: it allows a little more."""
    rcp_checker = pytest.importorskip('mlperf_logging.rcp_checker.rcp_checker', reason='mlperf-logging is installed with [dev]')
    checker = rcp_checker.RCP_Checker('training', '5.0.0', 'stable_diffusion', verbose=False)
    ours, theirs = reference_for(batch), checker._find_rcp(max(batch, 256), 'pruned_rcps')
    if theirs is None:
        around = checker._find_top_min_rcp(batch, 'pruned_rcps'), checker._find_bottom_max_rcp(batch, 'pruned_rcps')
        _, theirs = checker._create_interp_rcp(batch, *around)
    assert ours.mean == pytest.approx(theirs['RCP Mean'])
    assert theirs['Min Epochs'] <= ours.least < ours.mean
    assert ours.least == pytest.approx(theirs['Min Epochs'], rel=0.01)


# The verdict.


def ten(data, tmp_path, batches_to_target, **more):
    """Runs at the default batch of 512, by the checkpoint at which each passes; None: none does."""
    folders = []
    for seed, number in enumerate(batches_to_target):
        scores = [FAILS] * 6 if number is None else [FAILS] * (number - 1) + [PASSES]
        folders.append(write_run(tmp_path / f'runs/{seed}', data, seed, scores, **more))
    return folders


@pytest.mark.parametrize(
    ('passing', 'said'),
    [
        ([4] * 10, 'Accepted: it converges no sooner than the reference'),
        ([4, 4, 4, 4, 4, 4, 4, 4, 4, None], 'Accepted: it converges no sooner'),
        ([3, 4, 4, 4, 4, 4, 4, 4, 4, 3], 'Accepted: sooner than the reference, but not significantly'),
        ([3] * 10, 'Rejected: it converges sooner than the reference may'),
        ([4, 4, 4, 4, 4, 4, 4, 4, None, None], 'No result: 2 of 10 runs did not reach the target'),
        ([4] * 9, '9 runs, 9 of them at the target; a result is of 10'),
    ],
)
def test_the_verdict_on_ten_runs(data, tmp_path, passing, said):
    folders = ten(data, tmp_path, passing)
    printed = run_here('benchmarks.mlperf', *folders, '--out', tmp_path / 'out').stdout
    assert said in printed
    assert sorted(path.name for path in (tmp_path / 'out').iterdir()) == [f'result_{number}.txt' for number in range(len(passing))]


def test_the_result_is_a_mean_without_fastest_and_slowest(data, tmp_path):
    text = verdict_on([read_run(folder) for folder in ten(data, tmp_path, [3, *[4] * 8, 6])])
    assert f'{(120 + 4000 * STEP_SEC) / 60:.2f} minutes, 2,048,000 samples' in text


def test_the_normalized_result_is_scaled_to_the_references_mean(data, tmp_path):
    passing = [3, 3, *[4] * 8]
    text = verdict_on([read_run(folder) for folder in ten(data, tmp_path, passing)])
    minutes = (120 + STEP_SEC * (3000 + 7 * 4000) / 8) / 60
    samples = 512_000 * (3 + 7 * 4) / 8
    mean = 1_706_666.667 + (4_002_909.091 - 1_706_666.667) * (512 - 256) / (2048 - 256)
    assert f'normalized to its mean: {minutes * mean / samples:,.2f} minutes' in text


def test_of_one_run_all_checkpoints_are_to_be_scored(data, tmp_path):
    runs = [read_run(write_run(tmp_path / str(seed), data, seed, (None, FAILS, FAILS, PASSES))) for seed in range(10)]
    assert 'Incomplete: of one run in ten' in verdict_on(runs)
    runs[0] = read_run(write_run(tmp_path / 'whole', data, 0))
    assert 'Incomplete' not in verdict_on(runs)


def test_runs_that_make_no_result_are_refused(data, tmp_path):
    one, other = (read_run(write_run(tmp_path / name, data)) for name in ('a', 'b'))
    with pytest.raises(InputError, match='have the seed 1; each run of a result has one of its own'):
        verdict_on([one, other])
    large = read_run(write_run(tmp_path / 'c', data, 2, changes=['batch.global_size=2048', 'checkpoint.every=250ba']))
    with pytest.raises(InputError, match='batches of 512, 2048'):
        verdict_on([one, large])
    with pytest.raises(InputError, match='11 runs, and a result is of 10'):
        verdict_on([read_run(folder) for folder in ten(data, tmp_path, [4] * 11)])


# The logs.


@pytest.fixture
def compliant(tmp_path):
    """Whether MLCommons' compliance checker accepts a log, by the rules of v5.0, the last round of this benchmark."""
    checking = pytest.importorskip('mlperf_logging.compliance_checker.mlp_compliance', reason='mlperf-logging is installed with [dev]')

    def check(lines):
        (tmp_path / 'log.txt').write_text('\n'.join(lines))
        checker = checking.make_checker('training', '5.0.0', quiet=False, werror=True)
        valid, *_ = checking.main(str(tmp_path / 'log.txt'), 'training_5.0.0/common.yaml', checker)
        return valid

    return check


@pytest.mark.parametrize('division', ['open', 'closed'])
def test_mlcommons_checker_accepts_the_log(data, tmp_path, compliant, division):
    run = read_run(write_run(tmp_path / 'run', data, scores=(None, FAILS, FAILS, PASSES)))
    lines = log_lines(run, Submission(division, 'ours', cache_cleared=True))
    assert compliant(lines)
    assert [json.loads(line[len(':::MLLOG ') :])['time_ms'] for line in (lines[0], lines[-1])] == [
        1000 * BEGAN,
        1000 * (BEGAN + 120 + 4000 * STEP_SEC),
    ]


@pytest.mark.parametrize('key', ['init_start', 'run_start', 'run_stop', 'opt_adamw_beta_2', 'gradient_accumulation_steps', 'train_samples'])
def test_that_checker_would_say_what_is_missing(data, tmp_path, compliant, key):
    lines = log_lines(read_run(write_run(tmp_path / 'run', data)), Submission('closed'))
    assert compliant(lines)
    assert not compliant([line for line in lines if f'"{key}"' not in line])


def test_that_checker_refuses_a_run_that_did_not_reach_the_target(data, tmp_path, compliant):
    lines = log_lines(read_run(write_run(tmp_path / 'run', data, scores=(FAILS, FAILS))), Submission('closed'))
    assert '"status": "aborted"' in lines[-1]
    assert not compliant(lines)


@pytest.mark.parametrize(('passing', 'accepted'), [([4] * 10, True), ([3] * 10, False), ([3, 4, 4, 4, 4, 4, 4, 4, 4, 3], True)])
def test_mlcommons_convergence_and_seed_checkers_agree(data, tmp_path, passing, accepted):
    rcp_checker = pytest.importorskip('mlperf_logging.rcp_checker.rcp_checker', reason='mlperf-logging is installed with [dev]')
    seed_checker = pytest.importorskip('mlperf_logging.package_checker.seed_checker')
    text = run_here('benchmarks.mlperf', *ten(data, tmp_path, passing), '--out', tmp_path / 'out').stdout
    passed, message, factor = rcp_checker.check_directory(str(tmp_path / 'out'), 'training', '5.0.0', False, False, rcp_pass='pruned_rcps')
    assert (passed, message) == (accepted, 'RCP Interpolation')
    assert ('Accepted' in text) is accepted
    assert ('normalized' in text) == (accepted and factor > 1)
    assert seed_checker.SeedChecker('5.0.0').check_seeds(map(str, (tmp_path / 'out').iterdir()))


def test_the_log_says_where_the_data_would_have_to_be(tmp_path):
    run = read_run(write_run(tmp_path / 'run', tmp_path / 'gone'))
    with pytest.raises(InputError, match='the log names the number of training samples, and .*gone/manifest.json'):
        log_lines(run, Submission())
