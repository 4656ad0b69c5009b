"""launch/slurm/fleet.sbatch: what it does after each ending, with stand-ins for Slurm's commands; and on a real Slurm of two nodes on loopback."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from tests.launch.conftest import JobList

SCRIPT = REPOSITORY / 'launch/slurm/fleet.sbatch'
DAEMONS = ('munged', 'slurmctld', 'slurmd')
SLOW = {'steps': 10000, 'every': 20, 'step_sec': 0.02}


def wait_until(condition: Callable[[], object], timeout_sec: float = 120, what: str = '') -> None:
    deadline = time.monotonic() + timeout_sec
    while not condition():
        assert time.monotonic() < deadline, f'it never came: {what}'
        time.sleep(0.1)


def directives() -> dict[str, str]:
    """The #SBATCH options."""
    words = [word for line in SCRIPT.read_text().splitlines() if line.startswith('#SBATCH') for word in line.split()[1:]]
    return dict(word.partition('=')[::2] for word in words)


def test_what_it_asks_of_slurm() -> None:
    options = directives()
    assert '--requeue' in options
    assert options['--open-mode'] == 'append'
    receiver, before_sec = options['--signal'].split('@')
    assert receiver == 'B:USR1'  # to all processes of the step it would end `fleet run`, which has no handler for it
    assert 120 <= int(before_sec) <= 300
    assert '%A_%a' in options['--output']


def test_shellcheck_has_nothing_to_say() -> None:
    subprocess.run(['bash', '-n', SCRIPT], check=True)
    if shutil.which('shellcheck'):
        subprocess.run(['shellcheck', SCRIPT], check=True)


class TestLogic:
    """The script alone: `scontrol` writes down its arguments, `sleep` does nothing, and a shell script is in the place of Python."""

    @pytest.fixture
    def task(self, job_list: JobList, program):
        for number in range(3):
            job_list.add(str(number))
        (job_list.folder / 'jobs.txt').write_text(''.join(f'jobs/{number}.yaml\n' for number in range(3)))
        program('scontrol', f'echo "$@" >> {job_list.folder}/calls')
        program('sleep', 'exit 0')
        environment = {
            **job_list.environment,
            'SLURM_JOB_NAME': 'fleet',
            'SLURM_JOB_ID': '70',  # as the last task of an array has it
            'SLURM_ARRAY_JOB_ID': '70',
            'SLURM_ARRAY_TASK_ID': '2',
            'SLURM_GPUS_ON_NODE': '4',
            'FLEET_WORK': str(job_list.folder / 'work'),
        }

        def start(**more: str) -> subprocess.Popen[str]:
            return subprocess.Popen(
                ['bash', SCRIPT, 'jobs.txt', str(job_list.results)],
                cwd=job_list.folder,
                env={**environment, **more},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )

        return start

    @staticmethod
    def calls(job_list: JobList) -> list[str]:
        path = job_list.folder / 'calls'
        return path.read_text().splitlines() if path.exists() else []

    @pytest.mark.parametrize('code', [0, 64, 65, 73, 77])
    def test_what_nothing_can_change_is_not_run_again(self, job_list, program, task, code):
        program('python', f'exit {code}')
        assert task().wait(20) == code
        assert self.calls(job_list) == []

    @pytest.mark.parametrize('code', [1, 70, 75, 76, 129, 137, 143, 247])
    def test_everything_else_is_and_of_the_array_this_task_alone(self, job_list, program, task, code):
        program('python', f'exit {code}')
        assert task().wait(20) == code
        assert self.calls(job_list) == ['requeue 70_2']

    @pytest.mark.parametrize(('code', 'starts'), [(70, 2), (76, 4), (137, 4)])
    def test_failures_have_a_limit_and_interruptions_do_not_count_as_such(self, job_list, program, task, code, starts):
        for number in range(6):
            program('python', f'exit {code if number % 2 else 75}')
            task(SLURM_RESTART_COUNT=str(number)).wait(20)
        program('python', f'exit {code}')
        for _ in range(3):
            task(SLURM_RESTART_COUNT='6').wait(20)
        (file,) = job_list.folder.glob('*.failures')
        assert file.name == 'fleet-70_2.failures'
        assert file.read_text().count(f'exit code {code}') == 6
        assert len(self.calls(job_list)) == 3 + starts - 1

    def test_interruptions_have_one_too(self, job_list, program, task):
        program('python', 'exit 75')
        task(SLURM_RESTART_COUNT='49').wait(20)
        task(SLURM_RESTART_COUNT='50').wait(20)
        assert len(self.calls(job_list)) == 1

    def test_a_line_that_is_not_there_is_no_job(self, job_list, task):
        ended = task(SLURM_ARRAY_TASK_ID='4')
        assert ended.wait(20) == 64
        assert 'jobs.txt has no line 4' in ended.stdout.read()

    @pytest.mark.parametrize(('number', 'calls'), [(signal.SIGUSR1, ['requeue 70_2']), (signal.SIGTERM, [])])
    def test_a_notice_is_handed_on_and_what_was_cancelled_is_not_run_again(self, job_list, task, number, calls):
        """With the real command."""
        job_list.add('1', SLOW)
        running = task()
        wait_until(lambda: job_list.latest('1')['step'], what='a checkpoint')
        running.send_signal(number)
        assert running.wait(60) == 75, running.stdout.read()
        assert self.calls(job_list) == calls
        assert 'stopped, run it again to resume' in running.stdout.read()

    def test_its_command_does_the_job_of_its_line(self, job_list, task):
        ended = task()
        assert ended.wait(60) == 0, ended.stdout.read()
        assert [job_list.is_done(name) for name in '012'] == [False, True, False]
        assert list((job_list.folder / 'work/attempts').iterdir()) == []


class LoopbackSlurm:
    """A controller and two nodes with two GPUs each, which are empty files.

    Args:
        folder: of its files.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.environment = {**os.environ, 'SLURM_CONF': str(folder / 'slurm.conf')}
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
        for node in ('n1', 'n2'):
            self._start('slurmd', '-N', node, '-f', f'{folder}/slurm.conf')
        wait_until(lambda: self.run('sinfo', '--noheader', '--format=%T %D').strip() == 'idle 2', 60, 'idle nodes')

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
                for node, port in zip(('n1', 'n2'), ports[1:], strict=True)
            ),
            'PartitionName=all Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP', '',
        ])  # fmt: skip

    def _start(self, *words: str) -> None:
        subprocess.run(words, env=self.environment, check=True, capture_output=True, timeout=60)

    def run(self, *words: str, **options) -> str:
        return subprocess.run(words, env=self.environment, check=True, capture_output=True, text=True, timeout=60, **options).stdout

    def job(self, task: str) -> dict[str, str]:
        """What Slurm says about a task ARRAY_N."""
        return dict(re.findall(r'(\w+)=(\S*)', self.run('scontrol', 'show', 'job', task)))

    def stop(self) -> None:
        for name in ('slurmd.n1', 'slurmd.n2', 'slurmctld', 'munged'):
            path = self.folder / f'{name}.pid'
            if path.exists():
                pid = int(path.read_text())
                os.kill(pid, signal.SIGTERM)
                wait_until(lambda pid=pid: not Path(f'/proc/{pid}').exists(), 30, f'the end of {name}')


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(('127.0.0.1', 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


@pytest.mark.long
@pytest.mark.skipif(os.geteuid() != 0 or not all(map(shutil.which, DAEMONS)), reason='needs root, slurmctld, slurmd and munge')
@pytest.mark.timeout(600)
class TestOnSlurm:
    @pytest.fixture
    def slurm(self, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoopbackSlurm]:
        slurm = LoopbackSlurm(tmp_path_factory.mktemp('slurm'))
        yield slurm
        for line in slurm.run('squeue', '--noheader', '--format=%A').splitlines():
            slurm.run('scancel', line)
        wait_until(lambda: not slurm.run('squeue', '--noheader'), 60, 'an empty queue')
        slurm.stop()

    def submit(self, slurm: LoopbackSlurm, job_list: JobList, *options: str) -> str:
        """Submit the list with smaller machines than the file asks for; return the number of the array."""
        slurm.environment.update({**job_list.environment, 'SLURM_CONF': slurm.environment['SLURM_CONF'], 'FLEET_WORK': str(job_list.folder / 'work')})
        small = ['--mem=500', '--cpus-per-task=1', '--parsable']
        return slurm.run('sbatch', *small, *options, str(SCRIPT), 'jobs.txt', str(job_list.results), cwd=job_list.folder).strip()

    def test_an_array_with_every_ending(self, slurm, job_list):
        """At the same time, because a requeue of one must not touch the others."""
        jobs = {
            'stopped': [{'code': 75, 'at': 3}, {}],
            'killed': [SLOW, {'steps': 30, 'every': 10}],
            'wrong': [{}],
            'crashes': [{'code': 70, 'at': 3}],
            'cancelled': [SLOW, {}],
            'twice': [SLOW, {'steps': 200, 'every': 20, 'step_sec': 0.02}],
            'plain': [{}],
        }
        for name, starts in jobs.items():
            job_list.add(name, *starts, **({'priority': 'high'} if name == 'wrong' else {}))
        (job_list.folder / 'jobs.txt').write_text(''.join(f'jobs/{name}.yaml\n' for name in jobs))
        array = self.submit(slurm, job_list, f'--array=1-{len(jobs)}')
        task = {name: f'{array}_{number}' for number, name in enumerate(jobs, start=1)}

        def state(name: str) -> tuple[str, str, str]:
            found = slurm.job(task[name])
            return found['JobState'], found['ExitCode'], found['Restarts']

        wait_until(lambda: job_list.latest('killed')['step'], what='a checkpoint of the one to kill')
        os.kill(job_list.starts('killed')[0], signal.SIGKILL)  # as the kernel does that has no memory left
        wait_until(lambda: job_list.latest('cancelled')['step'], what='a checkpoint of the one to cancel')
        slurm.run('scancel', task['cancelled'])
        wait_until(lambda: job_list.latest('twice')['step'], what='a checkpoint of the one that is started twice')
        again = self.submit(slurm, job_list, '--array=6')  # the same job, while Slurm's first task of it runs
        ended = {
            'stopped': ('COMPLETED', '0:0', '1'),
            'killed': ('COMPLETED', '0:0', '1'),
            'wrong': ('FAILED', '64:0', '0'),
            'crashes': ('FAILED', '70:0', '1'),
            'cancelled': ('CANCELLED', '0:15', '0'),
            'twice': ('FAILED', '73:0', '0'),
            'plain': ('COMPLETED', '0:0', '0'),
        }
        for name, expected in ended.items():
            wait_until(lambda name=name, expected=expected: state(name)[0] == expected[0], 180, f'{name} {expected}, {state(name)}')
        wait_until(lambda: slurm.job(f'{again}_6')['JobState'] == 'COMPLETED', what='the later of the two')
        found = {name: state(name) for name in jobs}
        found['cancelled'] = ('CANCELLED', '0:15', found['cancelled'][2])  # its code depends on who of the two was faster
        assert found == ended
        assert {name for name in jobs if job_list.is_done(name)} == {'stopped', 'killed', 'twice', 'plain'}
        assert {name: len(job_list.starts(name)) for name in jobs} == {
            'stopped': 2, 'killed': 2, 'wrong': 1, 'crashes': 2, 'cancelled': 1, 'twice': 2, 'plain': 1,
        }  # fmt: skip
        assert job_list.latest('killed')['epoch'] == 2
        assert job_list.latest('cancelled')['step'] % SLOW['every'] != 0  # it saved the step at which it was cancelled
        log = (job_list.folder / f'fleet-{task["stopped"]}.log').read_text()  # both starts
        assert 'starting at 0' in log
        assert 'resuming at step 2' in log
        assert 'another attempt has begun' in (job_list.folder / f'fleet-{task["twice"]}.log').read_text()

    def test_the_end_of_its_time(self, slurm, job_list):
        job_list.add('long', SLOW, {'steps': 1, 'every': 1})
        (job_list.folder / 'jobs.txt').write_text('jobs/long.yaml\n')
        task = self.submit(slurm, job_list, '--array=1', '--time=2', '--signal=B:USR1@60') + '_1'
        wait_until(lambda: slurm.job(task)['JobState'] == 'COMPLETED', 240, 'the end of the second start')
        assert slurm.job(task)['Restarts'] == '1'
        assert len(job_list.starts('long')) == 2
        log = (job_list.folder / f'fleet-{task}.log').read_text()
        saved = int(re.search(r'ended with exit code 75 at step ([\d,]+)', log)[1].replace(',', ''))
        assert f'resuming at step {saved:,}' in log
