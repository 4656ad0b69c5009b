"""The fleet's demo at its smallest: a machine is killed, one job is poison; and nothing is left behind."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from PIL import Image

from tests.conftest import REPOSITORY, run_python

COMMAND = ['-m', 'diffusion.demo.fleet', '--jobs', '3', '--machines', '2', '--steps', '40']


@pytest.mark.timeout(900)
def test_all_jobs_are_done_and_a_killed_machines_too(tmp_path):
    out = tmp_path / 'out'
    (tmp_path / 'tmp').mkdir()
    printed = run_python(*COMMAND, '--out', out, '--base', tmp_path / 'none', TMPDIR=str(tmp_path / 'tmp')).stdout
    assert re.search(r'3 of 3 done, 1 machine killed, the poison job failed after \d attempts, \$0\.', printed)
    for expected in (
        'its data are wrong: 2 machines say so',
        'is killed (kill -9) while it trains',
        'not a readable JPEG',
        'The bill',
        'in all, as a provider bills',
    ):
        assert expected in printed, expected
    assert Image.open(out / 'images/0000.png').size == (32, 32)
    assert alive(out) == []
    assert left_behind(tmp_path, printed) == []
    for token in (out / 'tokens').iterdir():
        assert token.read_text() not in printed


@pytest.mark.timeout(300)
@pytest.mark.parametrize('number', [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long)])
def test_stopped_it_leaves_nothing(tmp_path, number):
    (tmp_path / 'tmp').mkdir()
    printed = ''
    command = [sys.executable, *COMMAND, '--out', tmp_path / 'out', '--base', tmp_path / 'none']
    environment = {**os.environ, 'TMPDIR': str(tmp_path / 'tmp')}
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment) as process:
        for line in process.stdout:
            printed += line
            if 'takes its place' in line:
                break
        assert len(alive(tmp_path / 'out')) >= 3
        process.send_signal(number)
        process.stdout.read()
    assert process.returncode == 128 + number
    deadline = time.monotonic() + 30
    while left := alive(tmp_path / 'out'):  # training ends with its machine, a moment later
        assert time.monotonic() < deadline, left
        time.sleep(0.2)
    assert left_behind(tmp_path, printed) == []


def alive(folder):
    """Command lines of processes that name the folder or work in it."""
    found = []
    for process in filter(str.isdigit, os.listdir('/proc')):
        try:
            words = Path(f'/proc/{process}/cmdline').read_text().split('\0')
            place = os.readlink(f'/proc/{process}/cwd')
        except OSError:
            continue
        if int(process) != os.getpid() and (str(folder) in place or any(str(folder) in word for word in words)):
            found.append(words)
    return found


def left_behind(tmp_path, printed):
    """Temporary files of the demo that are still there, but for PyTorch's own cache, which all processes of the user share."""
    postgres = Path(re.search(r'PostgreSQL at (/tmp/pg-\w+)', printed)[1])
    left = [path for path in (tmp_path / 'tmp').iterdir() if not path.name.startswith('torchinductor_')]
    return [*left, *([postgres] if postgres.exists() else [])]
