"""launch/slurm/train.sbatch: what it starts, with stand-ins for Slurm's commands; and a training on a real Slurm of two nodes on loopback."""

import signal
import subprocess
from pathlib import Path

import pytest

from diffusion.checkpoints.reading import find_checkpoint
from tests.conftest import REPOSITORY
from tests.faults.driver import YAML, digest, everything_in, launch
from tests.launch.conftest import write_program
from tests.launch.loopback_slurm import LoopbackSlurm, needs_slurm, processes_with, wait_until

SCRIPT = REPOSITORY / 'launch/slurm/train.sbatch'


class TestLogic:
    """The script alone: `srun` runs its command for two nodes one after the other, and `composer` prints how it was started."""

    @pytest.fixture
    def started(self, scheduler, tmp_path):
        write_program(tmp_path / 'bin/srun', 'for node in 0 1; do SLURM_NODEID=$node "$@" || code=$?; done; exit ${code:-0}')
        write_program(tmp_path / 'bin/composer', 'echo "$NODE_RANK/$WORLD_SIZE $MASTER_ADDR:$MASTER_PORT $TMPDIR $*"; trap -p USR1; exit ${CODE:-0}')
        environment = {
            **scheduler,
            'SLURM_JOB_NAME': 'train',
            'SLURM_JOB_NODELIST': 'node[7-8]',
            'SLURM_NNODES': '2',
            'SLURM_GPUS_ON_NODE': '8',
            'LOCAL_DISK': str(tmp_path / 'local'),
        }

        def start(*arguments: str, code: int = 0, **more: str) -> tuple[list[str], list[str]]:
            ended = subprocess.run(
                ['bash', SCRIPT, *arguments],
                cwd=tmp_path,
                env={**environment, 'CODE': str(code), **more},
                capture_output=True,
                text=True,
                check=False,
            )
            assert ended.returncode == code, ended.stderr
            calls = tmp_path / 'calls'
            return ended.stdout.splitlines(), calls.read_text().splitlines() if calls.exists() else []

        return start

    def test_a_launcher_a_node_and_all_meet_at_the_first(self, started, tmp_path):
        lines, calls = started('yamls/a b.yaml', 'name=x y')
        logs = f'{tmp_path}/train-123456.ranks/rank{{rank}}.log'
        assert lines == [
            line
            for node in (0, 1)
            for line in (
                f'{node}/16 node7:23456 {tmp_path}/local/tmp -n 8 --stdout {logs} --stderr {logs} train.py yamls/a b.yaml name=x y',
                "trap -- '' SIGUSR1",  # or the launcher would die of the notice
            )
        ]
        assert calls == []

    @pytest.mark.parametrize('arguments', [('-m', 'diffusion.autoencoder', 'yamls/vae-f8c4.yaml'), ('data_prep/encode.py', 'a', 'b')])
    def test_other_commands_of_the_launcher(self, started, arguments):
        lines, _ = started(*arguments)
        assert lines[0].endswith(f'.log {" ".join(arguments)}')

    @pytest.mark.parametrize('code', [64, 65, 73, 77])
    def test_what_nothing_can_change_is_not_run_again(self, started, code):
        assert started('a.yaml', code=code)[1] == []

    @pytest.mark.parametrize('code', [1, 70, 75, 76, 137, 247])
    def test_everything_else_is(self, started, code):
        assert started('a.yaml', code=code)[1] == ['requeue 123456']

    def test_with_a_limit(self, started):
        assert started('a.yaml', code=75, SLURM_RESTART_COUNT='199')[1] == ['requeue 123456']
        assert started('a.yaml', code=75, SLURM_RESTART_COUNT='200')[1] == ['requeue 123456']  # that of the line before

    def test_a_site_has_settings_of_its_own(self, started, tmp_path):
        (tmp_path / 'site.sh').write_text('export MASTER_ADDR=node7-ib\n')
        assert started('a.yaml', LAUNCH_SITE='site.sh')[0][0].startswith('0/16 node7-ib:23456 ')

    def test_without_the_environment_it_says_so(self, started, tmp_path):
        (tmp_path / 'bin/composer').unlink()
        assert started('a.yaml', code=64, PATH=f'{tmp_path}/bin:/usr/bin:/bin') == ([], [])

    def test_without_slurm_it_says_so(self, scheduler, tmp_path):
        scheduler.pop('SLURM_JOB_ID')
        ended = subprocess.run(['bash', SCRIPT, 'a.yaml'], cwd=tmp_path, env=scheduler, capture_output=True, text=True, check=False)
        assert ended.returncode != 0
        assert 'give this file to sbatch' in ended.stderr

    def test_elsewhere_it_says_where_to_run_it(self, tmp_path):
        ended = subprocess.run(['bash', SCRIPT, 'a.yaml'], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert ended.returncode == 64
        assert 'run sbatch there' in ended.stderr


@pytest.mark.long
@needs_slurm
@pytest.mark.timeout(1200)
class TestOnSlurm:
    @pytest.fixture
    def run(self, slurm: LoopbackSlurm, overrides: list[str], tmp_path: Path):
        """Settings of a training that takes a minute and a half on two cores, and submits it."""
        settings = [
            *overrides,
            'data.synthetic_samples=4096',
            'batch.micro_size=1',
            'optimizer.lr=1e-3',
            'checkpoint.every=25ba',
            'checkpoint.keep=2',
        ]
        (tmp_path / 'launch').symlink_to(REPOSITORY / 'launch')
        (tmp_path / 'train.py').symlink_to(REPOSITORY / 'train.py')
        slurm.environment |= {'MASTER_ADDR': '127.0.0.1', 'LOCAL_DISK': str(tmp_path / 'local')}  # n1 and n2 are names of this Slurm alone

        def submit(*more: str, slurm_options: tuple[str, ...] = ()) -> str:
            options = ['--parsable', '--exclusive=user', '--gpus-per-node=1', '--cpus-per-task=1', *slurm_options]  # --exclusive takes all GPUs
            return slurm.run('sbatch', *options, str(SCRIPT), YAML, *settings, *more, cwd=tmp_path).strip()

        submit.settings = settings
        return submit

    @staticmethod
    def batches(folder: Path) -> int:
        """Those of the newest checkpoint; 0 without one."""
        return max((int(path.stem.removeprefix('ba')) for path in (folder / 'checkpoints').glob('ba*.json')), default=0)

    def test_the_end_of_its_time_a_killed_rank_and_a_lost_node(self, slurm, run, tmp_path):
        """In turn; it ends with the very bits of a run that nobody touched."""
        folder, length = tmp_path / 'run', 'train.duration=500ba'
        job = run(length, slurm_options=('--time=60', '--signal=USR1@120'))

        def restarted(times: int) -> bool:
            found = slurm.job(job)
            assert found['JobState'] not in ('COMPLETED', 'FAILED', 'TIMEOUT', 'CANCELLED', 'NODE_FAIL'), found
            return found['Restarts'] == str(times)

        def progressed() -> int:
            before = self.batches(folder)
            wait_until(lambda: self.batches(folder) > before, 240, f'a batch after {before}')
            return self.batches(folder)

        def limit_minutes(minutes: int) -> None:
            slurm.run('scontrol', 'update', f'JobId={job}', f'TimeLimit={minutes}')

        progressed()
        hours, minutes, _ = map(int, slurm.job(job)['RunTime'].split(':'))
        limit_minutes(60 * hours + minutes + 2)  # one to two minutes are left, so the notice comes at once
        wait_until(lambda: restarted(1), 240, 'the end of its time')
        limit_minutes(60)
        assert 0 < progressed() < 500
        (rank,) = [process for process in processes_with(RANK='1', SLURM_JOB_ID=job) if 'train.py' in ' '.join(process.cmdline())]
        rank.send_signal(signal.SIGKILL)
        wait_until(lambda: restarted(2), 240, 'a start after a killed rank')
        progressed()
        slurm.lose('n2')
        wait_until(lambda: restarted(3), 240, 'a start after a lost node')
        slurm.bring_up('n2')
        wait_until(lambda: slurm.job(job)['JobState'] == 'COMPLETED', 600, 'the end')
        log = (tmp_path / f'train-{job}.log').read_text()
        codes = [line.split()[-1] for line in (tmp_path / f'train-{job}.failures').read_text().splitlines()]
        assert codes[0] == '247'  # the end of its time is no failure
        assert len(codes) <= 2  # of the lost node Slurm may have started it again before the script did
        assert log.count('resuming') >= 3

        with launch(2, [*run.settings, length, f'run_folder={tmp_path}/untouched']) as process:
            process.wait(timeout_sec=600)
        ours, theirs = (everything_in(find_checkpoint(place)) for place in (folder, tmp_path / 'untouched'))
        assert [part for part in theirs if digest(ours[part]) != digest(theirs[part])] == []

    def test_what_is_cancelled_saves_and_stays_away(self, slurm, run, tmp_path):
        job = run('train.duration=100000ba')
        wait_until(lambda: self.batches(tmp_path / 'run'), 240, 'a checkpoint')
        slurm.run('scancel', job)
        wait_until(lambda: slurm.job(job)['JobState'] == 'CANCELLED', what='the end')
        wait_until(lambda: not processes_with(SLURM_JOB_ID=job), what='the end of all processes')
        assert self.batches(tmp_path / 'run') % 25 != 0  # the batch at which it was cancelled
        assert slurm.job(job)['Restarts'] == '0'

    def test_what_is_wrong_is_not_run_again(self, slurm, run, tmp_path):
        job = run('optimizer.lr=nonsense', slurm_options=('--gpus-per-node=2', '--overcommit'))
        wait_until(lambda: slurm.job(job)['JobState'] == 'FAILED', 240, 'the end')
        assert (slurm.job(job)['ExitCode'], slurm.job(job)['Restarts']) == ('64:0', '0')
        assert 'optimizer.lr' in (tmp_path / f'train-{job}.log').read_text()
        logs = {path.name for path in (tmp_path / f'train-{job}.ranks').iterdir()}
        assert logs == {'rank1.log', 'rank3.log'}  # 0 and 2 are the first of their nodes
