"""docs/clusters.md: its commands without a scheduler run, with a stand-in for the launcher; its numbers are those of the files."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from diffusion.contracts.errors import BAD_DATA, BAD_RECIPE, CRASH, NON_FINITE, PREEMPTED, STALLED, SUPERSEDED
from diffusion.recipe import load_recipe
from tests.conftest import REPOSITORY
from tests.launch.conftest import write_program
from tests.launch.test_kubernetes import documents, workloads
from tests.launch.test_skypilot import task_of
from tests.pages import commands

PAGE = (REPOSITORY / 'docs/clusters.md').read_text()
LOOP, SEVERAL = ('\n'.join(lines) for lines in commands('docs/clusters.md'))  # the only ones that need no cluster


def run(script: str, folder: Path, codes: list[int]) -> list[list[str]]:
    """Run a block with a launcher that ends with these codes in turn, the last one for ever; return what each start of it was given."""
    (folder / 'codes').write_text('\n'.join(map(str, codes)))
    write_program(
        folder / 'composer',
        f'cd {folder}; printf "%s\\n" "$NODE_RANK $LOCAL_WORLD_SIZE $WORLD_SIZE $MASTER_ADDR $MASTER_PORT $*" >> starts\n'
        'line=$(wc -l < starts); exit "$(sed -n "${line}p;\\$p" codes | head -n 1)"',
    )
    write_program(folder / 'sleep', 'exit 0')
    subprocess.run(['bash', '-c', script], env={'PATH': f'{folder}:{os.environ["PATH"]}'}, timeout=200, check=False)
    return [line.split() for line in (folder / 'starts').read_text().splitlines()]


@pytest.mark.parametrize('code', [0, BAD_RECIPE, BAD_DATA, CRASH, SUPERSEDED, PREEMPTED, NON_FINITE])
def test_the_loop_ends_where_nothing_is_to_be_run_again(tmp_path, code):
    assert len(run(LOOP, tmp_path, [STALLED, 247, code])) == 3


def test_the_loop_has_a_limit(tmp_path):
    starts = run(LOOP, tmp_path, [STALLED])
    assert len(starts) == 20
    script, recipe, *overrides = starts[0]
    assert script == 'train.py'
    load_recipe(REPOSITORY / recipe, overrides, 8)


def test_several_machines_have_what_the_launcher_needs(tmp_path):
    ((rank, local, world, address, port, script, recipe, *overrides),) = run(SEVERAL, tmp_path, [0])
    assert (rank, local, world, address, port, script) == ('0', '8', '16', '10.0.0.1', '29500', 'train.py')
    assert load_recipe(REPOSITORY / recipe, overrides, 16).checkpoint.folder.startswith('s3://')


def test_limits_are_those_of_the_files():
    job, jobset = documents('train-job.yaml')[0]['spec'], documents('train-jobset.yaml')[0]
    errors = task_of('train.yaml')['resources']['job_recovery']['max_restarts_on_errors']
    rows = dict(re.findall(r'^\| (64, 65, 73, 77|70 crash) \| [^|]* \| [^|]* \| (.*) \|$', PAGE, re.MULTILINE))
    assert f'{errors} more times' in rows['64, 65, 73, 77']
    assert rows['70 crash'] == (
        f'at most {job["backoffLimit"]} more times, with several machines {jobset["spec"]["failurePolicy"]["maxRestarts"]} | at most {errors} more times'
    )
    for workload in (documents('train-job.yaml')[0], *workloads(jobset)):
        grace = workload['spec']['template']['spec']['terminationGracePeriodSeconds']
        assert f'`terminationGracePeriodSeconds` ({grace})' in PAGE
        assert f'SIGUSR1 to the ranks, {grace} s' in PAGE


def test_training_reads_where_encoding_has_written():
    """A single resolution makes no stream of its own in the dataset."""
    for path in (REPOSITORY / 'docs/clusters.md', *(REPOSITORY / 'launch').glob('*/*.*')):
        assert {*re.findall(r's3://bucket/(latents[\w/-]*)', path.read_text(), re.IGNORECASE)} <= {'latents-256'}, path
