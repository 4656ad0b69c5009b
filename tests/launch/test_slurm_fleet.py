"""launch/slurm/fleet.sbatch: what it does after each ending, with stand-ins for Slurm's commands; and on a real Slurm of two nodes on loopback."""

import os
import re
import signal
import subprocess

import pytest

from tests.conftest import REPOSITORY
from tests.launch.conftest import JobList
from tests.launch.loopback_slurm import LoopbackSlurm, needs_slurm, wait_until

SCRIPT = REPOSITORY / 'launch/slurm/fleet.sbatch'
SLOW = {'steps': 10000, 'every': 20, 'step_sec': 0.02}


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

    def test_and_failures_of_another_day_are_forgiven(self, job_list, program, task):
        """A run of weeks loses a node every few days."""
        (job_list.folder / 'fleet-70_2.failures').write_text(''.join(f'2020-01-0{day} 12:00:00 n1: exit code 70\n' for day in range(1, 9)))
        program('python', 'exit 70')
        for _ in range(3):
            task().wait(20)
        assert self.calls(job_list) == ['requeue 70_2']

    def test_a_crash_after_other_failures_is_tried_twice_too(self, job_list, program, task):
        for code in (137, 70, 70):
            program('python', f'exit {code}')
            task().wait(20)
        assert self.calls(job_list) == ['requeue 70_2'] * 2

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


@pytest.mark.long
@needs_slurm
@pytest.mark.timeout(600)
class TestOnSlurm:
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
            'cancelled': [{**SLOW, 'every': SLOW['steps']}, {}],  # saves only when it is told to end
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
        cancelled = job_list.folder / f'fleet-{task["cancelled"]}.log'
        wait_until(lambda: cancelled.exists() and 'starting at 0' in cancelled.read_text(), what='the start of the one to cancel')
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
        assert job_list.latest('cancelled')['step']  # it saved the step at which it was cancelled
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
