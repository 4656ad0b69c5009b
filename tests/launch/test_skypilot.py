"""The files of launch/skypilot have the keys that SkyPilot has, and what they run does the job of a rank."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from diffusion.contracts.exit_codes import BAD_RECIPE, PREEMPTED, STALLED
from tests.conftest import REPOSITORY
from tests.launch.test_ray import changed

FOLDER = REPOSITORY / 'launch/skypilot'


def task_of(name: str) -> dict[str, Any]:
    return yaml.safe_load((FOLDER / name).read_text())


def validate(task: dict[str, Any]) -> None:
    schema = yaml.safe_load(Path(__file__).with_name('skypilot.schema.yaml').read_text())
    jsonschema.validate(task, schema, cls=jsonschema.Draft202012Validator)


@pytest.mark.parametrize('name', ['fleet.yaml', 'fleet-pool.yaml'])
def test_its_keys_are_those_of_skypilot(name):
    validate(task_of(name))


@pytest.mark.parametrize(
    ('path', 'value', 'rename'),
    [
        (('file_mounts',), None, 'file_mount'),
        (('resources', 'use_spot'), 'yes', None),
        (('resources', 'job_recovery', 'recover_on_exit_codes'), None, 'recover_on_exit_code'),
        (('resources', 'job_recovery', 'recover_on_exit_codes'), [75, 256], None),
        (('resources', 'job_recovery', 'strategy'), 'NEXT_REGION', None),
        (('envs', 'OUTPUTS'), 3, None),
    ],
)
def test_what_is_misspelt_is_refused(path, value, rename):
    with pytest.raises(jsonschema.ValidationError):
        validate(changed(task_of('fleet.yaml'), path, value, rename))


def test_what_is_run_again():
    recovery = task_of('fleet.yaml')['resources']['job_recovery']
    assert recovery['recover_on_exit_codes'] == [PREEMPTED, STALLED]  # without a limit
    assert 0 < recovery['max_restarts_on_errors'] <= 3  # a wrong job is started as often, too


def test_no_value_of_a_secret_is_in_the_file_and_results_have_no_default():
    task = task_of('fleet.yaml')
    assert set(task['secrets'].values()) == {None}
    assert task['envs'] == {'OUTPUTS': None}


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
        script = task_of('fleet.yaml')['run'].replace('/opt/recipes', str(REPOSITORY))
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
