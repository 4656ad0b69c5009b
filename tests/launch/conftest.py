"""Lists of jobs as the files of launch/ take them, and a `python` that runs `fleet run` with stand-ins for training."""

import json
import os
import shlex
import sys
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import REPOSITORY, read_json
from tests.fleet.conftest import described
from tests.launch.loopback_slurm import LoopbackSlurm

WRAPPER = Path(__file__).with_name('fleet_with_stand_ins.py')


@dataclass
class JobList:
    """Jobs in `folder/jobs`, results in `folder/results`.

    Attributes:
        environment: in which `python` and `python -m fleet run` find the stand-ins.
    """

    folder: Path
    archive: Path
    environment: dict[str, str]

    def add(self, name: str, *starts: dict[str, Any], **keys: Any) -> Path:
        """Write a job; `starts` are options of tests/fleet/trainer.py, of its first start, its second, ..."""
        (self.folder / 'stand-ins' / f'{name}.json').write_text(json.dumps(starts or [{}]))
        path = self.folder / 'jobs' / f'{name}.yaml'
        path.write_text(yaml.safe_dump({'recipe': 'dreambooth-sd2-lora.yaml', 'inputs': {'subject': described(self.archive)}, **keys}))
        return path

    @property
    def results(self) -> Path:
        return self.folder / 'results'

    def starts(self, name: str) -> list[int]:
        """Process ids of the starts so far."""
        path = self.folder / 'stand-ins' / f'{name}.starts'
        return [int(line) for line in path.read_text().splitlines()] if path.exists() else []

    def latest(self, name: str) -> dict[str, Any]:
        """Return the record of the job's attempts, with the step of its checkpoint."""
        path = self.results / name / 'latest.json'
        record = read_json(path) if path.exists() else {'epoch': 0, 'checkpoint': None, 'result': None}
        return {**record, 'step': record['checkpoint'] and record['checkpoint']['step']}

    def is_done(self, name: str) -> bool:
        return self.latest(name)['result'] is not None


@pytest.fixture
def job_list(tmp_path: Path) -> JobList:
    for name in ('jobs', 'stand-ins', 'bin', 'subject'):
        (tmp_path / name).mkdir()
    (tmp_path / 'launch').symlink_to(REPOSITORY / 'launch')  # as in a checkout
    (tmp_path / 'subject/0.png').write_bytes(b'0' * 50)
    with tarfile.open(tmp_path / 'subject.tar', 'w') as tar:
        tar.add(tmp_path / 'subject', arcname='subject')
    write_program(tmp_path / 'bin/python', f'exec {shlex.join([sys.executable, str(WRAPPER)])} "$@"')
    write_program(tmp_path / 'bin/composer', 'exit 1')  # scripts ask whether there is one
    environment = {
        **os.environ,
        'PATH': f'{tmp_path}/bin:{os.environ["PATH"]}',
        'PYTHONPATH': str(REPOSITORY),
        'FLEET_STAND_INS': str(tmp_path / 'stand-ins'),
    }
    return JobList(tmp_path, tmp_path / 'subject.tar', environment)


def write_program(path: Path, script: str) -> None:
    path.write_text(f'#!/bin/bash\n{script}\n')
    path.chmod(0o755)


@pytest.fixture
def program(tmp_path: Path) -> Callable[[str, str], None]:
    """Put a shell script in front of the PATH of `job_list`."""
    return lambda name, script: write_program(tmp_path / 'bin' / name, script)


@pytest.fixture
def scheduler(tmp_path: Path) -> dict[str, str]:
    """An environment for scripts of launch/slurm in `tmp_path`, whose `bin` is in front of the PATH: `scontrol` there writes its arguments into `calls`
    and knows two nodes, and `sleep` does nothing.
    """
    (tmp_path / 'launch').symlink_to(REPOSITORY / 'launch')
    (tmp_path / 'bin').mkdir()
    write_program(tmp_path / 'bin/scontrol', f'[ "$1" = show ] && printf "node7\\nnode8\\n" || echo "$@" >> {tmp_path}/calls')
    write_program(tmp_path / 'bin/sleep', 'exit 0')
    write_program(tmp_path / 'bin/composer', 'exit 1')
    return {**os.environ, 'PATH': f'{tmp_path}/bin:{os.environ["PATH"]}', 'SLURM_JOB_ID': '123456'}


@pytest.fixture
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoopbackSlurm]:
    slurm = LoopbackSlurm(tmp_path_factory.mktemp('slurm'))
    yield slurm
    slurm.stop()
