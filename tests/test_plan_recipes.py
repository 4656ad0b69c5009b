"""Plans of shipped recipes and of own data, against published runs and what the documents say."""

import re
from pathlib import Path

import numpy as np
import pytest

from diffusion.cost.facts import DRAWN_TOGETHER
from diffusion.cost.formulas import two_digits
from diffusion.cost.text import plan_text
from diffusion.evaluation.job.results import DEFAULT_CHUNK
from diffusion.plan import PlanRequest, make_plan
from diffusion.recipe.reading import read_yaml
from tests.conftest import NUM_IMAGES, REPOSITORY, RESOLUTION, run_here
from tests.cost.planning import PHASES, planned, refused, text_of, without_runs  # noqa: F401


def test_less_than_a_cent_is_one_row(tmp_path):
    """The demo's 600 batches take microseconds of an H100: no row of $0.0000010."""
    found, printed = planned(tmp_path, 'yamls/shapes.yaml', '--gpu', 'h100')
    small = [line for line in found['bill'] if 0 < line['dollars'][-1] < 0.01]
    assert len(small) >= 4
    assert f'| {len(small)} lines below a cent' in printed.stdout
    assert not [
        line for line in printed.stdout.splitlines() if re.search(r'\$0\.00[0-9]', line) and line.startswith('|') and '1,000 requests' not in line
    ]


def test_scores_of_drawn_images_have_their_line(tmp_path):
    """Counts by hand: 12 scores of 512 images, 64 of them by each of 8 GPUs; 25 steps of two passes, each a third of what a sample takes in training."""
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


RECIPES = sorted((REPOSITORY / 'yamls').glob('*.yaml'))


@pytest.mark.parametrize('recipe', RECIPES, ids=lambda path: path.stem)
def test_every_shipped_recipe_can_be_planned(recipe):
    """The recipe alone tells: a GPU that runs small jobs, and one that runs large ones."""
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
