"""The command: what it prints and writes, and what it refuses before anything slow is imported."""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from diffusion.cost.assumptions import DEFAULT
from diffusion.cost.facts import DRAWN_TOGETHER
from diffusion.cost.formulas import two_digits
from diffusion.cost.hardware import gpu_counts
from diffusion.cost.scaling import ScalingPoint, fit
from diffusion.cost.text import plan_text
from diffusion.cost.throughput import MOSAICML_TWO_PHASE
from diffusion.evaluation.job.results import DEFAULT_CHUNK
from diffusion.plan import PlanRequest, make_plan
from diffusion.recipe import load_recipe
from diffusion.recipe.reading import read_yaml
from tests.conftest import NUM_IMAGES, REPOSITORY, RESOLUTION, run_here
from tests.cost.test_rates import row

PHASES = [str(REPOSITORY / f'yamls/sd2-base-{px}.yaml') for px in (256, 512)]
TWO_PHASE = ['--gpu', 'a100-40gb', '--throughput', 'published:mosaicml-two-phase', '--price', '2', '--gpus', '8..128']


@pytest.fixture(autouse=True)
def without_runs(tmp_path, monkeypatch):
    """Plan in a folder that has the recipes alone: a demo's run in the checkout would be planned in place of what is published."""
    (tmp_path / 'yamls').symlink_to(REPOSITORY / 'yamls')
    monkeypatch.chdir(tmp_path)


def planned(tmp_path, *arguments):
    path = tmp_path / 'plan.json'
    printed = run_here('diffusion.plan', *arguments, '--json', path)
    return by_subject(json.loads(path.read_text())), printed


def by_subject(plan):
    """Add to the table the quantities of each recipe, and of each number of GPUs and recipe; quantities of the bill are [p10, p50, p90]."""
    lines = plan['rows']
    names = [line['recipe'] for line in lines if line['what'] == 'resolution']
    plan['recipes'] = [{line['what']: line['quantity'] for line in lines if line.get('recipe') == name and 'num_gpus' not in line} for name in names]
    plan['columns'] = []
    for num_gpus in dict.fromkeys(line['num_gpus'] for line in lines if line['group'] == 'steps alone'):
        here = [line for line in lines if line.get('num_gpus') == num_gpus and line['group'] in ('recipe', 'memory', 'steps alone')]
        column = {'num_gpus': num_gpus, 'errors': [line['formula'] for line in here if line['what'] == 'no plan'], 'phases': []}
        for name in names:
            own = {line['what']: line for line in here if line.get('recipe') == name}
            if own:
                phase = {what: line['quantity'] for what, line in own.items()} | {'name': name, 'origin': own['throughput']['kind']}
                phase['fits'], phase['parts'] = (
                    'source' not in own['micro-batch'],
                    [line['what'] for line in own.values() if line['group'] == 'memory'],
                )
                column['phases'].append(phase | {'needs': own.get('needs', {}).get('formula')})
        column |= {line['what']: line['quantity'] for line in here if 'recipe' not in line}
        column['dollars'] = next((line['dollars'][1] for line in here if 'dollars' in line), None)
        plan['columns'].append(column)
    for line in plan['bill']:
        line['quantity'] = line['quantity'] if isinstance(line['quantity'], list) else [line['quantity']] * 3
    return plan


def text_of(printed):
    """Without the ends of lines."""
    return ' '.join(printed.stdout.split())


def refused(*arguments):
    return run_here('diffusion.plan', *arguments, code=2).stderr


@pytest.fixture(scope='module')
def two_phases(tmp_path_factory):
    return planned(tmp_path_factory.mktemp('plan'), *PHASES, *TWO_PHASE)


def test_less_than_a_cent_is_one_row(tmp_path):
    """The demo's 600 batches take microseconds of an H100: no row of $0.0000010."""
    found, printed = planned(tmp_path, 'yamls/shapes.yaml', '--gpu', 'h100')
    small = [line for line in found['bill'] if 0 < line['dollars'][-1] < 0.01]
    assert len(small) >= 4
    assert f'| {len(small)} lines below a cent' in printed.stdout
    assert not [
        line for line in printed.stdout.splitlines() if re.search(r'\$0\.00[0-9]', line) and line.startswith('|') and '1,000 requests' not in line
    ]


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


def test_scores_of_drawn_images_have_their_line(tmp_path):
    """By hand: 12 scores of 512 images, 64 of them by each of 8 GPUs; 25 steps of two passes, each a third of what a sample takes in training."""
    scored = [
        'eval.samples.every=50000ba',
        'eval.samples.count=512',
        'eval.samples.metrics=[kid@random-conv]',
        'eval.every=50000ba',
        'eval.streams.held.local=/x',
    ]
    asked = [PHASES[0], '--gpu', 'a100-80gb', '--gpus', 8, '--throughput', '1000@8']
    with_scores, printed = planned(tmp_path, *asked, *scored)
    without, _ = planned(tmp_path, *asked)
    hours = 12 * 64 * 25 * 2 / 3 / (1000 / 8) / 3600
    lines = {line['what']: line for line in with_scores['bill']}
    assert lines['scores of drawn images, sd2-base-256']['quantity'] == pytest.approx([8 * hours] * 3)
    longer = [a - b for a, b in zip(with_scores['totals']['wall hours'], without['totals']['wall hours'], strict=True)]
    assert longer == pytest.approx([hours] * 3, rel=1e-3)
    assert 'scores 12 x 512 images at guidance 3 in 25 steps' in text_of(printed)
    assert not [line for line in without['bill'] if 'scores' in line['what']]
    assert DRAWN_TOGETHER == DEFAULT_CHUNK


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
    assert (first['trains on'], second['trains on']) == (1_126_400_000, 1_740_800_000)
    assert first['network'] == second['network'] == 865_910_724
    assert first['FLOP'] / 1e9 == pytest.approx(539.31, abs=0.005)
    assert second['FLOP'] / 1e9 == pytest.approx(2408.74, abs=0.005)
    at_8 = two_phases[0]['columns'][0]['phases']
    assert [phase['MFU'] for phase in at_8] == pytest.approx([0.238, 0.280], abs=5e-4)  # as published rows mean
    assert at_8[0]['loader'] == 16_584 * 1100


def test_the_three_phases_of_sdxl(tmp_path):
    """Published steps of the first two (arXiv 2307.01952, section 2.5) and counted FLOP; what the recipes' comments say."""
    paths = [REPOSITORY / f'yamls/sdxl-base-{px}.yaml' for px in (256, 512, 1024)]
    plan, _ = planned(tmp_path, *paths, '--gpus', '64')
    assert [recipe['trains on'] for recipe in plan['recipes']] == [600_000 * 2048, 200_000 * 2048, 25_000 * 2048]
    assert [recipe['FLOP'] / 1e9 for recipe in plan['recipes']] == pytest.approx([1230.84, 4713.75, 20230.84], abs=0.005)
    assert {recipe['network'] for recipe in plan['recipes']} == {2_567_463_684}
    for path, recipe, phase in zip(paths, plan['recipes'], plan['columns'][0]['phases'], strict=True):
        header = path.read_text().split('\n\n')[0].replace('\n# ', ' ')
        gpu_hours = 64 * phase['hours']
        assert f'{phase["memory"] / 1e9:.1f} GB' in header
        assert f'micro-batch of {phase["micro-batch"]}' in header
        assert f'{recipe["FLOP in all"]:.2e}'.replace('e+', 'e') in header
        assert f'{gpu_hours:,.0f} GPU-hours, ${3.75 * gpu_hours:,.0f}' in header


def test_the_two_phases_of_the_budget_transformer(tmp_path):
    """3.5e20 FLOP, and what the recipes' comments and docs/recipes.md say of memory, time and money on three GPUs."""
    paths = [REPOSITORY / f'yamls/prx-budget-{px}.yaml' for px in (256, 512)]
    headers = [path.read_text().split('\nbase:')[0].split('\nname:')[0].replace('\n# ', ' ') for path in paths]
    page = (REPOSITORY / 'docs/recipes.md').read_text()
    for gpu, name in (('h200', 'H200'), ('h100', 'H100'), ('a100-80gb', 'A100-80GB')):
        plan, printed = planned(tmp_path, *paths, '--gpus', '8', '--gpu', gpu)
        assert sum(recipe['FLOP in all'] for recipe in plan['recipes']) == pytest.approx(3.5e20, rel=0.01)
        assert {recipe['network'] for recipe in plan['recipes']} == {596_675_136}
        assert 'an MFU of 30 (25 to 35) %' in text_of(printed)
        (column,) = plan['columns']
        numbers = [f'{column["training"]:,.0f}', f'{column["days"]:,.2f}', f'${column["dollars"]:,.0f}']
        micro = ' and '.join(str(phase['micro-batch']) for phase in column['phases'])
        memory = ' and '.join(f'{phase["memory"] / 1e9:.1f}' for phase in column['phases'])
        assert re.search(rf'{name} at \${plan["price"]["dollars"]:.2f}: {", ".join(map(re.escape, numbers))}'.replace(', ', '[^,;.]*, '), headers[0])
        assert f'| {name} | ${plan["price"]["dollars"]:.2f} | {micro} | {memory} | {" | ".join(numbers)} |' in page
        for recipe, header, phase in zip(plan['recipes'], headers, column['phases'], strict=True):
            assert f'{recipe["FLOP in all"]:.2e}'.replace('e+', 'e') in header
            assert gpu != 'h200' or f'{phase["memory"] / 1e9:.1f} GB a GPU with a micro-batch of {phase["micro-batch"]}' in header


def test_a_text_encoder_that_costs_more_than_the_network_is_warned_of_and_counted(tmp_path):
    """T5-XXL at 256 tokens, 3.4 times the network: a step takes 4.4 times as long at the same FLOP/s."""
    recipe = [REPOSITORY / 'yamls/prx-budget-256.yaml', '--gpu', 'h200', '--gpus', '8', 'model.encoders.source=.']
    clip, _ = planned(tmp_path, *recipe)
    t5, printed = planned(tmp_path, *recipe, 'model.network=prx-600m-t5-xxl')
    (network,) = t5['recipes']
    ratio = network['text encoder'] / network['FLOP']
    assert ratio == pytest.approx(2396.6 / 703.1, rel=1e-3)
    (warning,) = t5['warnings']
    assert 'the text encoder takes 2,396.6 GFLOP for a caption of 256 tokens, 3.4 times the 703.1 of the network in a step' in warning
    assert 'text 2,396.6 GFLOP (4,762 million parameters) a sample; 340.8% of the network' in text_of(printed)
    assert clip['warnings'] == []
    rates = [plan['columns'][0]['phases'][0]['throughput'] * plan['recipes'][0]['FLOP'] for plan in (clip, t5)]
    assert rates[0] / rates[1] == pytest.approx(1 + ratio, rel=0.01)
    frozen = [plan['columns'][0]['phases'][0]['frozen encoders'] for plan in (clip, t5)]
    assert frozen[1] - frozen[0] == 2 * (4_762_310_656 - 340_387_840)


def test_two_recipes_are_one_bill(two_phases):
    plan, printed = two_phases
    bill = plan['bill']
    assert plan['bill_gpus'] == 128
    names = [line['what'] for line in bill]
    assert {'training, sd2-base-256', 'training, sd2-base-512', 'encode 256 px', 'encode 512 px', 'people'} <= set(names)
    training = sum(line['dollars'][1] for line in bill if line['what'].startswith('training, '))
    assert math.floor(training) == 33_874
    assert 'p50' in printed.stdout
    assert printed.stdout.count('| total') == 1


def test_of_points_the_total_is_the_sum_of_the_lines(tmp_path, two_phases):
    """Medians of ranges do not add up; numbers do."""
    assumptions = tmp_path / 'points.yaml'
    content = read_yaml(DEFAULT.read_text())

    def points(value):
        if isinstance(value, dict):
            return {key: points(inner) for key, inner in value.items()}
        return float(value[0]) if isinstance(value, list) else value

    assumptions.write_text(json.dumps(points(content)))
    plan, _ = planned(tmp_path, *PHASES, *TWO_PHASE, '--assumptions', assumptions)
    bill, total = plan['bill'], plan['totals']['dollars']
    assert total[0] == total[2]
    assert total[1] == pytest.approx(sum(line['dollars'][1] for line in bill))
    for line in bill:
        assert line['dollars'][1] == pytest.approx(line['quantity'][1] * line['price']['dollars'])
        assert line['price']['date']
        assert line['price']['source']
    assert sum(line['share'] for line in bill) == pytest.approx(1)


def test_every_number_says_where_it_is_from(two_phases):
    text = text_of(two_phases[1])
    assert 'given on the command line; now' in text
    assert 'published: mosaicml-two-phase' in text
    assert 'is an outlier' in text
    assert '(assumed)' in text
    assert 'fits into 94% of 40 GB of a100-40gb' in text


def test_a_plan_of_shipped_recipes_imports_no_torch():
    spy = f"""
import sys
sys.argv = ['plan', *{PHASES!r}, '--mfu', '0.3']
from diffusion.plan import main
code = main()
assert not any(name in sys.modules for name in ('torch', 'diffusers', 'composer')), 'slow'
raise SystemExit(code)
"""
    result = subprocess.run([sys.executable, '-c', spy], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert 'assumed: an MFU of 30.0 %' in result.stdout


def test_errors_of_all_recipes_come_first():
    spy = f"""
import sys
sys.argv = ['plan', *{PHASES!r}, 'optimizer.lrr=1', 'seed=1.5', '--gpu', 'nothing']
from diffusion.plan import main
code = main()
assert 'torch' not in sys.modules
raise SystemExit(code)
"""
    result = subprocess.run([sys.executable, '-c', spy], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert result.returncode == 2, result.stderr
    for expected in ("optimizer.lrr: unknown key (command line); did you mean 'optimizer.lr'?", 'seed: ', 'sd2-base-512.yaml: '):
        assert expected in result.stderr
    assert 'Traceback' not in result.stderr
    assert result.stdout == ''


def test_numbers_of_gpus_that_the_recipe_cannot_use_say_why(tmp_path):
    plan, printed = planned(tmp_path, PHASES[0], '--gpus', '8,12,16')
    by_gpus = {column['num_gpus']: column for column in plan['columns']}
    assert not by_gpus[8]['errors']
    assert '2048 is not divisible by 12 GPUs; nearest: 2040 or 2052' in by_gpus[12]['errors'][0]
    assert '12 GPUs: no plan: sd2-base-256: batch.global_size' in text_of(printed)
    assert plan['bill_gpus'] == 16  # the most that will do
    assert planned(tmp_path, PHASES[0], '--bill-gpus', '8')[0]['bill_gpus'] == 8
    assert 'sound on none' in refused(PHASES[0], '--gpus', '12')
    assert 'not divisible by 12 GPUs' in refused(PHASES[0], '--bill-gpus', '12')


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


def test_rates_beyond_the_roofline_are_doubted_and_beyond_the_peak_refused(tmp_path):
    plan, _ = planned(tmp_path, PHASES[0], '--gpu', 'h100', '--mfu', '0.65')
    assert any('above the roofline' in warning for warning in plan['warnings'])
    assert planned(tmp_path, PHASES[0], '--gpu', 'a100-80gb', '--mfu', '0.65')[0]['warnings'] == []
    assert 'MFU of 2161%' in refused(PHASES[0], '--throughput', '99999@8')


def test_hardware_of_others_is_arithmetic_and_marked(tmp_path):
    """Trainium, which the AWS post names: its price and its peak, and a warning."""
    plan, printed = planned(tmp_path, PHASES[0], '--gpu', 'trainium', '--gpus', '16', '--gpus-per-node', '16', '--mfu', '0.3')
    assert plan['price']['name'] == 'gpu_hour.trainium.on-demand'
    assert plan['columns'][0]['phases'][0]['throughput'] == pytest.approx(0.3 * 190e12 * 16 / 539.3108992e9)
    assert 'trainium: AWS Trainium needs the Neuron SDK; this stack runs on NVIDIA GPUs' in text_of(printed)


def test_the_page_fits_120_columns(two_phases):
    own = [line for line in two_phases[1].stdout.splitlines() if not line.startswith(('#', '|'))]
    assert max(map(len, own)) <= 120
    tables = [line for line in two_phases[1].stdout.splitlines() if line.startswith('|')]
    assert max(map(len, tables)) <= 120


def test_ranges_have_two_digits(two_phases):
    (total,) = [line for line in two_phases[1].stdout.splitlines() if line.startswith('| total')]
    amounts = [cell.strip().lstrip('$').replace(',', '') for cell in total.split('|')[5:8]]
    assert all(len(amount.rstrip('0')) <= 2 for amount in amounts)
    assert [float(amount) for amount in amounts] == pytest.approx(two_phases[0]['totals']['dollars'], rel=0.05)


def test_prices(tmp_path):
    def price(*arguments):
        return planned(tmp_path, PHASES[0], '--mfu', '0.3', *arguments)[0]['price']

    assert price()['name'] == 'cost.price_per_gpu_hour'  # the recipe's, which is for this GPU
    assert price('--gpu', 'h200')['name'] == 'gpu_hour.h200.on-demand'
    assert price('--price', 'spot')['name'] == 'gpu_hour.a100-80gb.spot'
    assert price('--price', '1.5')['dollars'] == 1.5
    assert price('--price', 'gpu_hour.a100-80gb.mine=1.25', '--price', 'person_month.engineer.mine=1')['dollars'] == 1.25
    assert price('--price', '2.49', '--price', 'gpu_hour.a100-80gb.spot=1.49')['dollars'] == 2.49  # what is asked for is not lost
    assert price('--price', 'gpu_hour.a100-80gb.spot=1.49', '--price', 'spot')['dollars'] == 1.49
    assert 'names $2.49 (gpu_hour.a100-80gb.given), $0.59 (gpu_hour.a100-80gb.spot); give one' in refused(
        PHASES[0], '--price', '2.49', '--price', 'spot'
    )
    offers = [f'gpu_hour.a100-80gb.{offer}=1.{offer[-1]}' for offer in ('mine1', 'mine2')]
    assert 'name it as well, such as --price mine1' in refused(PHASES[0], *(f'--price={offer}' for offer in offers))
    assert 'is not the name of a price' in refused(PHASES[0], '--price', 'gpu_hours.h100=1')
    assert 'neither dollars, NAME=DOLLARS nor an offer for a100-80gb' in refused(PHASES[0], '--price', 'cheap')


def test_another_price_of_the_list_leaves_the_recipes_own(tmp_path):
    plan, _ = planned(tmp_path, PHASES[0], '--gpus', '8', '--price', 'storage_tb_month.s3-standard.list=20')
    assert plan['price']['name'] == 'cost.price_per_gpu_hour'
    assert {line['price']['dollars'] for line in plan['bill'] if line['group'] == 'storage'} == {20}
    dear = tmp_path / 'dear.yaml'
    dear.write_text(f'base: {PHASES[1]}\nname: dear\ncost: {{price_per_gpu_hour: 9.0}}\n')
    assert 'sd2-base-256 $2, dear $9' in refused(PHASES[0], dear)


def test_epochs_are_whole_batches_and_long_enough(tmp_path):
    images = ['--assume', 'encoding.256.num_images=40000000']
    plan, _ = planned(tmp_path, PHASES[0], 'train.duration=30ep', '--gpus', '8', *images)
    assert plan['recipes'][0]['steps'] == 30 * (40_000_000 // 2048)  # what an epoch has over is no batch
    assert 'ema.start: 500000ba is not before the end of the run' in refused(PHASES[0], 'train.duration=10ep', '--gpus', '8', *images)
    assert 'an epoch has no whole batch' in refused(PHASES[0], 'train.duration=3ep', '--gpus', '8', '--assume', 'encoding.256.num_images=1000')


def test_latents_are_of_the_images_there_are(tmp_path):
    plan, _ = planned(tmp_path, PHASES[0], '--gpus', '8', '--assume', 'preparation.num_images=5e6')
    assert plan['recipes'][0]['images'] == 5e6
    assert {line['what']: line['quantity'][1] for line in plan['bill']}['store image shards'] < 10
    error = refused(PHASES[1], '--gpus', '8', '--assume', 'preparation.num_images=5e6')
    assert 'encoding.512.num_images is 300,000,000, more than the 5,000,000 images' in error


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


def test_the_parts_of_the_bill_are_sums_of_lines(tmp_path):
    """Of points, whose sums are those of the lines."""
    points = ['storage={image_shard_months: 3, crawl_months: 1, latent_months: 2}', 'preparation={bytes_per_image: 1e5, kept_share: 0.9}']
    plan, printed = planned(tmp_path, PHASES[0], '--gpus', '8', '--mfu', '0.3', *(word for point in points for word in ('--assume', point)))
    lines = [line['dollars'][1] for line in plan['bill'] if line['group'] == 'storage']
    assert len(lines) == 4
    assert plan['totals']['storage'] == pytest.approx([sum(lines)] * 3)
    parts = printed.stdout.partition('| part ')[2]
    assert f'${sum(lines):,.0f}' in parts.partition('| storage ')[2].partition('\n')[0]


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
    ],
)
def test_arguments_that_are_wrong(arguments, message):
    error = refused(PHASES[0], *arguments)
    assert message in error
    assert 'Traceback' not in error


def test_lists_of_gpus():
    assert gpu_counts('8,16,24') == (8, 16, 24)
    assert gpu_counts('8..64') == gpu_counts('8,16,...,64') == (8, 16, 32, 64)
    assert gpu_counts('3..20') == (3, 6, 12, 20)


@pytest.mark.parametrize(('text', 'remedy'), [('64..8', 'write 8..64'), ('8,64..16', 'write 16..64'), ('..8', 'write 8..256')])
def test_numbers_that_do_not_double_are_refused(text, remedy):
    with pytest.raises(ValueError, match=re.escape(f'.. doubles from a number to a larger one; {remedy}')):
        gpu_counts(text)


RECIPES = sorted((REPOSITORY / 'yamls').glob('*.yaml'))


@pytest.mark.parametrize('recipe', RECIPES, ids=lambda path: path.stem)
def test_every_shipped_recipe_can_be_planned(recipe):
    """From the recipe alone: a GPU that runs small jobs, and one that runs large ones."""
    for gpu in ('rtx-4090', 'h200'):
        plan = make_plan(PlanRequest(recipes=[str(recipe)], gpu=gpu, price=['1'] if gpu == 'h200' else []))
        assert all(np.all(np.isfinite(row.dollars)) for row in plan.bill.rows)
        page = plan_text(plan)
        assert ('not counted: ' in page) == recipe.stem.startswith(('shapes', 'emoji'))
        assert all(f'not counted: {text[:40]}' in page for text in plan.not_counted)


def test_a_resolution_of_which_nothing_is_assumed_is_derived_from_the_nearest(tmp_path):
    """With a number of images everything is counted: 4,000 of 64 px encode 16 times as fast as 256 px."""
    of = [REPOSITORY / 'yamls/emoji-64.yaml', '--gpu', 'a100-80gb', '--mfu', '0.3', '--assume', 'encoding.256.images_per_gpu_sec=100']
    without, printed = planned(tmp_path, *of)
    assert 'not counted: emoji-64: its images' in text_of(printed)
    assert without['recipes'][0]['images'] is None
    plan, printed = planned(tmp_path, *of, '--assume', 'preparation.num_images=4000')
    lines = {line['what']: line for line in plan['bill']}
    assert lines['encode 64 px']['quantity'][1] == pytest.approx(4000 / (100 * 16) / 3600)
    assert '(derived: encoding.256.images_per_gpu_sec, by pixels)' in text_of(printed)
    assert not [text for text in plan['not_counted'] if 'images,' in text]
    assert plan['recipes'][0]['epochs'] == 15_000 * 128 / 4000
    assert [column['num_gpus'] for column in plan['columns']] == [1]  # a batch of one pass


def test_every_line_of_a_recipe_is_explained(tmp_path, two_phases):
    page = (REPOSITORY / 'docs/plan.md').read_text()
    explained = page.partition("Every line of a recipe's section:")[2].partition('\n\n**')[0]
    section = two_phases[1].stdout.partition('## sd2-base-256')[2].partition('\n\n## ')[0].splitlines()[2:]
    labels = {line[:12].strip() for line in section if line[:1].strip()}
    assert {'trains on', 'network', 'FLOP', 'memory', 'loader', 'throughput'} <= labels
    for label in labels:
        assert f'- **{label}**: ' in explained, label
    for part in two_phases[0]['columns'][0]['phases'][0]['parts']:
        assert part.split(' (')[0].split(' to ')[0] in explained, part


def test_images_that_are_there_are_not_assumed(tmp_path, latents):
    """The dataset of the tests has 48 samples."""
    of = ['--mfu', '0.3', '--gpus', '8', f'data.streams.train.local={latents}']
    assert 'manifest resolution is 32, data.resolution is 256; encode the images again' in refused(PHASES[0], *of)
    (tmp_path / 'mine').mkdir()
    (tmp_path / 'mine/manifest.json').write_text((latents / 'manifest.json').read_text().replace(f'"resolution": {RESOLUTION}', '"resolution": 256'))
    of[-1] = f'data.streams.train.local={tmp_path}/mine'
    plan, printed = planned(tmp_path, PHASES[0], *of)
    assert plan['recipes'][0]['images'] == NUM_IMAGES
    assert plan['recipes'][0]['epochs'] == 1_126_400_000 / NUM_IMAGES
    assert f'epochs of {NUM_IMAGES} images (in the manifests)' in text_of(printed)
    (line,) = [line for line in plan['bill'] if line['what'] == 'encode 256 px']
    assert line['quantity'][1] < 1
    (tmp_path / 'broken').mkdir()
    (tmp_path / 'broken/manifest.json').write_text('{')
    assert 'not a manifest' in refused(PHASES[0], '--mfu', '0.3', f'data.streams.train.local={tmp_path}/broken')


def test_a_small_run_on_own_data_is_planned_by_its_manifest_and_its_own_duration(tmp_path, latents):
    """At a resolution of which nothing is assumed; and what is not about the run is marked."""
    recipe = str(REPOSITORY / 'yamls/shapes.yaml')
    of = [recipe, '--gpu', 'a100-80gb', '--gpus', '1', '--mfu', '0.3', 'checkpoint.every=1800sec']
    own = [*of, f'data.streams.shapes.local={latents}', '--assume', 'encoding.256.images_per_gpu_sec=100']
    plan, printed = planned(tmp_path, *own)
    (said,) = plan['recipes']
    assert said['images'] == NUM_IMAGES
    assert f'{said["steps"]}ba' == read_yaml(Path(recipe).read_text())['train']['duration']
    (line,) = [line for line in plan['bill'] if line['what'] == f'encode {RESOLUTION} px']
    assert line['quantity'][1] == pytest.approx(NUM_IMAGES / (100 * (256 / RESOLUTION) ** 2) / 3600)  # as many pixels a second
    text = text_of(printed)
    assert re.search(r'people are (99\.\d|100\.0)% of this bill', text)
    assert '--assume work.person_months=0' in text
    assert 'The bill on 1 GPU:' in text
    assert not re.search(r'(?<![\d,.])1 (GPU|node|image|sample|step|checkpoint)s\b', text)
    reserved = [row['what'] for row in plan['rows'] if row['group'] == 'ways to pay' and 'reserved-1y' in row['what']]
    for name in reserved:
        assert f'{name} (*)' in text
        assert f'(*) {name}: reserved for 365 days, and the run takes' in text
    assert reserved
    alone = planned(tmp_path, *own, '--assume', 'work.person_months=0')
    assert alone[0]['totals']['people'] == [0, 0, 0]
    assert 'people are' not in text_of(alone[1])
    without, _ = planned(tmp_path, *of)  # the data
    assert [text for text in without['not_counted'] if text.endswith('say it with --assume preparation.num_images=N')]
    for said in ('preparation.num_images=790e6', 'encoding.32={num_images: 1000, images_per_gpu_sec: 100, gpu: null}'):
        counted, _ = planned(tmp_path, *of, '--assume', said)
        assert 'encode 32 px' in {line['what'] for line in counted['bill']}


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


def test_the_table_of_the_readme_is_what_its_command_prints(tmp_path):
    readme = (REPOSITORY / 'README.md').read_text().partition('## What it costs')[2]
    command = next(line for line in readme.replace('\\\n', ' ').splitlines() if line.startswith('python -m diffusion.plan'))
    plan, _ = planned(tmp_path, *command.split()[3:])
    shown = [[cell.strip() for cell in line.strip('|').split('|')] for line in readme.splitlines() if re.match(r'\| \d', line)]
    made = []
    for column in plan['columns']:
        at_256, at_512 = (phase['throughput'] for phase in column['phases'])
        numbers = [f'{column["num_gpus"]}', f'{at_256:,.0f}', f'{at_512:,.0f}', f'{column["days"]:,.2f}', f'{column["training"]:,.0f}']
        made.append([*numbers, f'${column["dollars"]:,.0f}'])
    assert shown == made
    p10, _, p90 = (f'${two_digits(amount)}' for amount in plan['totals']['dollars'])
    assert f'the whole bill is {p10} to {p90} (p10 to p90' in readme


def test_photos_and_drawn_images_need_no_dataset(tmp_path):
    """Ten photos are assumed where there are none on this machine; 110 images are 28 batches of 4."""
    streams = 'data.streams={train: null, a: {photos: {folder: /elsewhere}}, b: {drawn: {prompts: [a dog], num_images: 100}}}'
    more = 'batch.global_size=4', 'batch.micro_size=4', 'optimizer.warmup=0ba', 'ema.half_life=null', 'data.kind=latents', 'load_path=/base'
    plan, _ = planned(tmp_path, PHASES[0], streams, *more, 'train.duration=2ep', '--gpu', 'h200', '--gpus', '1')
    assert plan['recipes'][0]['steps'] == 2 * 28


@pytest.mark.parametrize('name', ['dreambooth-sdxl-lora', 'salad-timber'])
def test_the_median_job_of_the_post_is_within_what_is_assumed(tmp_path, name):
    """SaladCloud: 53.82 minutes on an RTX 4090 at $0.324 an hour; the mean job cost $0.3348."""
    plan, printed = planned(tmp_path, REPOSITORY / f'yamls/{name}.yaml', '--gpu', 'rtx-4090', '--gpus', '1')
    (training,) = (line for line in plan['bill'] if line['group'] == 'steps')
    low, middle, high = training['quantity']
    assert low < 53.82 / 60 < high
    assert low * 0.324 < 0.3348 < high * 0.324
    assert middle == pytest.approx(53.82 / 60, rel=0.25)
    assert 'an MFU of' in text_of(printed)
    assert plan['recipes'][0]['trains on'] == 5600


ENCODED = ['--gpu', 'a100-80gb', '--price', '5.12', '--throughput', '4068@32', '--gpus', '32']
ON_A10G = ['data.kind=images', 'data.encoders={ray: {actors: 20, resource: A10G}}']


def test_ways_to_encode_are_compared_where_there_is_something_to_encode(tmp_path):
    latents, printed = planned(tmp_path, PHASES[0], *ENCODED)
    assert re.search(
        r'steps with encoding, offline \$\S+, online \$\S+, in step \$\S+ sd2-base-256: offline is cheaper than online from', text_of(printed)
    )
    ways = ('in step', 'online', 'offline')
    assert [row['group'] for row in latents['rows'] if row['group'] in ways and row['what'] == 'steps'] == list(ways)
    assert [line['what'] for line in latents['bill'] if line['group'] == 'encoding'] == ['encode 256 px']
    assert 'steps with encoding' in run_here('diffusion.plan', PHASES[0], *ENCODED, 'data.kind=images').stdout
    assert 'steps with encoding' not in run_here('diffusion.plan', PHASES[0], *ENCODED, 'data.kind=synthetic').stdout


def test_too_few_encoders_slow_the_plan_down_and_are_in_its_bill(tmp_path):
    measured = [*ENCODED, *ON_A10G, '--assume', 'online.images_per_encoder_sec=100']
    plan, printed = planned(tmp_path, PHASES[0], *measured)
    (phase,) = plan['columns'][0]['phases']
    assert (phase['origin'], phase['throughput'], phase['encoders that keep up']) == ('limited', 2000, 45)
    assert phase['MFU'] == pytest.approx(2000 / 32 * 539.31e9 / 3.12e14, rel=1e-4)
    (line,) = [line for line in plan['bill'] if line['what'] == 'encoders, sd2-base-256']
    assert line['quantity'][1] == pytest.approx(20 * phase['hours'], rel=0.05)  # and what interrupts training
    assert line['price']['name'] == 'gpu_hour.a10g.on-demand'
    assert 'training would run at about 49 % of its speed (given); set data.encoders.ray.actors=45' in text_of(printed)
    assert '20 on a10g; 45 keep up with 4,100 images/s of training (predicted) at 100 images/s each (given: online.' in text_of(printed)
    enough, _ = planned(tmp_path, PHASES[0], *measured, 'data.encoders.ray.actors=45')
    assert enough['columns'][0]['phases'][0]['throughput'] == 4068
