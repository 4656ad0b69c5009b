"""A Slurm of two nodes on this machine, for the tests of launch/slurm; needs root, and Debian's slurmctld, slurmd, slurm-client and munge."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.conftest import REPOSITORY

NODES = ('n1', 'n2')
DAEMONS = ('munged', 'slurmctld', 'slurmd')
needs_slurm = pytest.mark.skipif(
    os.geteuid() != 0 or not all(map(shutil.which, DAEMONS)), reason='needs root, and the Debian packages slurmctld, slurmd, slurm-client and munge'
)


def wait_until(condition: Callable[[], object], timeout_sec: float = 120, what: str = '') -> None:
    deadline = time.monotonic() + timeout_sec
    while not condition():
        assert time.monotonic() < deadline, f'it never came: {what}'
        time.sleep(0.1)


class LoopbackSlurm:
    """A controller and two nodes with two GPUs each, which are empty files.

    Args:
        folder: of its files.

    Attributes:
        environment: of its commands and jobs, in which `python` and `composer` are those of these tests.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.environment = {
            **os.environ,
            'PATH': f'{Path(sys.executable).parent}:{os.environ["PATH"]}',
            'PYTHONPATH': str(REPOSITORY),
            'OMP_NUM_THREADS': '1',
            'SLURM_CONF': str(folder / 'slurm.conf'),
        }
        (folder / 'gpus').mkdir()
        for name in ('gpu0', 'gpu1'):
            (folder / 'gpus' / name).touch()
        (folder / 'munge.key').write_bytes(os.urandom(1024))
        (folder / 'munge.key').chmod(0o400)
        (folder / 'slurm.conf').write_text(self._configuration())
        (folder / 'gres.conf').write_text(f'NodeName=n[1-2] Name=gpu File={folder}/gpus/gpu[0-1]\n')
        files = {'key-file': 'munge.key', 'socket': 'munge.socket', 'pid-file': 'munged.pid', 'log-file': 'munged.log', 'seed-file': 'munge.seed'}
        self._start('munged', '--force', *(f'--{option}={folder}/{name}' for option, name in files.items()))
        self._start('slurmctld', '-c', '-f', f'{folder}/slurm.conf')
        for node in NODES:
            self.bring_up(node)
        wait_until(lambda: self.run('sinfo', '--noheader', '--format=%T %D').strip() == 'idle 2', 60, 'idle nodes')

    def bring_up(self, node: str) -> None:
        self._start('slurmd', '-N', node, '-f', f'{self.folder}/slurm.conf')

    def lose(self, node: str) -> None:
        """As if its power failed: its daemon and all that it has started are gone at once, and nobody is told."""
        daemon = int((self.folder / f'slurmd.{node}.pid').read_text())
        lost = [psutil.Process(daemon)]
        for process in processes_with(SLURMD_NODENAME=node):
            lost += [process, *(parent for parent in process.parents() if parent.name().startswith('slurmstepd'))]
        for process in lost:
            with suppress(psutil.NoSuchProcess):
                process.kill()

    def _configuration(self) -> str:
        host, ports = socket.gethostname(), free_ports(3)
        return '\n'.join([
            'ClusterName=loopback', f'SlurmctldHost={host}(127.0.0.1)', 'SlurmUser=root', 'SlurmdUser=root',
            # How long a requeued job waits follows from the life of a credential, 120 s by default.
            'AuthType=auth/munge', f'AuthInfo=socket={self.folder}/munge.socket,cred_expire=5',
            f'StateSaveLocation={self.folder}/state', f'SlurmdSpoolDir={self.folder}/spool.%n',
            f'SlurmctldPidFile={self.folder}/slurmctld.pid', f'SlurmdPidFile={self.folder}/slurmd.%n.pid',
            f'SlurmctldLogFile={self.folder}/slurmctld.log', f'SlurmdLogFile={self.folder}/slurmd.%n.log',
            'ProctrackType=proctrack/linuxproc', 'TaskPlugin=task/none', 'SelectType=select/cons_tres', 'SelectTypeParameters=CR_Core',
            'SchedulerType=sched/backfill', 'SchedulerParameters=bf_interval=1,sched_interval=2', 'SlurmdTimeout=30',
            'SlurmdParameters=config_overrides', 'MpiDefault=none', 'ReturnToService=2', f'SlurmctldPort={ports[0]}', 'GresTypes=gpu',
            *(
                f'NodeName={node} Gres=gpu:2 NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=2 RealMemory=8000'
                for node, port in zip(NODES, ports[1:], strict=True)
            ),
            'PartitionName=all Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP', '',
        ])  # fmt: skip

    def _start(self, *words: str) -> None:
        subprocess.run(words, env=self.environment, check=True, capture_output=True, timeout=60)

    def run(self, *words: str, **options) -> str:
        return subprocess.run(words, env=self.environment, check=True, capture_output=True, text=True, timeout=60, **options).stdout

    def job(self, task: str) -> dict[str, str]:
        """What Slurm says about a job, or a task ARRAY_N."""
        return dict(re.findall(r'(\w+)=(\S*)', self.run('scontrol', 'show', 'job', task)))

    def stop(self) -> None:
        for line in self.run('squeue', '--noheader', '--format=%A').splitlines():
            self.run('scancel', line)
        wait_until(lambda: not self.run('squeue', '--noheader'), 60, 'an empty queue')
        for name in ('slurmd.n1', 'slurmd.n2', 'slurmctld', 'munged'):
            path = self.folder / f'{name}.pid'
            if path.exists():
                pid = int(path.read_text())
                os.kill(pid, signal.SIGTERM)
                wait_until(lambda pid=pid: not Path(f'/proc/{pid}').exists(), 30, f'the end of {name}')


def processes_with(**variables: str) -> list[psutil.Process]:
    """Processes that were started with these environment variables."""
    found = psutil.process_iter(['environ'])
    return [process for process in found if variables.items() <= (process.info['environ'] or {}).items()]


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(('127.0.0.1', 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports
