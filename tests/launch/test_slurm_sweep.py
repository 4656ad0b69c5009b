"""The throughput sweep over one and two nodes, with the template of the shipped sweep, on a real Slurm on loopback."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.conftest import REPOSITORY
from tests.launch.loopback_slurm import LoopbackSlurm, needs_slurm, processes_with, wait_until

SHIPPED = yaml.safe_load((REPOSITORY / 'benchmarks/sweeps/a100-8-to-128.yaml').read_text())
FIRST_NODE = '$(scontrol show hostnames $SLURM_STEP_NODELIST | head -n 1)'  # n1 and n2 are names of this Slurm alone

pytestmark = [pytest.mark.long, needs_slurm, pytest.mark.timeout(900)]


@pytest.fixture
def sweep(slurm: LoopbackSlurm, tmp_path: Path) -> Path:
    """One and two nodes with a process each, over gloo; all else as in benchmarks/sweeps/quick-cpu.yaml."""
    assert FIRST_NODE in SHIPPED['launcher']
    content = yaml.safe_load((REPOSITORY / 'benchmarks/sweeps/quick-cpu.yaml').read_text())
    content |= {
        'recipe': str(REPOSITORY / 'yamls/shapes.yaml'),
        'set': {**content['set'], 'gpus_per_node': 1},
        'grid': {'num_gpus': [1, 2]},
        'launcher': SHIPPED['launcher'].replace(FIRST_NODE, '127.0.0.1'),
        'attempts': SHIPPED['attempts'],
        'interconnect': 'loopback',
        'steady_within': 1.0,  # three processes share two cores
        'steps_per_window': 10,
        'time_limit_sec': 300,
    }
    path = tmp_path / 'two-nodes.yaml'
    path.write_text(yaml.safe_dump(content))
    (tmp_path / 'launch').symlink_to(REPOSITORY / 'launch')
    slurm.environment |= {'CUDA_VISIBLE_DEVICES': '', 'SLURM_OVERCOMMIT': '1'}
    return path


def rows_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def check_rows(rows: list[dict]) -> None:
    assert [(row['num_gpus'], row['num_nodes'], row['status']) for row in rows[-2:]] == [(1, 1, 'measured'), (2, 2, 'measured')], rows
    assert all(row['images_per_sec'] > 0 for row in rows[-2:])


def test_inside_one_allocation(slurm, sweep, tmp_path):
    """And its node is lost during the second point: Slurm starts the job again, which keeps the first row and measures the second."""
    rows = tmp_path / 'rows.jsonl'
    job = slurm.run(
        'sbatch',
        '--parsable',
        '--nodes=2',
        '--gpus-per-node=1',
        str(REPOSITORY / 'launch/slurm/sweep.sbatch'),
        str(sweep),
        '--out',
        str(rows),
        cwd=tmp_path,
    ).strip()
    wait_until(lambda: len(rows_of(rows)) == 1, 240, 'a row')
    first = rows_of(rows)[0]
    wait_until(lambda: processes_with(RANK='1', SLURM_JOB_ID=job), 240, 'the second node at work')
    slurm.lose('n2')
    wait_until(lambda: slurm.job(job)['Restarts'] == '1', 240, 'another start')
    slurm.bring_up('n2')
    wait_until(lambda: slurm.job(job)['JobState'] == 'COMPLETED', 400, 'the end')
    check_rows(rows_of(rows))
    assert rows_of(rows)[0] == first
    check_report(rows, tmp_path / 'report')


def test_a_job_a_point(slurm, sweep, tmp_path):
    """Started outside of any allocation; a node is lost during the second point, which is measured again when it is back."""
    rows = tmp_path / 'rows.jsonl'
    process = subprocess.Popen(
        [sys.executable, '-m', 'benchmarks.throughput', str(sweep), '--out', str(rows)],
        cwd=REPOSITORY,
        env=slurm.environment,
        text=True,
        stderr=subprocess.PIPE,
    )
    wait_until(lambda: len(rows_of(rows)) == 1, 240, 'a row')
    wait_until(lambda: processes_with(RANK='1'), 240, 'the second node at work')
    slurm.lose('n2')
    wait_until(lambda: 'down' in slurm.run('sinfo', '--noheader', '--format=%T'), 120, 'the loss noticed')
    slurm.bring_up('n2')
    printed = process.communicate(timeout=400)[1]
    assert process.returncode == 0, printed
    check_rows(rows_of(rows))
    assert 'once more' in printed


def check_report(rows: Path, folder: Path) -> None:
    """What a billion samples take on both nodes, at $2 an hour of a process."""
    arguments = ['-m', 'benchmarks.report', rows, '--out', folder, '--samples', '1e9', '--price', 'gpu_hour.cpu.on-demand=2']
    subprocess.run([sys.executable, *map(str, arguments)], cwd=REPOSITORY, check=True)
    days = 1e9 / rows_of(rows)[-1]['images_per_sec'] / 86400
    (line,) = re.findall(r'^\| measured +\| +2 \|.*', (folder / 'report.md').read_text(), re.MULTILINE)
    *_, printed_days, printed_hours, dollars, _ = line.replace(',', '').split('|')
    assert float(printed_days) == pytest.approx(days, rel=1e-3)
    assert float(printed_hours) == pytest.approx(2 * 24 * days, rel=1e-3)
    assert float(dollars.replace('$', '')) == pytest.approx(2 * 2 * 24 * days, rel=1e-3)
    assert 'loopback' in (folder / 'report.html').read_text()
