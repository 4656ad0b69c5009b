"""The command: what it prints and writes, and what it refuses before anything slow is imported."""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from diffusion.cost.hardware import gpu_counts
from diffusion.cost.scaling import ScalingPoint, fit
from diffusion.cost.throughput import MOSAICML_TWO_PHASE
from diffusion.plan import PlanRequest, make_plan
from diffusion.recipe import load_recipe
from tests.conftest import REPOSITORY
from tests.cost.planning import PHASES, planned, refused, text_of, without_runs  # noqa: F401
from tests.cost.test_rates import row

TWO_PHASE = ['--gpu', 'a100-40gb', '--throughput', 'published:mosaicml-two-phase', '--price', '2', '--gpus', '8..128']


@pytest.fixture(scope='module')
def two_phases(tmp_path_factory):
    return planned(tmp_path_factory.mktemp('plan'), *PHASES, *TWO_PHASE)


@pytest.mark.parametrize(
    ('num_gpus', 'published_days', 'published_dollars'),
    [(8, 81.33, 31_230), (16, 40.42, 31_043), (32, 20.06, 30_805), (64, 10.14, 31_146), (128, 5.51, 33_874)],
)
def test_the_published_two_phase_table(num_gpus, published_days, published_dollars, two_phases):
    """mosaicml/diffusion README: the printed dollars are rounded down."""
    (column,) = [column for column in two_phases[0]['columns'] if column['num_gpus'] == num_gpus]
    assert column['days'] == pytest.approx(published_days, rel=7e-4)
    assert math.floor(column['dollars']) == published_dollars
    assert {phase['origin'] for phase in column['phases']} == {'published'}


def test_a_reader_may_leave_early():
    """`| head`: a pipe whose other end is closed."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, '-m', 'diffusion.plan', PHASES[0], '--gpus', '8', '--mfu', '0.3']
    result = subprocess.run(command, cwd=REPOSITORY, stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert (result.returncode, result.stderr) == (0, '')


def test_facts_of_the_two_phases(two_phases):
    first, second = two_phases[0]['recipes']
    assert first['network'] == second['network'] == 865_910_724
    assert first['FLOP'] / 1e9 == pytest.approx(539.31, abs=0.005)
    assert second['FLOP'] / 1e9 == pytest.approx(2408.74, abs=0.005)
    at_8 = two_phases[0]['columns'][0]['phases']
    assert [phase['MFU'] for phase in at_8] == pytest.approx([0.238, 0.280], abs=5e-4)  # as published rows mean
    assert at_8[0]['loader'] == 16_584 * 1100


def test_two_recipes_are_one_bill_and_every_number_says_where_it_is_from(two_phases):
    plan, printed = two_phases
    assert plan['bill_gpus'] == 128
    assert {'training, sd2-base-256', 'training, sd2-base-512', 'encode 256 px', 'encode 512 px', 'people'} <= {line['what'] for line in plan['bill']}
    assert math.floor(sum(line['dollars'][1] for line in plan['bill'] if line['group'] == 'steps')) == 33_874
    assert printed.stdout.count('| total') == 1
    sources = ('given on the command line; now', 'published: mosaicml-two-phase', 'is an outlier', '(assumed)', 'fits into 94% of 40 GB of a100-40gb')
    assert all(source in text_of(printed) for source in sources)


def without_torch(*arguments):
    spy = f"""
import sys
sys.argv = ['plan', *{[*PHASES, *arguments]!r}]
from diffusion.plan import main
code = main()
assert not any(name in sys.modules for name in ('torch', 'diffusers', 'composer')), 'slow'
raise SystemExit(code)
"""
    return subprocess.run([sys.executable, '-c', spy], cwd=REPOSITORY, capture_output=True, text=True, check=False)


def test_a_plan_of_shipped_recipes_imports_no_torch():
    result = without_torch('--mfu', '0.3')
    assert (result.returncode, result.stderr) == (0, '')
    assert 'assumed: an MFU of 30.0 %' in result.stdout


def test_errors_of_all_recipes_come_first():
    result = without_torch('optimizer.lrr=1', 'seed=1.5', '--gpu', 'nothing')
    assert (result.returncode, result.stdout) == (2, '')
    for expected in ("optimizer.lrr: unknown key (command line); did you mean 'optimizer.lr'?", 'seed: ', 'sd2-base-512.yaml: '):
        assert expected in result.stderr
    assert 'Traceback' not in result.stderr


def test_numbers_of_gpus_that_the_recipe_cannot_use_say_why(tmp_path):
    plan, printed = planned(tmp_path, PHASES[0], '--gpus', '8,12,16')
    by_gpus = {column['num_gpus']: column for column in plan['columns']}
    assert not by_gpus[8]['errors']
    assert '2048 is not divisible by 12 GPUs; nearest: 2040 or 2052' in by_gpus[12]['errors'][0]
    assert '12 GPUs: no plan: sd2-base-256: batch.global_size' in text_of(printed)
    assert plan['bill_gpus'] == 16  # the most that will do
    assert planned(tmp_path, PHASES[0], '--bill-gpus', '8')[0]['bill_gpus'] == 8


def test_a_micro_batch_that_is_more_than_a_gpus_share_is_made_smaller_and_said(tmp_path):
    fixed = []
    for phase, micro_size in zip(PHASES, (128, 32), strict=True):
        path = tmp_path / Path(phase).name
        path.write_text(f'base: {phase}\nbatch: {{micro_size: {micro_size}}}\n')
        fixed.append(path)
    plan, printed = planned(tmp_path, *fixed, '--gpus', '16,32,128')
    needs = {
        (column['num_gpus'], phase['name']): (phase['needs'] and phase['needs'].split()[2].strip(','), phase['micro-batch'])
        for column in plan['columns']
        for phase in column['phases']
    }
    assert needs == {
        (16, 'sd2-base-256'): (None, 128),
        (16, 'sd2-base-512'): (None, 32),
        (32, 'sd2-base-256'): ('batch.micro_size=64', 64),
        (32, 'sd2-base-512'): (None, 32),
        (128, 'sd2-base-256'): ('batch.micro_size=16', 16),
        (128, 'sd2-base-512'): ('batch.micro_size=16', 16),
    }
    assert "32 GPUs: sd2-base-256: needs batch.micro_size=64, a GPU's share of the batch" in text_of(printed)
    load_recipe(PHASES[0], ['batch.micro_size=16', 'data.streams.train.local=x'], num_gpus=128)  # and then it is sound


def test_a_throughput_file(tmp_path):
    file = tmp_path / 'results.jsonl'
    rows = [row(num_gpus=n, num_nodes=n // 8, images_per_sec=rate, device='NVIDIA A100-SXM4-80GB') for n, rate in ((8, 1300.0), (16, 2500.0))]
    rows[0]['peak_allocated_bytes'] = 50_000_000_000  # 26 bytes a parameter, 1.02 GB of encoders, 128 x 0.3174 GB are 64.16 GB
    file.write_text(''.join(json.dumps(row) + '\n' for row in rows))
    plan, printed = planned(tmp_path, PHASES[0], '--throughput', file, '--gpus', '8,16')
    assert [column['phases'][0]['throughput'] for column in plan['columns']] == [1300, 2500]
    assert plan['columns'][1]['training'] == pytest.approx(1_126_400_000 / 2500 / 3600 * 16)
    check = {row['what']: row['quantity'] for row in plan['rows'] if row['group'] == 'memory checked'}
    assert check['difference'] == pytest.approx(check['estimated'] / 50e9 - 1)
    assert 'memory checked: sd2-base-256 on 8 GPUs: estimated 64.16 GB, measured 50.00 GB, +28.3%' in text_of(printed)
    assert any('is more than 15%' in warning for warning in plan['warnings'])
    assert 'warning: sd2-base-256 on 8 GPUs: memory was estimated' in printed.stdout


def test_what_does_not_fit_says_so_with_the_remedy(tmp_path):
    plan, printed = planned(tmp_path, PHASES[0], '--gpu', 'a100-40gb', '--gpus', '8', '--mfu', '0.3', 'batch.micro_size=128')
    assert not plan['columns'][0]['phases'][0]['fits']
    assert 'does not fit into 94% of 40 GB of a100-40gb: set batch.micro_size=32 or train.checkpoint_activations=true' in text_of(printed)
    assert 'does not fit' in printed.stderr


def test_rates_beyond_the_roofline_are_doubted(tmp_path):
    plan, _ = planned(tmp_path, PHASES[0], '--gpu', 'h100', '--mfu', '0.65')
    assert any('above the roofline' in warning for warning in plan['warnings'])
    assert planned(tmp_path, PHASES[0], '--gpu', 'a100-80gb', '--mfu', '0.65')[0]['warnings'] == []


def test_hardware_of_others_is_arithmetic_and_marked(tmp_path):
    """Trainium, which the AWS post names: its price and its peak, and a warning."""
    plan, printed = planned(tmp_path, PHASES[0], '--gpu', 'trainium', '--gpus', '16', '--gpus-per-node', '16', '--mfu', '0.3')
    assert plan['price']['name'] == 'gpu_hour.trainium.on-demand'
    assert plan['columns'][0]['phases'][0]['throughput'] == pytest.approx(0.3 * 190e12 * 16 / 539.3108992e9)
    assert 'trainium: AWS Trainium needs the Neuron SDK; this stack runs on NVIDIA GPUs' in text_of(printed)


def test_the_page_fits_120_columns_and_ranges_have_two_digits(two_phases):
    lines = two_phases[1].stdout.splitlines()
    assert max(len(line) for line in lines if not line.startswith('#')) <= 120
    (total,) = [line for line in lines if line.startswith('| total')]
    amounts = [cell.strip().lstrip('$').replace(',', '') for cell in total.split('|')[5:8]]
    assert all(len(amount.rstrip('0')) <= 2 for amount in amounts)
    assert [float(amount) for amount in amounts] == pytest.approx(two_phases[0]['totals']['dollars'], rel=0.05)


@pytest.mark.parametrize(
    ('gpu', 'price', 'name'),
    [
        (None, [], 'cost.price_per_gpu_hour'),  # the recipe's, which is for this GPU
        ('h200', [], 'gpu_hour.h200.on-demand'),
        (None, ['gpu_hour.a100-80gb.mine=1.25', 'person_month.engineer.mine=1'], 'gpu_hour.a100-80gb.mine'),
        (None, ['gpu_hour.a100-80gb.spot=1.49', '2.49'], 'gpu_hour.a100-80gb.given'),
    ],
)
def test_the_price_is_what_was_asked_for_or_the_recipes_or_the_lists(gpu, price, name):
    assert make_plan(PlanRequest(recipes=[PHASES[0]], gpu=gpu, price=price, mfu='0.3')).bill.price.name == name


def test_another_price_of_the_list_leaves_the_recipes_own(tmp_path):
    plan, _ = planned(tmp_path, PHASES[0], '--gpus', '8', '--price', 'storage_tb_month.s3-standard.list=20')
    assert plan['price']['name'] == 'cost.price_per_gpu_hour'
    assert {line['price']['dollars'] for line in plan['bill'] if line['group'] == 'storage'} == {20}
    dear = tmp_path / 'dear.yaml'
    dear.write_text(f'base: {PHASES[1]}\nname: dear\ncost: {{price_per_gpu_hour: 9.0}}\n')
    assert 'sd2-base-256 $2, dear $9' in refused(PHASES[0], dear)


def test_epochs_are_whole_batches(tmp_path):
    images = ['--assume', 'encoding.256.num_images=40000000']
    plan, _ = planned(tmp_path, PHASES[0], 'train.duration=30ep', '--gpus', '8', *images)
    assert plan['recipes'][0]['steps'] == 30 * (40_000_000 // 2048)  # what an epoch has over is no batch


def test_latents_are_of_the_images_there_are(tmp_path):
    plan, _ = planned(tmp_path, PHASES[0], '--gpus', '8', '--assume', 'preparation.num_images=5e6')
    assert plan['recipes'][0]['images'] == 5e6
    assert {line['what']: line['quantity'][1] for line in plan['bill']}['store image shards'] < 10


def test_a_guess_is_a_range_or_is_said_to_be_none(tmp_path):
    def bill(*arguments):
        plan, printed = planned(tmp_path, PHASES[0], '--gpu', 'h200', '--gpus', '8,16', *arguments)
        (steps,) = [line['dollars'] for line in plan['bill'] if line['group'] == 'steps']
        return steps, plan['taken_for_certain'], printed.stdout

    (low, _, high), certain, printed = bill()
    assert high / low == pytest.approx(0.348 / 0.252, rel=1e-3)  # p90 and p10 of 24 to 36 %
    assert not certain
    assert '## Training alone on 16 GPUs, by price plan' in printed
    (low, _, high), certain, printed = bill('--mfu', '0.3')
    assert low == high
    assert certain == ['how wrong the images/s of sd2-base-256 may be (assumed)']
    assert f'not in these ranges: {certain[0]}' in ' '.join(printed.split())
    assert 'linearly from 8 GPUs' in bill('--throughput', '11000@8')[1][0]
    assert bill('--throughput', '22000@16')[1] == []  # as given


def test_the_memory_of_the_vae_depends_on_its_precision(tmp_path):
    small = [PHASES[1], 'data.kind=images', 'train.checkpoint_activations=true', '--gpus', '8']
    bf16, fp32 = (planned(tmp_path, *small, f'train.vae_precision={how}')[0]['columns'][0]['phases'][0] for how in ('bf16', 'fp32'))
    assert fp32['activations'] > 1.3 * bf16['activations']


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        (['--gpu', 'a100-40'], "no GPU 'a100-40' is known; did you mean 'a100-40gb'?"),
        (['--gpu', 'a100'], "did you mean 'a100-40gb' or 'a100-80gb'?"),
        (['--gpu', 'tpu'], "no GPU 'tpu' is known. There are a100-40gb"),
        (['--gpus', '8,x'], "'x' is not a whole number"),
        (['--mfu', '0.3', '--throughput', '1@8'], 'not allowed with'),
        (['--mfu', '30'], '--mfu 30: is neither a share above 0 and of at most 1 nor a range'),
        (['--mfu', '0.4..0.2'], 'write 0.35 or 0.25..0.4'),
        (['--assume', 'storage.latent_month=3'], "did you mean 'storage.latent_months'?"),
        (['--prices', 'nowhere.yaml'], 'nowhere.yaml: no such file'),
        (['cost.gpu=null'], 'which GPU? the recipe names none (cost.gpu); choose with --gpu: a100-40gb, a100-80gb, h100,'),
        (['--json', '/dev/null/plan.json'], 'cannot be written'),
        (['--gpus', '12'], 'sound on none of these numbers of GPUs:'),
        (['--bill-gpus', '12'], 'not divisible by 12 GPUs'),
        (['--throughput', '99999@8'], 'MFU of 2161%'),
        (['--price', 'gpu_hours.h100=1'], 'is not the name of a price'),
        (['--price', 'cheap'], 'neither dollars, NAME=DOLLARS nor an offer for a100-80gb'),
        (['train.duration=3ep', '--assume', 'encoding.256.num_images=1000'], 'an epoch has no whole batch'),
        (['train.duration=10ep', '--assume', 'encoding.256.num_images=4e7'], 'ema.start: 500000ba is not before the end of the run'),
        (['--assume', 'encoding.256.num_images=8e8'], 'encoding.256.num_images is 800,000,000, more than the 790,000,000 images'),
    ],
)
def test_arguments_that_are_wrong(arguments, message):
    error = refused(PHASES[0], *arguments)
    assert message in error
    assert 'Traceback' not in error


@pytest.mark.parametrize(
    ('text', 'counts'), [('8,16,24', (8, 16, 24)), ('8..64', (8, 16, 32, 64)), ('8,16,...,64', (8, 16, 32, 64)), ('3..20', (3, 6, 12, 20))]
)
def test_lists_of_gpus(text, counts):
    assert gpu_counts(text) == counts


@pytest.mark.parametrize(('text', 'remedy'), [('64..8', 'write 8..64'), ('8,64..16', 'write 16..64'), ('..8', 'write 8..256')])
def test_numbers_that_do_not_double_are_refused(text, remedy):
    with pytest.raises(ValueError, match=re.escape(f'.. doubles from a number to a larger one; {remedy}')):
        gpu_counts(text)


def test_every_line_of_a_recipe_is_explained(tmp_path, two_phases):
    page = (REPOSITORY / 'docs/plan.md').read_text()
    explained = page.partition("Every line of a recipe's section:")[2].partition('\n\n**')[0]
    section = two_phases[1].stdout.partition('## sd2-base-256')[2].partition('\n\n## ')[0].splitlines()[2:]
    labels = {line[:12].strip() for line in section if line[:1].strip()}
    assert {'trains on', 'network', 'FLOP', 'memory', 'loader', 'throughput'} <= labels
    for label in labels:
        assert f'- **{label}**: ' in explained, label
    for part in {line['what'] for line in two_phases[0]['rows'] if line['group'] == 'memory'}:
        assert part.split(' (')[0].split(' to ')[0] in explained, part


def test_a_reservation_that_the_run_fills_is_not_marked(two_phases):
    year = [row for row in two_phases[0]['rows'] if row['group'] == 'ways to pay' and 'reserved-1y' in row['what']]
    assert all((row['quantity'][1] < 8760) == (f'{row["what"]} (*)' in two_phases[1].stdout) for row in year)
    assert 'people are' not in two_phases[1].stdout  # about a third


def test_what_is_predicted_is_a_range_in_the_bill(tmp_path):
    """p10 and p90 of the GPU-hours are those of the 80 % interval; rows that were published stay points."""
    plan, printed = planned(tmp_path, PHASES[1], *TWO_PHASE, '--gpus', '128,256')
    (training,) = (line for line in plan['bill'] if line['group'] == 'steps')
    points = [ScalingPoint(row.num_gpus, 2048, row.images_per_sec[512]) for row in MOSAICML_TWO_PHASE]
    ahead = fit(points).predict(256, 2048, level=0.8)
    expected = [1_740_800_000 / rate / 3600 * 256 for rate in (ahead.high, ahead.images_per_sec, ahead.low)]
    assert training['quantity'] == pytest.approx(expected, rel=1e-3)
    assert ' (predicted) / 3600 x 256 GPUs' in text_of(printed)
    as_measured = planned(tmp_path, PHASES[1], *TWO_PHASE, '--gpus', '128')[0]['bill']
    assert len({*next(line for line in as_measured if line['group'] == 'steps')['quantity']}) == 1
