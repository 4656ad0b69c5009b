"""Ctrl-C, Ctrl-Z and a closed terminal, on real pseudo terminals."""

import os
import pty
import select
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from diffusion.checkpoints.reading import batches_trained, find_checkpoint, read_checkpoint
from diffusion.common.files import read_json_lines
from diffusion.contracts.errors import INTERRUPTED, PREEMPTED
from diffusion.faults import peers
from diffusion.monitoring.report.run import read_log
from tests.conftest import REPOSITORY
from tests.faults.children import DEADLINE_SEC
from tests.faults.driver import AS_MODULE, ON_PATH, Disturbed, Forked, hear_the_keyboard, launch_command


class Screen:
    """A terminal, and all that was shown on it."""

    def __init__(self) -> None:
        self.keyboard, self.end = os.openpty()
        self.name = Path(os.ttyname(self.end))
        self.shown = b''
        self._keep(self.keyboard)

    def _keep(self, keyboard: int) -> None:
        self.keyboard = keyboard
        self.closing = threading.Event()
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        poll = select.poll()  # select knows descriptors below 1,024 only
        poll.register(self.keyboard, select.POLLIN)
        with suppress(OSError):  # nobody has the other end open any more
            while not self.closing.is_set():
                if poll.poll(50):
                    self.shown += os.read(self.keyboard, 65536)
        os.close(self.keyboard)

    def close(self) -> None:
        self.closing.set()
        self.reader.join(30)
        assert not self.reader.is_alive()

    def press(self, key: str) -> None:
        os.write(self.keyboard, bytes([ord(key) - 64]))

    def text(self) -> str:
        return self.shown.decode(errors='replace').replace('\r', '')


class OnScreen(Forked):
    """train.py, forked, whose terminal a Screen is."""

    def __init__(self, overrides: list[str], **environment: str):
        self.screen = Screen()
        super().__init__(overrides, self.screen.name, **environment)  # the leader of a session, which opens it

    def read(self) -> str:
        return self.screen.text()


class Launched(Disturbed):
    """A command on a terminal of its own."""

    def __init__(self, command: list[object]):
        self.screen = Screen.__new__(Screen)
        self.screen.shown = b''
        self.pid, keyboard = pty.fork()
        if not self.pid:
            hear_the_keyboard()
            os.chdir(REPOSITORY)
            os.environ['OMP_NUM_THREADS'] = '1'
            os.execv(sys.executable, [sys.executable, *map(str, command)])
        self.ended: int | None = None
        self.screen._keep(keyboard)

    def code(self, timeout_sec: float = 0.0) -> int | None:
        deadline = time.monotonic() + timeout_sec
        while self.ended is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.ended = os.waitstatus_to_exitcode(status)
                self.screen.reader.join(10)
            elif time.monotonic() > deadline:
                return None
            else:
                time.sleep(0.02)
        return self.ended

    def read(self) -> str:
        return self.screen.text()


@pytest.fixture
def endless(overrides):
    return [*overrides, 'train.duration=100000ba', 'checkpoint.every=100000ba']


def has_trained(tmp_path, batches=5):
    return lambda: (log := read_log(tmp_path / 'run/log.jsonl')) and log[-1]['batch'] >= batches


def saved(tmp_path):
    last = read_log(tmp_path / 'run/log.jsonl')[-1]['batch']
    assert batches_trained(read_checkpoint(find_checkpoint(tmp_path / 'run'))) == last
    return last


def test_ctrl_c_saves_and_says_how_to_resume(endless, tmp_path):
    with OnScreen([*endless, 'data.workers=1']) as process:
        process.wait_until(has_trained(tmp_path))
        process.screen.press('C')
        output = process.wait(PREEMPTED)
    assert f'saved after batch {saved(tmp_path):,}; resume with: ' in output
    assert 'press Ctrl-C again to end at once and lose' in output
    assert 'Traceback' not in output


def test_a_second_ctrl_c_ends_at_once_wherever_the_run_hangs(endless, tmp_path):
    with OnScreen(endless, DIFFUSION_FAILPOINT='step@9:sleep') as process:
        steps = tmp_path / 'run/events.jsonl'
        process.wait_until(lambda: max((line.get('batch', 0) for line in read_json_lines(steps)), default=0) == 8)  # then it hangs
        process.screen.press('C')
        process.wait_until(lambda: 'press Ctrl-C again' in process.read())
        process.screen.press('C')  # the same press, forwarded by a wrapper
        time.sleep(1)
        assert process.code() is None
        process.screen.press('C')
        output = process.wait(INTERRUPTED)
    assert 'ended at once by a second Ctrl-C: lost 8 steps since the start; resume with: ' in output
    assert 'Traceback' not in output
    assert not list((tmp_path / 'run').glob('checkpoints/*.pt'))


def test_a_closed_terminal_saves(endless, tmp_path):
    """Printing fails from then on, with EIO."""
    with OnScreen(endless) as process:
        process.wait_until(has_trained(tmp_path))
        process.screen.close()
        process.wait(PREEMPTED)
    saved(tmp_path)
    assert list(read_json_lines(tmp_path / 'run/events.jsonl'))[-1]['reason'] == 'Preempted'


PRINTS = """
import sys
from diffusion.faults.terminal import survive_its_end
survive_its_end()
for _ in range(3):
    print('x' * 100_000, flush=True)
    print('y', file=sys.stderr)
sys.exit(75)
"""


@pytest.mark.parametrize('to', ['a reader that has gone', 'a full disk'])
def test_printing_cannot_fail(to):
    if to == 'a full disk':
        out = os.open('/dev/full', os.O_WRONLY)
    else:
        reader, out = os.pipe()
        os.close(reader)
    ended = subprocess.run([sys.executable, '-c', PRINTS], cwd=REPOSITORY, stdout=out, stderr=out, check=False)
    os.close(out)
    assert ended.returncode == PREEMPTED


LAUNCHER = """
import os, signal, subprocess, sys
signal.signal(signal.SIGINT, lambda *_: print('the launcher was asked', flush=True))
signal.signal(signal.SIGTTOU, signal.SIG_IGN)
code = subprocess.call([sys.executable, '-c', sys.argv[1]], env={**os.environ, 'LOCAL_RANK': '0'})
print('given back:', os.tcgetpgrp(0) == os.getpgrp(), flush=True)
sys.exit(code)
"""

RANK = """
import signal, sys, threading
from diffusion.faults import terminal
asked = threading.Event()
signal.signal(signal.SIGINT, lambda *_: asked.set())
terminal.take()
print('ready', flush=True)
while not asked.wait(0.05):
    pass
sys.exit(75)
"""

SHELL = """
import os, signal, sys
signal.signal(signal.SIGTTOU, signal.SIG_IGN)
job = os.fork()
if not job:
    os.setpgid(0, 0)
    os.tcsetpgrp(0, os.getpid())
    signal.signal(signal.SIGTTOU, signal.SIG_DFL)
    os.execv(sys.executable, [sys.executable, '-c', *sys.argv[1:]])
while True:
    _, status = os.waitpid(job, os.WUNTRACED)
    os.tcsetpgrp(0, os.getpid())
    if not os.WIFSTOPPED(status):
        break
    print('stopped', flush=True)
    sys.stdin.readline()
    os.tcsetpgrp(0, job)
    os.killpg(job, signal.SIGCONT)
    print('continued', flush=True)
print('code', os.waitstatus_to_exitcode(status), flush=True)
"""


def test_ctrl_c_is_for_the_run_and_ctrl_z_for_all():
    with Launched(['-c', SHELL, LAUNCHER, RANK]) as shell:
        shell.wait_until(lambda: 'ready' in shell.read())
        shell.screen.press('Z')
        shell.wait_until(lambda: 'stopped' in shell.read())
        os.write(shell.screen.keyboard, b'\n')
        shell.wait_until(lambda: 'continued' in shell.read())
        time.sleep(0.5)  # for the rank to take the terminal again
        shell.screen.press('C')
        output = shell.wait()
    assert 'the launcher was asked' not in output
    assert 'given back: True' in output
    assert 'code 75' in output


def test_a_lost_rank_is_named(monkeypatch):
    gone = os.fork()
    if not gone:
        os._exit(0)  # and stays a zombie until its parent asks
    monkeypatch.setattr(peers._state, 'places', [(peers.platform.node(), gone), (peers.platform.node(), os.getpid()), ('elsewhere', 1)])
    try:
        assert peers.lost() == f'rank 0 (process {gone} on {peers.platform.node()})'
    finally:
        os.waitpid(gone, 0)
    monkeypatch.setattr(peers, 'PATIENCE_SEC', 0.2)
    monkeypatch.setattr(peers._state, 'places', [('elsewhere', 1), (peers.platform.node(), os.getpid())])
    assert peers.lost() == 'a rank'


def rank_of(process: Launched, rank: int) -> int:
    """The process id of a rank of the launcher."""
    for folder in Path('/proc').glob('[0-9]*'):
        with suppress(OSError):
            parent = int((folder / 'stat').read_text().rpartition(')')[2].split()[1])
            if parent == process.pid and f'\0RANK={rank}\0' in (folder / 'environ').read_text():
                return int(folder.name)
    raise AssertionError('there is none')


LAUNCHERS = pytest.mark.parametrize(('launcher', 'name'), [(ON_PATH, 'composer'), (AS_MODULE, f'{Path(sys.executable).name} -m composer.cli')])


@pytest.mark.long
@LAUNCHERS
@pytest.mark.parametrize('num', [1, 2])
def test_ctrl_c_through_the_launcher(endless, tmp_path, num, launcher, name):
    with Launched(launch_command(num, endless, launcher)) as process:
        process.wait_until(has_trained(tmp_path))
        process.screen.press('C')
        output = process.wait(PREEMPTED)
    assert 'press Ctrl-C again' in output
    assert 'Traceback' not in output
    assert 'frame #' not in output
    assert 'before the first step' not in output
    assert f'saved after batch {saved(tmp_path):,}; resume with: {name} -n {num} train.py' in output


@pytest.mark.long
def test_a_second_ctrl_c_through_the_launcher_ends_at_once(endless, tmp_path, monkeypatch):
    """While the ranks hang: a run that has saved meanwhile would leave the second Ctrl-C to the launcher."""
    monkeypatch.setenv('DIFFUSION_FAILPOINT', 'step@9:sleep')
    with Launched(launch_command(2, endless)) as process:
        process.wait_until(has_trained(tmp_path, batches=8))
        process.screen.press('C')
        process.wait_until(lambda: 'press Ctrl-C again' in process.read())
        time.sleep(0.4)
        process.screen.press('C')
        output = process.wait(INTERRUPTED)
    assert 'Traceback' not in output
    assert 'frame #' not in output
    assert 'ended at once by a second Ctrl-C: lost 8 steps since the start; resume with: ' in output


@pytest.mark.long
def test_a_terminal_that_closes_under_the_launcher_costs_nothing(endless, tmp_path):
    """The launcher dies of it."""
    with Launched(launch_command(2, endless)) as process:
        process.wait_until(has_trained(tmp_path))
        process.screen.close()
        assert process.code(DEADLINE_SEC) == -signal.SIGHUP
        deadline = time.monotonic() + DEADLINE_SEC
        while (last := list(read_json_lines(tmp_path / 'run/events.jsonl'))[-1])['event'] != 'end' and time.monotonic() < deadline:
            time.sleep(0.1)
    assert last['reason'] == 'Preempted'
    saved(tmp_path)


@pytest.mark.long
@LAUNCHERS
def test_a_killed_first_rank_is_named_last(endless, tmp_path, launcher, name):
    with Launched(launch_command(2, endless, launcher)) as process:
        process.wait_until(has_trained(tmp_path))
        killed = rank_of(process, 0)
        os.kill(killed, signal.SIGKILL)
        output = process.wait(256 - signal.SIGKILL)  # the launcher's: -9 as a byte
    assert 'frame #' not in output
    assert 'Traceback' not in output
    lines = [line for line in output.splitlines() if line.strip()]
    said = next(number for number, line in enumerate(lines) if line.startswith('this rank ends because '))
    assert f'rank 0 (process {killed} on ' in lines[said]
    assert f'resume with: {name} -n 2 train.py' in lines[said]
    assert lines[said + 1] == '(exit code 76, docs/reliability.md)'
    assert all('lobal rank' in line for line in lines[said + 2 :])  # the launcher's
