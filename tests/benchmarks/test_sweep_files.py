"""A sweep file becomes checked points or a list of everything that is wrong; every shipped one does become points."""

import dataclasses
import json
import sys
from types import SimpleNamespace

import pytest
import yaml

from benchmarks.reporting.series import label_of
from benchmarks.sweeping import loading
from benchmarks.sweeping.launching import fill, missing_program, wrong_template
from benchmarks.sweeping.loading import load_sweep
from benchmarks.sweeping.measuring import rate, steady_from, windows_in
from benchmarks.sweeping.rows import averages, row_of
from benchmarks.sweeping.sweep import DECIDED, Method, Place, Sweep, as_overrides, ends_of_epochs, measuring, place_of, unknown_hardware
from diffusion.common import stopwatch
from diffusion.cost.results import Result
from diffusion.monitoring.throughput import Goodput
from diffusion.recipe import Duration, RecipeError, load_recipe, to_dict
from tests.conftest import REPOSITORY, read_json, run_python

SWEEPS = sorted((REPOSITORY / 'benchmarks/sweeps').glob('*.yaml'))
SHAPES = str(REPOSITORY / 'yamls/shapes.yaml')
SMALL = {'recipe': SHAPES, 'set': {'data.kind': 'synthetic', 'batch.global_size': 64, 'batch.micro_size': 8}, 'stand_in_encoders': True}


@pytest.fixture
def sweep_file(tmp_path):
    def write(**content):
        path = tmp_path / 'small.yaml'
        path.write_text(yaml.safe_dump({**SMALL, **content}, sort_keys=False))
        return path

    return write


def errors_of(path, overrides=()):
    with pytest.raises(RecipeError) as caught:
        load_sweep(path, overrides)
    return caught.value.errors


@pytest.mark.parametrize('path', SWEEPS, ids=lambda path: path.stem)
def test_every_point_of_a_shipped_sweep_is_a_sound_recipe(path, tmp_path):
    sweep, points = load_sweep(path)
    assert sweep.name == path.stem
    assert len(points) == {'quick-cpu': 4, 'h200-single': 14, 'a100-8-to-128': 10}[path.stem]
    assert len({point.identity(sweep, 'this') for point in points}) == len(points)
    for point in points:
        recipe, *overrides = point.command(sweep, tmp_path / 'run', encoders=tmp_path)
        measured = load_recipe(recipe, overrides, num_gpus=point.place.num_gpus)
        assert measured.run_folder == str(tmp_path / 'run')
        assert (measured.model, measured.train.compile, measured.batch) == (
            dataclasses.replace(point.recipe.model, encoders=measured.model.encoders), point.recipe.train.compile, point.recipe.batch,
        )  # fmt: skip
    sweep, points = load_sweep(path, ['optimizer.lr=3e-05', 'name=x', 'set.name=${seed}'])
    for point in points:  # as train.py would load it
        settings = {**sweep.set, 'load_path': None, 'model.encoders.source': '.', 'model.encoders.revision': None, **point.settings}
        lines = [f'{key}={json.dumps(value)}' for key, value in settings.items() if key not in vars(point.place)]
        assert point.recipe == load_recipe(path.parent / sweep.recipe, lines, point.place.num_gpus)
        assert (point.recipe.optimizer.lr, point.recipe.name) == (3e-5, '17')
        assert dataclasses.asdict(point.recipe) == to_dict(point.recipe)  # what its identity is made of


def test_the_scaling_sweep_keeps_the_batch_and_fills_nodes_of_eight():
    sweep, points = load_sweep(REPOSITORY / 'benchmarks/sweeps/a100-8-to-128.yaml')
    assert {point.recipe.batch.global_size for point in points} == {2048}
    assert [point.place for point in points[:5]] == [Place(8 * nodes, nodes, 8) for nodes in (1, 2, 4, 8, 16)]
    words = fill(sweep.launcher, vars(points[1].place), ['train.py', '/a b'])
    assert words[:4] == ['srun', '--nodes=2', '--ntasks=2', '--gpus-per-node=8']
    assert '--world_size 16' in words[-1]
    assert words[-1].endswith("train.py '/a b'")
    assert '$SLURM_PROCID' in words[-1]  # for the shell on the node


def test_points_times_grid_in_the_order_of_the_file(sweep_file):
    points = [{'data.resolution': 32}, {'data.resolution': 64, 'batch.micro_size': 4}]
    _, made = load_sweep(sweep_file(points=points, grid={'num_gpus': [1, 2], 'data.workers': [0, 1], 'train.compile': [None]}))
    assert [list(point.settings.values()) for point in made] == [
        [32, 1, 0, None], [32, 1, 1, None], [32, 2, 0, None], [32, 2, 1, None],
        [64, 4, 1, 0, None], [64, 4, 1, 1, None], [64, 4, 2, 0, None], [64, 4, 2, 1, None],
    ]  # fmt: skip
    assert [(point.recipe.data.resolution, point.recipe.batch.micro_size, point.place.num_gpus) for point in made[::2]] == [
        (32, 8, 1), (32, 8, 2), (64, 4, 1), (64, 4, 2),
    ]  # fmt: skip
    assert made[0].label == 'resolution=32, num_gpus=1, workers=0, compile=null'


@pytest.mark.parametrize(
    ('grid', 'name'),
    [({'train.checkpoint_activations': [True], 'ema.half_life': [None]}, 'checkpoint_activations=true, ema.half_life=null'), ({}, 'the recipe')],
)
def test_a_report_calls_a_point_what_the_sweep_calls_it(sweep_file, grid, name):
    sweep, (point,) = load_sweep(sweep_file(grid=grid))
    reported = Result(row_of(sweep, point, 'abc', {'status': 'crashed', 'reason': ''}, {}))
    assert label_of(reported) == point.label == name


def test_the_command_line_changes_the_sweep_or_every_recipe(sweep_file):
    sweep, points = load_sweep(sweep_file(grid={'num_gpus': [1, 2]}), ['time_limit_sec=7', 'optimizer.lr=0.5', 'train.sharding=zero2'])
    assert sweep.time_limit_sec == 7
    assert {(point.recipe.optimizer.lr, point.recipe.train.sharding) for point in points} == {(0.5, 'zero2')}


def test_the_command_line_replaces_adds_and_removes_axes(sweep_file):
    path = sweep_file(grid={'num_gpus': [1, 2], 'train.compile': [None]})

    def settings(*overrides):
        return [point.settings for point in load_sweep(path, overrides)[1]]

    assert settings('grid.num_gpus=[4]') == [{'num_gpus': 4, 'train.compile': None}]
    assert settings('grid={num_gpus: [8]}', 'grid.seed=[1,2]') == [
        {'num_gpus': 8, 'train.compile': None, 'seed': 1},
        {'num_gpus': 8, 'train.compile': None, 'seed': 2},
    ]
    assert settings('grid=null') == [{}]
    assert load_sweep(path)[0].set == SMALL['set']
    assert load_sweep(path, ['grid.num_gpus=[1]', 'set=null', 'data.kind=synthetic'])[0].set == {'data.kind': 'synthetic'}
    _, (point,) = load_sweep(path, ['grid=null', 'set.num_gpus=2', 'set.batch.micro_size=4', 'grid.optimizer.lr=[0.5]'])
    assert (point.place.num_gpus, point.recipe.batch.micro_size, point.recipe.optimizer.lr) == (2, 4, 0.5)


@pytest.mark.parametrize(
    ('override', 'wanted'),
    [
        ('num_gpus=4', 'num_gpus: the grid has the axis num_gpus, which overrules the command line; write grid.num_gpus=[4]'),
        (
            'set.ema.half_life=10ba',
            'ema.half_life: the grid has the axis ema.half_life, which overrules the command line; write grid.ema.half_life=[10ba]',
        ),
        ('data.streams.a.local=x', 'data.streams.a.local: the grid has the axis data.streams.a, which overrules the command line; '),
        ('seed=3', 'seed: 2 of 3 points overrule the command line; change them in the file [seed=1 and 1 more point]'),
        ('data.workers=3', 'data.workers: 1 of 3 points overrule the command line; change them in the file [seed=2, workers=0]'),
        ('train.duration=5ba', 'train.duration: the sweep decides it'),
        ('log.every=7', 'log.every: the sweep decides it'),
        ('model.encoders.revision=abc', 'model.encoders.revision: has no effect with stand_in_encoders'),
    ],
)
def test_an_override_without_effect_is_refused(sweep_file, override, wanted):
    grid = {'num_gpus': [1, 2], 'ema.half_life': [None, '40ba'], 'data.streams.a': [None]}
    path = sweep_file(grid=grid, points=[{'seed': 1}, {'seed': 2, 'data.workers': 0}, {'train.compile': None}])
    (error,) = errors_of(path, [override])
    assert error.startswith(wanted)


@pytest.mark.parametrize(
    ('override', 'wanted'),
    [
        ('time_limt_sec=60', "time_limt_sec: unknown key; did you mean 'time_limit_sec'?"),
        ('gird.num_gpus=[4]', "gird.num_gpus: unknown key; did you mean 'grid.num_gpus'?"),
        ('gird.foo=[4]', "gird.foo: unknown key; did you mean 'grid'?"),
        ('num_gpu=4', "num_gpu: unknown key; did you mean 'num_gpus'?"),
        ('gpu_per_node=4', "gpu_per_node: unknown key; did you mean 'gpus_per_node'?"),
        ('lr=4', "lr: unknown key; did you mean 'optimizer.lr'?"),
        ('data.streams.a.lcal=x', "data.streams.a.lcal: unknown key; did you mean '"),
        ('grid.num_gpu=[4]', "grid.num_gpu: unknown key; did you mean 'num_gpus'?"),
        ('grid.foo=[4]', 'grid.foo: unknown key; known are num_gpus, num_nodes, gpus_per_node and the keys of a recipe'),
        ('grid.windows=[4]', 'grid.windows: belongs to the sweep itself and is the same for all points; write it next to grid'),
        ('grid.num_gpus=4', 'grid.num_gpus: 4 is not a list of values; write [1, 2]'),
        ('grid=4', 'grid: 4 is not a mapping of keys to values'),
        ('points=[{train.compil: network}]', "points: train.compil: unknown key; did you mean 'train.compile'?"),
        ('num_gpus="8"', "num_gpus: '8' is not a whole number of at least 1"),
        ('num_gpus=true', 'num_gpus: True is not a whole number of at least 1'),
    ],
)
def test_what_an_unknown_override_may_have_meant(sweep_file, override, wanted):
    (error,) = errors_of(sweep_file(), [override])
    assert error.startswith(wanted)


def test_after_a_file_that_cannot_be_read_nothing_else_is_said(sweep_file, tmp_path):
    assert errors_of(tmp_path / 'none.yaml') == [f'{tmp_path}/none.yaml: no such file']
    (tmp_path / 'bad.yaml').write_text('recipe: x\n  a: [\n')
    (error,) = errors_of(tmp_path / 'bad.yaml')
    assert error.startswith(f'{tmp_path}/bad.yaml: cannot be read as YAML: ')
    assert errors_of(sweep_file(base='gone.yaml')) == [f'{tmp_path}/gone.yaml: no such file, on which {tmp_path}/small.yaml is based']
    assert errors_of(sweep_file(recipe='gone.yaml', grid={'num_gpus': [1, 2]})) == [f'recipe: {tmp_path}/gone.yaml: no such file']
    (error,) = errors_of(sweep_file(recipe='bad.yaml'))
    assert error.startswith(f'recipe: {tmp_path}/bad.yaml: cannot be read as YAML: ')


def test_an_error_in_the_recipe_is_not_passed_over(sweep_file, tmp_path):
    (tmp_path / 'recipe.yaml').write_text(f'base: {SHAPES}\ntrain: {{compil: null}}\n')
    (error,) = errors_of(sweep_file(recipe='recipe.yaml', grid={'num_gpus': [1, 2]}))
    assert error.startswith('train.compil: unknown key (')
    assert error.endswith('[at every point]')


def test_more_points_than_anyone_measures_are_refused(sweep_file, monkeypatch):
    grid = {'seed': list(range(300)), 'data.workers': [0, 1, 2, 3, 4, 5, 6]}
    assert errors_of(sweep_file(grid=grid)) == ['grid: 300 x 7 are 2,100 points, and a sweep has at most 2,000; leave out values, or split it']
    monkeypatch.setattr(loading, 'MAX_POINTS', 4)
    assert len(load_sweep(sweep_file(grid={'seed': [1, 2]}, points=[{'num_gpus': 1}, {'num_gpus': 2}]))[1]) == 4
    (error,) = errors_of(sweep_file(grid={'seed': [1, 2]}, points=[{'num_gpus': 1}, {'num_gpus': 2}, {'num_gpus': 4}]))
    assert error.startswith('grid: 3 x 2 are 6 points, and a sweep has at most 4; ')


@pytest.mark.parametrize('name', [None, 'cpu', 'a100-80gb', 'A100', 'NVIDIA H200', 'H100 PCIe', 'gh200', 'rtx-4090'])
def test_known_hardware(name):
    assert not unknown_hardware(Sweep(hardware=name))


def test_hardware_that_is_not_known_is_warned_of_and_no_error(sweep_file):
    sweep, _ = load_sweep(sweep_file(hardware='a1000'))
    (warning,) = unknown_hardware(sweep)
    assert warning.startswith("hardware: no GPU 'a1000' is known; did you mean 'a100'? ")
    (warning,) = unknown_hardware(Sweep(hardware='TPU v5'))
    assert 'did you mean' not in warning


def test_everything_wrong_is_said_at_once_with_its_point(sweep_file):
    path = sweep_file(grid={'num_gpus': [1, 3], 'train.precison': ['fp32', 'fp64'], 'train.sharding': ['ddp', 'fsdp']})
    errors = errors_of(path)
    assert errors[0] == "grid.train.precison: unknown key; did you mean 'train.precision'?"
    sharding = next(error for error in errors if error.startswith('train.sharding'))
    assert 'zero2' in sharding
    assert '[num_gpus=1, precison=fp32, sharding=fsdp and 3 more points]' in sharding
    batch = next(error for error in errors if error.startswith('batch.global_size: 64 is not divisible by 3 GPUs'))
    assert '[num_gpus=3, precison=fp32, sharding=ddp and 3 more points]' in batch


@pytest.mark.parametrize(
    ('content', 'wanted'),
    [
        ({'windws': 3}, "windws: unknown key ({path}); did you mean 'windows'?"),
        ({'gird': {'num_gpus': [1]}}, "gird: unknown key ({path}); did you mean 'grid'?"),
        ({'num_gpu': 4}, "num_gpu: unknown key ({path}); did you mean 'set.num_gpus'?"),
        ({'batch': {'micro_size': 4}}, "batch: unknown key ({path}); did you mean 'set.batch.micro_size'?"),
        ({'5': 4}, '5: unknown key ({path})'),
        ({'windows': 'four'}, 'windows: '),
        ({'windows': 1}, 'windows: 1 is not a whole number from 2 to 1000'),
        ({'steady_within': 5}, 'steady_within: 5 is not a number from 0 to 1'),
        ({'warmup_steps': 11, 'steps_per_window': 10, 'windows': 3, 'max_steps': 49}, 'set max_steps=50 or more'),
        ({'launcher': 'srun {comand}'}, "launcher: '{comand}' cannot be filled in"),
        ({'launcher': 'srun train.py'}, 'put {command} there'),
        ({'launcher': "bash -c '{command}"}, 'cannot be split into words'),
        ({'grid': {'num_gpus': 2}}, 'grid.num_gpus: 2 is not a list of values'),
        ({'grid': {'num_gpus': []}}, 'grid.num_gpus: [] is not a list of values'),
        ({'points': [3]}, 'points: 3 is not a mapping'),
        ({'grid': {'num_gpus': [1]}, 'points': [{'num_gpus': 2}]}, 'num_gpus: is an axis of the grid and named in points'),
        ({'grid': {'num_gpus': [2, 2]}}, 'the point num_gpus=2 is there twice'),
        ({'grid': {'num_gpus': [12], 'gpus_per_node': [8]}}, 'num_gpus: 12 is not 1 node x 8 GPUs (num_nodes, gpus_per_node); nearest: 8'),
        ({'grid': {'num_gpus': [0]}}, 'num_gpus: 0 is not a whole number of at least 1'),
        ({'set': {'log.project': 'mine'}}, 'log.project: the sweep decides it'),
        ({'grid': {'train.duration': ['5ba']}}, 'train.duration: the sweep decides it'),
        ({'set': {'model.encoders.source': 'here'}}, 'model.encoders.source: has no effect with stand_in_encoders'),
        ({'recipe': 'none.yaml'}, 'none.yaml: no such file'),
        ({'name': 'a/b'}, "name: 'a/b' names a folder"),
    ],
)
def test_what_is_wrong_is_named_with_its_remedy(sweep_file, content, wanted):
    path = sweep_file(**content)
    assert any(wanted.replace('{path}', str(path)) in error for error in errors_of(path))


def test_an_epoch_that_ends_while_a_rate_is_measured_is_warned_of(sweep_file, images, tmp_path):
    num_images = read_json(images / 'manifest.json')['num_samples']
    real = {'data.kind': 'images', 'data.resolution': 32, 'batch.micro_size': 1}

    def warnings_for(folder, max_steps, global_size=4):
        path = sweep_file(set={**real, 'data.streams.shapes.local': str(folder), 'batch.global_size': global_size}, grid={'seed': [1, 2]})
        sweep, points = load_sweep(path, ['warmup_steps=1', 'windows=2', 'steps_per_window=1', f'max_steps={max_steps}'])
        return ends_of_epochs(points, sweep.max_steps)

    assert num_images >= 12
    assert not warnings_for(images, num_images // 4)
    seed_1, seed_2 = warnings_for(images, num_images // 4 + 1)
    assert seed_1.startswith(f'seed=1: {num_images} samples are epochs of {num_images // 4} steps and max_steps is {num_images // 4 + 1}')
    assert seed_2.startswith('seed=2: ')
    assert f'take {4 * (num_images // 4 + 1)} samples or more' in seed_2
    assert not warnings_for(images, num_images // 4 + 1, global_size=2)
    assert not warnings_for(tmp_path / 'nowhere', 10**6)  # not known; without the data the point is refused
    (tmp_path / 'manifest.json').write_text('broken')
    assert not warnings_for(tmp_path, 10**6)


def test_a_sweep_without_a_recipe_and_a_wrong_command_exit_with_2(tmp_path, sweep_file):
    (tmp_path / 'none.yaml').write_text('windows: 3\n')
    wrong = run_python('-m', 'benchmarks.throughput', tmp_path / 'none.yaml', code=2)
    assert 'recipe: missing; name the recipe that is varied' in wrong.stderr
    path = sweep_file(launcher='no-such-launcher {command}', hardware='here')
    assert "there is no program 'no-such-launcher'" in run_python('-m', 'benchmarks.throughput', path, '--out', tmp_path / 'r.jsonl', code=2).stderr
    assert not (tmp_path / 'r.jsonl').read_text()
    assert 'name another file with --out' in run_python('-m', 'benchmarks.throughput', path, '--out', '/proc/none/r.jsonl', code=2).stderr


def test_nothing_outlives_or_interrupts_a_measured_run(overrides):
    method = Method(steps_per_window=7, max_steps=100)
    path, own = REPOSITORY / 'yamls/sd2-base-256.yaml', [
        *overrides, 'eval.every=2ba', 'eval.streams.v.local=x', 'log.to=[wandb]', 'log.project=mine', 'log.samples.every=1ba', 'load_path=old',
        'train.duration=50ba', 'checkpoint.folder=s3://mine/x', 'checkpoint.keep_every=10ba',
    ]  # fmt: skip
    recipe = load_recipe(path, own)
    before, after = to_dict(recipe), to_dict(load_recipe(path, [*own, *as_overrides(measuring(recipe, method))]))
    assert after['eval']['every'] is after['log']['project'] is after['log']['samples']['every'] is after['load_path'] is None
    assert after['log']['to'] == []
    assert after['eval']['streams'] == {'v': None}
    assert after['log']['every'] == 7
    assert (after['checkpoint']['folder'], after['checkpoint']['keep_every']) == (f'{recipe.run_folder}/checkpoints', None)
    assert after['data']['synthetic_samples'] > 100 * after['batch']['global_size']  # no epoch ends
    sections, keys = [key for key in DECIDED if '.' not in key], [key.split('.') for key in DECIDED if '.' in key]
    for part in (before, after):
        for section in sections:
            del part[section]
        for section, key in keys:
            del part[section][key]
    assert after == before


def test_an_identity_is_of_what_would_be_measured(sweep_file, tmp_path):
    def identity(hardware='A100', overrides=(), **content):
        sweep, points = load_sweep(sweep_file(**{'grid': {'num_gpus': [2]}, **content}), overrides)
        return points[0].identity(sweep, hardware)

    same = identity()
    assert same == identity() == identity(time_limit_sec=3, launcher='python {command}')
    others = [
        identity(hardware='H100'),
        identity(grid={'num_gpus': [4]}),
        identity(grid={'num_gpus': [2], 'num_nodes': [2]}),
        identity(overrides=['optimizer.lr=0.5']),
        identity(windows=5),
        identity(interconnect='8 x HDR'),
        identity(interconnect='1 x HDR'),
    ]
    assert len({same, *others}) == 1 + len(others)


@pytest.mark.parametrize(
    ('settings', 'place'),
    [
        ({}, (1, 1, 1)),
        ({'num_gpus': 4}, (4, 1, 4)),
        ({'num_gpus': 4, 'gpus_per_node': 8}, (4, 1, 4)),
        ({'num_gpus': 16, 'gpus_per_node': 8}, (16, 2, 8)),
        ({'num_gpus': 16, 'num_nodes': 4}, (16, 4, 4)),
        ({'num_nodes': 2, 'gpus_per_node': 8}, (16, 2, 8)),
        ({'gpus_per_node': 8}, (8, 1, 8)),
    ],
)
def test_places(settings, place):
    assert place_of(settings) == Place(*place)


def test_templates():
    assert wrong_template('composer -n {gpus_per_node} {command}') == []
    assert wrong_template('bash -c "${HOME}/run {command}"') == []
    places = {'num_gpus': 2, 'num_nodes': 1, 'gpus_per_node': 2}
    assert fill('env A={num_gpus} python {command}', places, ['-m', 'x', 'a b']) == ['env', 'A=2', 'python', '-m', 'x', 'a b']


def test_this_very_python_starts_the_processes_wherever_composer_was_installed(monkeypatch):
    places = {'num_gpus': 2, 'num_nodes': 1, 'gpus_per_node': 2}
    monkeypatch.setattr(sys, 'executable', '/my env/python3.12')
    assert fill(Sweep.launcher, places, ['-m', 'x']) == ['/my env/python3.12', '-m', 'composer.cli', '-n', '2', '-m', 'x']
    assert fill("bash -c 'exec {python} {command}'", places, ['-m', 'a b'])[-1] == "exec '/my env/python3.12' -m 'a b'"
    assert missing_program(Sweep.launcher) == '/my env/python3.12'
    monkeypatch.undo()
    assert missing_program(Sweep.launcher) is None


@pytest.mark.parametrize(
    ('rates', 'first'),
    [
        ([100, 100, 100, 100], 0),
        ([10, 100, 100, 100, 100], 1),  # compilation
        ([50, 80, 96, 100, 101, 99], 2),  # approached
        ([100, 104.9, 100], 0),
        ([100, 105.1, 100], None),
        ([100, 100, 90], None),  # has just slowed down
        ([100, 100, 90, 90, 90], 2),  # and stayed slow
        ([100, 106, 112, 119, 126], None),  # drifts on
        ([100, 103, 106.1, 109.3, 112.6, 115.9], 2),  # a drift within the tolerance passes
        ([100, 100], None),  # too few
        ([], None),
    ],
)
def test_steadiness_of_constructed_series(rates, first):
    assert steady_from(rates, least=3, within=0.05) == first


def rate_of(folder, step_sec, method, wait=0.25):
    """Steps that take what `step_sec` says, on a clock of our own, until their rate is taken."""
    clock = stopwatch.time = SimpleNamespace(monotonic=lambda: clock.now, time=lambda: clock.now, now=50.0)
    watch = stopwatch.Stopwatch(folder / stopwatch.EVENTS, num_gpus=1)
    phases = Goodput(SimpleNamespace(log=SimpleNamespace(every=method.steps_per_window)), watch)
    for number, sec in enumerate(step_sec, start=1):
        phases.before_dataloader(None, None)
        clock.now += wait * sec
        phases.after_dataloader(None, None)
        clock.now += (1 - wait) * sec
        phases.batch_end(SimpleNamespace(timestamp=SimpleNamespace(batch=SimpleNamespace(value=number))), None)
        row = rate(windows_in(folder), method, global_size=10)
        if row:
            return number, row
    raise AssertionError('it took no end')


@pytest.fixture
def own_clock(monkeypatch):
    monkeypatch.setattr(stopwatch, 'time', None)  # given back in the end


@pytest.mark.usefixtures('own_clock')
def test_windows_after_the_warm_up_by_count_and_by_steadiness(tmp_path):
    method = Method(warmup_steps=5, windows=3, steps_per_window=4, steady_within=0.05, max_steps=100)
    # Warm-up: 5 steps, hence 8 in whole windows; one more window is slow; then 1, 1 and 1.04 s a step.
    steps = [9] * 8 + [2] * 4 + [1] * 8 + [1.04] * 4 + [1] * 100
    ended, row = rate_of(tmp_path, steps, method)
    assert ended == 24
    assert (row['status'], row['reason']) == ('measured', None)
    assert (row['warmup_steps'], row['measured_steps']) == (12, 12)
    assert row['measured_sec'] == pytest.approx(12.16)
    assert row['images_per_sec'] == pytest.approx(120 / 12.16)
    assert row['images_per_sec'] * row['measured_sec'] == pytest.approx(row['measured_steps'] * 10, rel=1e-12)
    assert row['windows_images_per_sec'] == pytest.approx([10, 10, 10 / 1.04])
    assert row['images_per_sec_spread'] == pytest.approx((10 - (10 + 10 / 1.04) / 2) / 10)  # quartiles of three numbers
    assert row['step_sec'] == pytest.approx(12.16 / 12)
    assert row['data_wait_share'] == pytest.approx(0.25)


@pytest.mark.usefixtures('own_clock')
def test_what_never_settles_ends_and_keeps_its_numbers(tmp_path):
    method = Method(warmup_steps=1, windows=2, steps_per_window=2, steady_within=0.05, max_steps=11)
    ended, row = rate_of(tmp_path, [1, 1] + [1, 1, 2, 2] * 5, method)
    assert ended == 10  # the last whole window
    assert row['status'] == 'unsteady'
    assert 'up to step 11' in row['reason']
    assert (row['warmup_steps'], row['measured_steps'], row['measured_sec']) == (6, 4, pytest.approx(6))


@pytest.mark.parametrize(
    ('half_life', 'start', 'interval', 'updated'),
    [
        (None, '0ba', '1ba', False),
        ('40ba', '0ba', '1ba', True),
        ('40ba', '29ba', '1ba', True),
        ('40ba', '30ba', '1ba', False),  # step 30 copies; nothing is measured after it
        ('40ba', '0ba', '100ba', False),
        ('40ba', '0ba', '25ba', True),
        ('40ba', '500000ba', '1ba', False),
    ],
)
def test_an_average_counts_if_it_is_updated_in_the_measured_steps(recipe, half_life, start, interval, updated):
    recipe.ema.half_life, recipe.ema.start, recipe.ema.interval = half_life and Duration(half_life), Duration(start), Duration(interval)
    assert averages(recipe, warmup_steps=20, measured_steps=10) is updated
