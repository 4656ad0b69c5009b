"""launch/slurm/data_prep.sbatch: what it starts and does after each ending, with stand-ins; and an array on a real Slurm of two nodes on loopback."""

import signal
import subprocess
from pathlib import Path

import pytest

from data_prep.converting.conversion import convert
from tests.conftest import REPOSITORY
from tests.launch.conftest import write_program
from tests.launch.loopback_slurm import LoopbackSlurm, needs_slurm, wait_until

SCRIPT = REPOSITORY / 'launch/slurm/data_prep.sbatch'
ARRAY = {'MIN': '0', 'MAX': '3', 'COUNT': '4', 'ID': '2'}


class TestLogic:
    """The script alone; a shell script is in the place of Python."""

    @pytest.fixture
    def started(self, scheduler, tmp_path):
        def start(python: str, arguments: tuple[str, ...] = ('data_prep.convert', 'a b', 'c'), **array: str) -> subprocess.Popen[str]:
            write_program(tmp_path / 'bin/python', python)
            environment = {
                **scheduler,
                'SLURM_JOB_NAME': 'data_prep',
                'SLURM_ARRAY_JOB_ID': '70',
                **{f'SLURM_ARRAY_TASK_{name}': value for name, value in {**ARRAY, **array}.items()},
            }
            return subprocess.Popen(
                ['bash', SCRIPT, *arguments], cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )

        return start

    def test_tasks_are_ranks(self, started, tmp_path):
        text, _ = started('printf "%s|" "$@"').communicate(timeout=20)
        assert text == '-m|data_prep.convert|a b|c|--rank|2|--world-size|4|'
        assert not (tmp_path / 'calls').exists()

    @pytest.mark.parametrize(('code', 'again'), [(2, False), (64, False), (3, True), (1, True), (137, True)])
    def test_what_is_run_again(self, started, tmp_path, code, again):
        assert started(f'exit {code}').wait(20) == code
        assert (tmp_path / 'calls').exists() == again

    @pytest.mark.parametrize(('number', 'again'), [(signal.SIGUSR1, True), (signal.SIGTERM, False)])
    def test_a_notice_ends_it_and_what_was_cancelled_is_not_run_again(self, started, tmp_path, number, again):
        running = started(f'touch {tmp_path}/began; exec /bin/sleep 60')
        wait_until((tmp_path / 'began').exists, 20)
        running.send_signal(number)
        assert running.wait(20) == 143
        assert (tmp_path / 'calls').exists() == again
        assert not list(tmp_path.glob('*.failures'))

    @pytest.mark.parametrize('array', [{'MIN': '1', 'MAX': '4'}, {'MAX': '6'}])
    def test_a_rank_that_is_missing_is_no_array(self, started, array):
        ended = started('exit 0', **array)
        assert ended.wait(20) == 64
        assert '--array=0-N is needed' in ended.stdout.read()


@pytest.mark.long
@needs_slurm
@pytest.mark.timeout(600)
def test_an_array_on_slurm_makes_the_bytes_of_one_process(slurm: LoopbackSlurm, crawl: Path, tmp_path: Path):
    (tmp_path / 'launch').symlink_to(REPOSITORY / 'launch')
    options = ['--parsable', '--array=0-3', '--cpus-per-task=1']
    command = [str(SCRIPT), 'data_prep.convert', str(crawl), str(tmp_path / 'array'), '--processes', '1']
    array = slurm.run('sbatch', *options, *command, cwd=tmp_path).strip()
    for task in range(4):
        wait_until(lambda task=task: slurm.job(f'{array}_{task}')['JobState'] == 'COMPLETED', 240, f'the end of task {task}')
    convert(crawl, tmp_path / 'one')
    ours, theirs = ({path.name: path.read_bytes() for path in sorted((tmp_path / name).rglob('*.mds'))} for name in ('array', 'one'))
    assert ours == theirs
